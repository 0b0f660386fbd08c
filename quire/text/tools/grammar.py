"""The grammar of a whole answer, for llguidance: reasoning, then free text, then nothing but calls.

A marker that is one token of the vocabulary is written as such (`<[id]>`), so that it cannot be spelled in
other tokens, and free text cannot contain it either way. A marker that is plain text ends the text before it
at its last character (`lazy`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from quire.text.reasoning import ReasoningFormat

_ANY = "/(?s:.*)/"
_BLANK = r"/[\s\x1c-\x1f]*/"  # white space as in str.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGrammar:
    """The parts that an answer may have. `mark` writes a marker in Lark, as a token or as text.

    `calls` are rules (see `quire.text.tools.format.ToolFormat`), "" if no calls are allowed. `content` is a
    grammar for the text, in Lark or llguidance's JSON; the answer is then either this text or calls.
    """

    mark: Callable[[str], str]
    marker: str = ""
    bare: str = ""
    calls: str = ""
    required: bool = False
    content: str | None = None
    reasoning: ReasoningFormat | None = None
    inside: bool = False  # the prompt has begun the reasoning
    wrapping: tuple[
        str, ...
    ] = ()  # marks that may be around the text: pairs of one before it and one after it

    def text(self) -> str:
        """Return the grammar in llguidance's JSON."""
        words = None if self.required else "TEXT" if self.content is None else "@content"
        rules = [*self._start(words), *self._answer(words), self._free_text() if words == "TEXT" else ""]
        return with_content("\n".join(filter(None, rules)), self.content if words else None)

    def _start(self, words: str | None) -> list[str]:
        """Return rule `start`: reasoning, if the model reasons, and the answer."""
        if self.reasoning is None:
            return ["start: answer"]
        start, end = self.mark(self.reasoning.start), self.mark(self.reasoning.end)
        rules = [f"THOUGHT: {_ANY} & ~({_ANY} {json.dumps(self.reasoning.end)} {_ANY})"]
        rules.append(f"thought{lazy(end)}: THOUGHT {end}")
        after = "thought answer" if words == "TEXT" else r"thought /\n{0,2}/ answer"
        if self.inside:
            return [f"start: {after}", *rules]
        return [f"start: answer | think {after}", f"think{lazy(start)}: {start}", *rules]

    def _answer(self, words: str | None) -> list[str]:
        """Return rule `answer`: all that follows the reasoning."""
        marker = self.mark(self.marker)
        alone = f"{marker}? calls" if self.bare else f"{marker} calls"
        said = self._said(words) if words else ""
        if not self.calls or words is None:
            return [f"answer: {alone if self.calls else said}", self.calls]
        if words == "@content":
            return [f"answer: {said} | {alone}", self.calls]
        bare = "calls | " if self.bare else ""
        return [f"answer: {said} | {bare}opening calls", f"opening{lazy(marker)}: TEXT {marker}", self.calls]

    def _said(self, words: str) -> str:
        """Return alternatives for the text of an answer, with marks around it or without."""
        marks = [*map(self.mark, self.wrapping)]
        pairs = zip(marks[::2], marks[1::2], strict=True)
        return " | ".join(
            (words, *(rf"/\n{{0,2}}/ {before} /\n?/ {words} (/\n?/ {after})?" for before, after in pairs))
        )

    def _free_text(self) -> str:
        """Return the terminal of free text: text that cannot be parsed as anything else."""
        not_bare = rf"/[\s\x1c-\x1f]*([^\s\x1c-\x1f\{self.bare}](?s:.*))?/"
        text = f"TEXT: {not_bare if self.bare and self.calls else _ANY}"
        if self.marker:
            text += f" & ~({_ANY} {json.dumps(self.marker)} {_ANY})"
        if self.reasoning is not None:
            text += f" & ~({_BLANK} {json.dumps(self.reasoning.start)} {_ANY})"
        return text


def with_content(rules: str, content: str | None) -> str:
    """Return llguidance's JSON for rules that refer to `@content`, a grammar in Lark or the same JSON."""
    grammars = [{"name": "answer", "lark_grammar": rules}]
    if content is not None:
        in_json = content.lstrip().startswith("{")
        parts = json.loads(content)["grammars"] if in_json else [{"lark_grammar": content}]
        grammars += [parts[0] | {"name": "content"}, *parts[1:]]
    return json.dumps({"grammars": grammars})


def lazy(marker: str) -> str:
    """Return the attribute of a rule that ends with this marker, in Lark."""
    return "" if marker.startswith("<[") else "[lazy]"
