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


FORMATS = (
    ReasoningFormat("think", "<think>", "</think>"),  # DeepSeek, Qwen, GLM, Kimi and most others
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
)


def find_reasoning(source: str, chosen: str = "auto") -> ReasoningFormat | None:
    """Return the format whose closing mark is in the chat template, or the one `chosen` by name."""
    by_name = {known.name: known for known in FORMATS}
    if chosen in by_name:
        return by_name[chosen]
    if chosen not in ("auto", "none"):
        raise ConfigError(f"unknown reasoning parser {chosen!r}", f"known: auto, none, {', '.join(by_name)}")
    known = (known for known in FORMATS if known.end in source)
    return next(known, None) if chosen == "auto" else None
