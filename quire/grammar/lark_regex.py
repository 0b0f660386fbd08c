"""Conversion of Lark grammars without recursion into one regular expression.

A tool may take text that a Lark grammar describes. The text is part of a JSON string, which a schema can hold
to a regular expression (`pattern`): so all rules are expanded into `start`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MAX_SOURCE = 1 << 16  # characters of a grammar, and of its expression
MAX_WRITTEN = 1 << 22  # characters that are copied during expansion
MAX_NESTING = 32

# The part of Lark's `common` that grammars of tools use.
_COMMON = {
    "CNAME": r"[_A-Za-z][_A-Za-z0-9]*",
    "CR": r"\r",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_INT": "[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_TOKENS = re.compile(
    r"""(?P<skip>//[^\n]*|[ \t\r]+)
    |(?P<line>\n)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<number>[0-9]+)
    |(?P<sign>->|\.\.|[|()\[\]*+?~:.!%,])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "b": "\b", "0": "\0"}


class NotRegular(ValueError):
    """The grammar is recursive, too large, or uses unsupported syntax."""


class _Token(NamedTuple):
    kind: str
    text: str


def as_regex(source: str) -> str:
    """Return an expression that matches exactly the texts of a grammar. Raises NotRegular."""
    if len(source) > MAX_SOURCE:
        raise NotRegular(f"it has more than {MAX_SOURCE} characters")
    definitions, imported = _read(_tokens(source))
    if "start" not in definitions:
        raise NotRegular("it has no rule start")
    return _Writer(definitions, imported).named("start")


def _tokens(source: str) -> list[_Token]:
    tokens, at = [_Token("line", "\n")], 0
    while at < len(source):
        match = _TOKENS.match(source, at)
        if match is None or match.lastgroup is None:
            raise NotRegular(f"{source[at : at + 20]!r} is not understood")
        if match.lastgroup != "skip":
            tokens.append(_Token(match.lastgroup, match[0]))
        at = match.end()
    return tokens


_HEAD = re.compile(r"line (?:[?!] )*name (?:\. number )?: ")


def _read(tokens: Sequence[_Token]) -> tuple[dict[str, list[_Token]], dict[str, str]]:
    """Return the definitions by name, and the expressions of imported terminals."""
    definitions: dict[str, list[_Token]] = {}
    imported: dict[str, str] = {}
    outside: list[_Token] = []
    body, at = outside, 0
    while at < len(tokens):
        words = [token.text if token.kind == "sign" else token.kind for token in tokens[at : at + 8]]
        if words[:2] == ["line", "%"]:
            end = next((i for i in range(at + 1, len(tokens)) if tokens[i].kind == "line"), len(tokens))
            imported |= _directive([token.text for token in tokens[at + 2 : end]])
            body, at = outside, end
        elif head := _HEAD.match(" ".join(words) + " "):
            length = head[0].count(" ")
            (name,) = [token.text for token in tokens[at : at + length] if token.kind == "name"]
            if name in definitions:
                raise NotRegular(f"{name[:64]!r} is defined twice")
            definitions[name] = body = []
            at += length
        else:
            if tokens[at].kind != "line":
                body.append(tokens[at])
            at += 1
    if outside:
        raise NotRegular(f"{outside[0].text[:40]!r} is out of place")
    return definitions, imported


def _directive(words: list[str]) -> dict[str, str]:
    """Return the expressions of the names that `%import common...` defines."""
    if words[:3] != ["import", "common", "."] and words[:3] != ["import", "common", "("]:
        raise NotRegular(f"%{' '.join(words)[:40]} is not supported")
    names = [word for word in words[3:] if word not in (",", ")")]
    known, own = names, names
    if len(names) == 3 and names[1] == "->":
        known, own = names[:1], names[2:]
    if missing := [name for name in known if name not in _COMMON]:
        raise NotRegular(f"%import common.{missing[0][:40]} is not supported")
    return {name: _COMMON[common] for name, common in zip(own, known, strict=True)}


class _Writer:
    """Expansion of definitions into each other."""

    def __init__(self, definitions: Mapping[str, list[_Token]], imported: Mapping[str, str]) -> None:
        self._definitions = definitions
        self._done = dict(imported)
        self._open: list[str] = []
        self._num_written = 0

    def join(self, parts: Sequence[str], between: str = "") -> str:
        """Join parts. Raises NotRegular if the result is too long."""
        length = sum(map(len, parts)) + len(parts) * len(between)
        self._num_written += length
        if length > MAX_SOURCE or self._num_written > MAX_WRITTEN:
            raise NotRegular(f"expanded, it has more than {MAX_SOURCE} characters")
        return between.join(parts)

    def named(self, name: str) -> str:
        """Return the expression of a rule or a terminal."""
        if name in self._done:
            return self._done[name]
        if name in self._open:
            raise NotRegular(f"{name[:64]!r} is recursive")
        if name not in self._definitions:
            raise NotRegular(f"{name[:64]!r} is not defined")
        if len(self._open) >= MAX_NESTING:
            raise NotRegular(f"its rules are nested more than {MAX_NESTING} deep")
        self._open.append(name)
        body = _Body(self, self._definitions[name])
        written = body.choice(0)
        body.expect_end()
        self._open.pop()
        self._done[name] = written
        return written


class _Body:
    """Parser of one definition, which returns it as an expression."""

    def __init__(self, writer: _Writer, tokens: list[_Token]) -> None:
        self._writer = writer
        self._tokens = tokens
        self._at = 0

    def expect_end(self) -> None:
        if self._at < len(self._tokens):
            raise NotRegular(f"{self._tokens[self._at].text[:40]!r} is out of place")

    def choice(self, depth: int) -> str:
        """Parse alternatives, up to the end or a closing bracket."""
        if depth > MAX_NESTING:
            raise NotRegular(f"its brackets are nested more than {MAX_NESTING} deep")
        found = [self._sequence(depth)]
        while self._take("|"):
            found.append(self._sequence(depth))
        return self._writer.join(("(?:", self._writer.join(found, "|"), ")")) if len(found) > 1 else found[0]

    def _sequence(self, depth: int) -> str:
        parts = []
        while self._at < len(self._tokens) and self._tokens[self._at].text not in ("|", ")", "]", "->"):
            parts.append(self._repeated(self._atom(depth)))
        if self._take("->") and self._next().kind != "name":
            raise NotRegular("an alias has no name")
        return self._writer.join(parts)

    def _atom(self, depth: int) -> str:
        kind, text = self._next()
        if kind == "name":
            return self._writer.named(text)
        if kind == "regex":
            return _expression(text)
        if kind == "string":
            if self._take(".."):
                return f"[{_in_class(_literal(text))}-{_in_class(_literal(self._next().text))}]"
            exact = re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", _literal(text))
            return f"(?i:{exact})" if text.endswith("i") else exact
        if text not in ("(", "["):
            raise NotRegular(f"{text[:40]!r} is out of place")
        inner = self.choice(depth + 1)
        if not self._take(")" if text == "(" else "]"):
            raise NotRegular("a bracket is not closed")
        return self._writer.join(("(?:", inner, ")?")) if text == "[" else inner

    def _repeated(self, atom: str) -> str:
        for sign in ("*", "+", "?"):
            if self._take(sign):
                return self._writer.join(("(?:", atom, ")", sign))
        if not self._take("~"):
            return atom
        low = high = self._number()
        if self._take(".."):
            high = self._number()
        return self._writer.join(("(?:", atom, f"){{{low},{high}}}"))

    def _number(self) -> str:
        kind, text = self._next()
        if kind != "number" or len(text) > 4:
            raise NotRegular(f"{text[:40]!r} is not a number of repetitions")
        return text

    def _next(self) -> _Token:
        if self._at >= len(self._tokens):
            raise NotRegular("a definition breaks off")
        self._at += 1
        return self._tokens[self._at - 1]

    def _take(self, sign: str) -> bool:
        found = self._at < len(self._tokens) and self._tokens[self._at] == _Token("sign", sign)
        self._at += found
        return found


def _literal(text: str) -> str:
    """Return the value of a string literal of the grammar."""

    def unescaped(match: re.Match[str]) -> str:
        code = match[1] or match[2]
        return chr(int(code, 16)) if code else _CONTROL.get(match[3], match[3])

    if not text.startswith('"'):
        raise NotRegular(f"{text[:40]!r} is not a string")
    return _ESCAPE.sub(unescaped, text.removesuffix("i")[1:-1])


def _in_class(text: str) -> str:
    if len(text) != 1:
        raise NotRegular(f"{text[:40]!r} cannot be the end of a range")
    return re.sub(r"[\\\]\[^&~-]", r"\\\g<0>", text)


def _expression(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    flags = "".join(sorted(set(flags) & set("imsx")))
    return f"(?{flags}:" + body.replace(r"\/", "/") + ")"
