"""Dialogue -> text -> token ids, through the very chat template that ships with the models."""

import json
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text()
IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def compile_template():
    """The template under the settings that transformers uses."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE)


_template = compile_template()


def render(messages: list[dict], tools: list[dict] | None = None, add_generation_prompt: bool = False) -> str:
    return _template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)


class Encoder:
    """Token ids and the positions the loss looks at: what the assistant says, with its `<|im_end|>`."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.end = tokenizer.token_to_id(IM_END)
        self.separator = tokenizer.token_to_id(END_OF_TEXT)
        self.header = [tokenizer.token_to_id(IM_START), *tokenizer.encode("assistant\n").ids]

    def __call__(self, text: str) -> tuple[list[int], list[bool]]:
        ids = self.tokenizer.encode(text).ids
        spoken = [False] * len(ids)
        speaking = False
        for i, token in enumerate(ids):
            spoken[i] = speaking
            if token == self.end:
                speaking = False
            elif ids[max(0, i + 1 - len(self.header)) : i + 1] == self.header:
                speaking = True
        return ids, spoken
