"""Formats of reasoning: the marks around what a model writes before its answer."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning, which comes at most once, at the beginning of an answer."""

    name: str
    start: str
    end: str
    aliases: tuple[str, ...] = ()  # the names that vLLM has for it
    wrapping: tuple[str, ...] = ()  # marks around the text of the answer, in pairs, and its calls perhaps
    token: str = ""  # the part of `start` that may be a token, unless it is all of it
    sign: str = ""  # what a chat template has, too, beside the closing mark

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.token or self.start, self.end, *self.wrapping)


_OF_THINK = (
    *("deepseek_r1", "deepseek_v3", "glm45", "glm47", "granite_thinking_parser", "kimi_k2", "minimax_m2"),
    *("nemotron_v3", "olmo3", "qwen3", "step3"),
)
FORMATS = (
    ReasoningFormat(
        "ernie45", "<think>", "</think>", wrapping=("<response>", "</response>"), sign="<response>"
    ),
    ReasoningFormat(
        "hunyuan_a13b", "<think>", "</think>", wrapping=("<answer>", "</answer>"), sign="<tool_calls>"
    ),
    ReasoningFormat("think", "<think>", "</think>", _OF_THINK),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("cohere_command3", "cohere_command4"),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ReasoningFormat("gemma4", "<|channel>thought\n", "<channel|>", token="<|channel>"),
    # An answer in this format is parsed as a whole (see quire.text.tools.harmony).
    ReasoningFormat("harmony", "<|channel|>", "<|end|>", ("openai_gptoss",), sign="<|channel|>analysis"),
)


def find_reasoning(source: str, chosen: str = "auto") -> ReasoningFormat | None:
    """Return the first format whose marks are in the chat template, or the one `chosen` by name."""
    by_name = {name: known for known in FORMATS for name in (known.name, *known.aliases)}
    if chosen in by_name:
        return by_name[chosen]
    if chosen not in ("auto", "none"):
        raise ConfigError(f"unknown reasoning parser {chosen!r}", f"known: auto, none, {', '.join(by_name)}")
    known = (known for known in FORMATS if known.sign in source and known.end in source)
    return next(known, None) if chosen == "auto" else None
