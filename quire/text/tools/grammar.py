"""A grammar of a whole answer, in llguidance's Lark: reasoning, then free text, then nothing but calls.

A marker that is one token of the vocabulary is named as such (`<[id]>`), so that it cannot be written in
letters, and free text cannot hold it either way. A marker that is plain text ends the text before it at its
last character (`lazy`).
"""

from __future__ import annotations

import json
from collections.abc import Callable

from quire.text.reasoning import ReasoningFormat

Mark = Callable[[str], str]
_ANY = "/(?s:.*)/"
_NO_BRACE = r"/[\s\x1c-\x1f]*([^\s\x1c-\x1f{](?s:.*))?/"  # what a bare call never begins with


def is_token(mark: str) -> bool:
    """True if the marker written so is a token."""
    return mark.startswith("<[")


def answer_rules(mark: Mark, marker: str, bare: bool, calls: str, required: bool, free: bool) -> list[str]:
    """Rule `answer`: what stands behind the reasoning. `calls` are rules, "" if there are to be none.

    Without `free`, the text is the grammar @content instead of free text, and calls stand alone.
    """
    opening, words = mark(marker), "TEXT" if free else "@content"
    begin = _NO_BRACE if bare and calls else _ANY
    rules = [f"TEXT: {begin}{_without(marker)}"] if free and not (required and calls) else []
    if not calls:
        return [f"answer: {words}", *rules]
    alone = f"{opening}? calls" if bare else f"{opening} calls"
    if required:
        return [f"answer: {alone}", calls]
    if not free:
        return [f"answer: {words} | {alone}", calls]
    if is_token(opening):
        behind = f"TEXT {opening} calls"
    else:
        behind = "opening calls"
        rules.append(f"opening[lazy]: TEXT {opening}")
    return [f"answer: TEXT | {behind}{' | calls' if bare else ''}", *rules, calls]


def reasoning_rules(mark: Mark, reasoning: ReasoningFormat | None, inside: bool, free: bool) -> list[str]:
    """Rule `start`: an answer, with reasoning before it if the model reasons; `inside`, it has begun."""
    if reasoning is None:
        return ["start: answer"]
    end, start = mark(reasoning.end), mark(reasoning.start)
    rules = [f"THOUGHT: {_ANY}{_without(reasoning.end)}"]
    rules.append(f"thought: THOUGHT {end}" if is_token(end) else f"thought[lazy]: THOUGHT {end}")
    gap = "" if free else r"/\n{0,2}/ "  # free text brings its own white space
    if inside:
        return [f"start: thought {gap}answer", *rules]
    if not is_token(start):
        rules.append(f"think[lazy]: {start}")
        start = "think"
    return [f"start: answer | {start} thought {gap}answer", *rules]


def with_content(rules: list[str], content: str | None) -> str:
    """The finished grammar. `content`, another one in Lark or llguidance's JSON, is what @content means."""
    lark = "\n".join(("%llguidance {}", *rules))
    if content is None:
        return lark
    parts = json.loads(content)["grammars"] if content.startswith("{") else [{"lark_grammar": content}]
    grammars = [{"name": "answer", "lark_grammar": lark}, parts[0] | {"name": "content"}, *parts[1:]]
    return json.dumps({"grammars": grammars})


def _without(marker: str) -> str:
    return f" & ~({_ANY} {json.dumps(marker)} {_ANY})" if marker else ""
