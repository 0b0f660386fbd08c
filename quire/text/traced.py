"""Strings that track the origin of each character, and a Jinja environment that renders with them.

A chat template mixes its own markers (`<|im_start|>`) with text of callers. Only the former may become
control tokens, so every character of a rendered prompt is *trusted* (written by the template, or part of
the tokenizer's special tokens) or not. The rule fails closed: a plain `str` is untrusted, only literals of
the template source start out trusted, and only the operations defined in `Traced` keep trust. Templates see
the real strings, so they print the same text as with any other renderer.

This file is part of the render process, which starts for every server: it imports Jinja alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn, SupportsIndex

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_join
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_eval_context


class Traced(str):
    """A string with one byte for each character: 1 if the template wrote it, 0 if a caller did."""

    __slots__ = ("_mask",)
    _mask: bytes

    def __new__(cls, text: str = "", mask: bytes | None = None) -> Traced:
        made = super().__new__(cls, text)
        made._mask = bytes(len(text)) if mask is None else mask
        return made

    def __str__(self) -> str:
        return self  # str(x) is how Jinja prints: it must not lose the mask

    def __add__(self, other: str) -> str:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return Traced(str.__mul__(self, count), self._mask * count)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = str.__getitem__(self, key)
        return Traced(text, self._mask[key] if isinstance(key, slice) else bytes((self._mask[key],)))

    def lstrip(self, chars: str | None = None) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> str:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def join(self, parts: Iterable[str]) -> str:
        pieces: list[str] = []
        for part in parts:
            if not isinstance(part, str):
                raise TypeError(f"join: expected str, got {type(part).__name__}")
            pieces += (self, part)
        return concat(pieces[1:])

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        pieces, at = [], 0
        for piece in str.split(self, sep, maxsplit):
            at = str.index(self, piece, at)
            pieces.append(self[at : at + len(piece)])
            at += len(piece) + len(sep or "")
        return pieces

    def replace(self, old: str, new: str, count: SupportsIndex | None = -1) -> str:
        times = -1 if count is None else count.__index__()
        if not old:
            return str.replace(self, old, new, times)
        return (new if isinstance(new, Traced) else Traced(new)).join(self.split(old, times))

    def __mod__(self, values: Any) -> str:
        given = values if isinstance(values, tuple) else (values,)
        pieces = self.split("%s")
        if "%" in "".join(pieces) or len(pieces) != len(given) + 1:
            return str.__mod__(self, values)  # other conversions: the right text, but untrusted
        filled = [part for pair in zip(pieces, map(str, given), strict=False) for part in pair]
        return concat([*filled, pieces[-1]])


def literal(text: str) -> Traced:
    """Return text as written by the template itself."""
    return Traced(text, b"\1" * len(text))


def mask_of(text: str) -> bytes:
    """Return one byte for each character, 1 where it is trusted."""
    return text._mask if isinstance(text, Traced) else bytes(len(text))


def concat(parts: Iterable[str]) -> str:
    """Join strings, keeping the origin of every character."""
    pieces = list(parts)
    return Traced("".join(pieces), b"".join(map(mask_of, pieces)))


class _TracingCodeGenerator(CodeGenerator):
    """Generator of template code whose string literals are trusted and whose `~` keeps masks."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(f"environment.literal({value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        # One child at a time: Jinja joins constants into plain strings, which would be untrusted.
        for child in node.nodes:
            text = _constant_text(child, frame.eval_ctx)
            if text is None:
                super().visit_Output(nodes.Output([child], lineno=child.lineno), frame)
            elif text:
                written = f"environment.literal({text!r})"
                send = f"yield {written}" if frame.buffer is None else f"{frame.buffer}.append({written})"
                self.writeline(send, child)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


def _constant_text(node: nodes.Expr, context: EvalContext) -> str | None:
    """Return what a template prints for a constant expression, or None for any other."""
    if isinstance(node, nodes.TemplateData):
        return node.data
    try:
        value = node.as_const(context)
    except Exception:  # nodes.Impossible, or an error that the template may never come to
        return None
    return str(context.environment.filters["escape"](value) if context.autoescape else value)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: marks answers for training, and here only prints them."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_print"), [], [], body).set_lineno(line)

    def _print(self, caller: Any) -> str:
        text: str = caller()
        return text


@pass_eval_context
def _join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    joined: str = do_join(context, value, d if isinstance(d, Traced) else Traced(d), attribute)
    return joined


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, but a prompt is not HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for, with traced strings."""

    code_generator_class = _TracingCodeGenerator
    literal = staticmethod(literal)
    concat = staticmethod(concat)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters.update(tojson=_tojson, join=_join)
        self.globals["raise_exception"] = _raise_exception

    def handle_exception(self, source: str | None = None) -> NoReturn:
        raise  # Jinja would rewrite the traceback, which is not reported, from files that it cannot open

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        # Jinja would return an undefined value, which prints as nothing; such a template is hostile.
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is not allowed")
