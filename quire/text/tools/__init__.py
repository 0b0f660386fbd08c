"""A model's format of tool calls and reasoning, detected from its chat template.

From the format and a request's tools come a grammar, which allows only valid calls after the marker that
begins them, and an incremental parser of answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import ConfigError, RequestError
from quire.sampling_params import MAX_GRAMMAR_CHARACTERS
from quire.text.answer import AnswerParser, CallArguments, CallStart
from quire.text.chat_template import ChatTemplate
from quire.text.reasoning import ReasoningFormat, find_reasoning
from quire.text.tokenizer import Tokenizer
from quire.text.tools.cohere import CohereCommand, CommandR
from quire.text.tools.deepseek import DeepSeekV3, DeepSeekV31
from quire.text.tools.format import ToolFormat
from quire.text.tools.functions import Function, choose, read_functions
from quire.text.tools.gemma4 import Gemma4
from quire.text.tools.glm45 import Glm45
from quire.text.tools.grammar import AnswerGrammar
from quire.text.tools.granite import Granite
from quire.text.tools.harmony import Harmony, opened
from quire.text.tools.hermes import Hermes
from quire.text.tools.hunyuan import Hunyuan, HunyuanA13B
from quire.text.tools.kimi_k2 import KimiK2
from quire.text.tools.llama3_json import Llama3Json
from quire.text.tools.minimax_m2 import MiniMaxM2
from quire.text.tools.mistral import Mistral
from quire.text.tools.mistral_args import MistralArgs
from quire.text.tools.nemotron import NemotronJson
from quire.text.tools.phi4 import Phi4Functools, Phi4Mini
from quire.text.tools.pythonic import Lfm2, LlamaPythonic
from quire.text.tools.qwen_xml import QwenXml, SeedOss

# Tried in this order: the template of Hermes quotes that of Llama.
FORMATS: tuple[type[ToolFormat], ...] = (
    *(Hermes, QwenXml, SeedOss, Glm45, MiniMaxM2, Mistral, MistralArgs, DeepSeekV3, DeepSeekV31, KimiK2),
    *(CohereCommand, CommandR, NemotronJson, HunyuanA13B, Hunyuan, Harmony, Lfm2, Gemma4, Llama3Json),
    *(LlamaPythonic, Phi4Mini, Phi4Functools, Granite),
)

Tools = Sequence[Mapping[str, Any] | Function] | None


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The formats of tool calls and reasoning of one model; None if it has none, or they are unknown.

    With `needs_special_tokens`, some marks are special tokens: a request must not skip these in its text.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    token_ids: Mapping[str, int]  # of those marks that are tokens; the others are text
    needs_special_tokens: bool = False

    def grammar(
        self,
        tools: Tools,
        tool_choice: Any = "auto",
        parallel: bool = True,
        prompt: str = "",
        content: str | None = None,
    ) -> str | None:
        """Return the grammar of an answer to `prompt`, in llguidance's JSON; None if it may be anything.

        `content` is another grammar, which the text of the answer must follow: the answer is then either this
        text or calls. Raises RequestError for malformed tools, and if the model's format of calls is unknown.
        """
        functions = read_functions(tools)
        callable_, required = choose(functions, tool_choice)
        if callable_ and self.tools is None:
            hint = "leave tools out, or start the server with --tool-call-parser and the name of the format"
            raise RequestError("this model's chat template has no known format of tool calls", hint, "tools")
        if content is None and not (functions and self.tools):
            return None
        if whole := self._whole:
            calls = whole.grammar(callable_, parallel, self._mark) if callable_ else ""
            return self._checked(whole.answer_grammar(calls, required, content, prompt, self._mark))
        reasoning, inside = self._reasoning(prompt)
        answer = AnswerGrammar(
            mark=self._mark, content=content, reasoning=reasoning, inside=inside, wrapping=self._wrapping
        )
        if functions and self.tools:
            calls = self.tools.grammar(callable_, parallel, self._mark) if callable_ else ""
            marker, bare = self.tools.marker, self.tools.bare
            answer = replace(answer, marker=marker, bare=bare, calls=calls, required=required)
        return self._checked(answer.text())

    @staticmethod
    def _checked(text: str) -> str:
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            problem = f"the grammar of the tools has more than {MAX_GRAMMAR_CHARACTERS:,} characters"
            raise RequestError(problem, "give fewer tools, or shorter schemas", "tools")
        return text

    def answer_parser(self, tools: Tools, tool_choice: Any = "auto", prompt: str = "") -> AnswerParser:
        """Make a parser for one answer to `prompt`."""
        functions = read_functions(tools)
        callable_, _ = choose(functions, tool_choice)
        if whole := self._whole:
            reading = whole.reader(callable_)
            reading.begin(opened(prompt))
            return AnswerParser(reader=reading)
        reader = self.tools.reader(functions) if callable_ and self.tools else None
        return AnswerParser(*self._reasoning(prompt), reader, self._wrapping)

    def self_check(self, template: ChatTemplate) -> str | None:
        """Render a sample call and parse it; return a description of the problem, or None."""
        if self.tools is None:
            return None
        try:
            prompt, written = sample_call(template, self.tools.new_id(_SAMPLE_NAME))
        except RequestError as error:
            return f"{self.tools.name}: the chat template does not write tool calls: {error.message}"
        parser = self.answer_parser([SAMPLE_TOOL], prompt=prompt)
        events = parser.push(written) + parser.finish()
        names = [event.name for event in events if isinstance(event, CallStart)]
        text = "".join(event.text for event in events if isinstance(event, CallArguments))
        try:
            if names == [_SAMPLE_NAME] and json.loads(text) == _SAMPLE_ARGUMENTS:
                return None
        except ValueError:
            pass  # not JSON: as wrong as other arguments
        return f"{self.tools.name}: the chat template writes calls in another format, {written[:300]!r}"

    def _reasoning(self, prompt: str) -> tuple[ReasoningFormat | None, bool]:
        """Return the format of the reasoning that may follow, and True if the prompt has begun it."""
        if self.reasoning is None or prompt.rstrip().endswith(self.reasoning.end):
            return None, False
        return self.reasoning, prompt.rstrip().endswith(self.reasoning.start.rstrip())

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that may be single tokens of a vocabulary."""
        if self._whole:
            return self._whole.tokens
        return (
            *(self.tools.tokens if self.tools else ()),
            *(self.reasoning.marks if self.reasoning else ()),
        )

    @property
    def _whole(self) -> Harmony | None:
        """Return the format if it is one of whole answers."""
        if isinstance(self.tools, Harmony):
            return self.tools
        return Harmony("") if self.reasoning and self.reasoning.name == Harmony.name else None

    @property
    def _wrapping(self) -> tuple[str, ...]:
        return self.reasoning.wrapping if self.reasoning else ()

    def _mark(self, text: str) -> str:
        """Write a mark in Lark: the parts of it that are tokens as such, the others as text."""
        parts = re.split(f"({'|'.join(map(re.escape, self.token_ids)) or '(?!)'})", text)
        ids = self.token_ids
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part)


def output_format_of(
    templates: Mapping[str, str],
    tokenizer: Tokenizer | None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> OutputFormat:
    """Find the output format of a model with these chat templates (see ChatTemplate.templates).

    Formats are given by name; "auto" detects them from the templates, "none" takes everything as content.
    Raises ConfigError for an unknown name.
    """
    source = "\n".join(templates.values())
    tools, reasoning = _find_tools(source, tool_call_parser), find_reasoning(source, reasoning_parser)
    found = OutputFormat(tools, reasoning, {})
    if tokenizer is None:
        return found
    ids = {mark: number for mark in found.marks if (number := tokenizer.token_id(mark)) is not None}
    ids = {mark: number for mark, number in ids.items() if number in tokenizer.control_ids}
    return OutputFormat(tools, reasoning, ids, not tokenizer.special_ids.isdisjoint(ids.values()))


def _find_tools(source: str, chosen: str) -> ToolFormat | None:
    """Return the format of a chat template, or the one `chosen`: if several have that name, what fits."""
    named = [known for known in FORMATS if chosen in (known.name, *known.aliases)]
    if not named and chosen not in ("auto", "none"):
        names = dict.fromkeys(name for known in FORMATS for name in (known.name, *known.aliases))
        raise ConfigError(f"unknown tool call parser {chosen!r}", f"known: auto, none, {', '.join(names)}")
    matching = (known for known in named or FORMATS if known.matches(source))
    found = None if chosen == "none" else next(matching, named[0] if named else None)
    return None if found is None else found(source)


_SAMPLE_ARGUMENTS = {"city": 'Świdnica "Nowa" {1}', "days": [1, 2]}
_CITY = {"type": "string", "description": "Where"}
_DAYS = {"type": "array", "items": {"type": "integer"}, "description": "When"}
_PARAMETERS = {"type": "object", "properties": {"city": _CITY, "days": _DAYS}, "required": ["city"]}
_SAMPLE_NAME = "get_weather"
_FUNCTION = {"name": _SAMPLE_NAME, "description": "Tells the weather.", "parameters": _PARAMETERS}
SAMPLE_TOOL = {"type": "function", "function": _FUNCTION}


def sample_call(template: ChatTemplate, call_id: str) -> tuple[str, str]:
    """Return a prompt that asks for a call, and what a chat template writes for the call after it.

    Some prompts have more than a conversation that goes on: a mark that opens the reasoning, or a last
    request. Then the prompt is what both have, up to a mark's end.
    """
    user = {"role": "user", "content": "What will the weather be?"}
    function = {"name": _SAMPLE_NAME, "arguments": _SAMPLE_ARGUMENTS}
    call = {"id": call_id, "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = template.render([user], [SAMPLE_TOOL]).text
    whole = template.render([user, answer], [SAMPLE_TOOL], add_generation_prompt=False).text
    if not whole.startswith(prompt):
        pairs = enumerate(zip(prompt, whole, strict=False))
        common = prompt[: next((place for place, (one, other) in pairs if one != other), None)]
        prompt = common[: max(map(common.rfind, ">]\n")) + 1]
    return prompt, whole[len(prompt) :]
