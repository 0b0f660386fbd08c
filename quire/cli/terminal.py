"""Standard input, output and error: a terminal, a pipe, a full disk, or closed."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import textwrap
from typing import TextIO

from quire.cli.wrap import WordWrap
from quire.errors import escape

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
_DIM, _BOLD, _PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"


def prepare_streams() -> bool:
    """Replace closed streams by the null device. Return False if standard output was closed."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  open until the process ends, like all three
    closed = sys.stdout is None
    if closed:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # an answer may contain characters that an ASCII terminal cannot show
    return not closed


def drop_output(stream: TextIO) -> None:
    """Discard what could not be written; Python would try again, and fail again, at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def settle_notes() -> None:
    """Flush standard error, or discard its content: a lost note is not a failure."""
    try:
        sys.stderr.flush()
    except OSError:
        drop_output(sys.stderr)


def note(text: str) -> None:
    """Print a line about the answer to standard error, dim in a terminal. Discarded if that fails."""
    with contextlib.suppress(OSError):
        print(_styled(_in_lines(escape(text)), _DIM, sys.stderr), file=sys.stderr, flush=True)


def complain(message: str, hint: str | None = None) -> None:
    """Print an error and its hint to standard error, each on one line."""
    lines = [f"error: {escape(message)}", *([f"hint: {escape(hint)}"] if hint else ())]
    with contextlib.suppress(OSError):
        print(*map(_in_lines, lines), sep="\n", file=sys.stderr, flush=True)


def bold(text: str) -> str:
    """Return text in bold if standard output is a terminal."""
    return _styled(text, _BOLD, sys.stdout)


def _styled(text: str, style: str, stream: TextIO) -> str:
    """Return text in a style unless NO_COLOR or TERM=dumb disable it. rich is not imported for a pipe."""
    if not stream.isatty():
        return text
    from rich.console import Console

    console = Console(file=stream)
    plain = console.no_color or console.is_dumb_terminal or not console.is_terminal
    return text if plain else f"{style}{text}{_PLAIN}"


class AnswerWriter:
    """Writes an answer to a stream as it is generated, wrapped between words in a terminal, and dim if asked.

    In a terminal, control characters are replaced by visible symbols, so that a model cannot control it.
    """

    def __init__(self, stream: TextIO, *, dim: bool = False) -> None:
        self._stream, self._dim = stream, dim
        self._wrap = WordWrap(_columns) if stream.isatty() else None

    def write(self, text: str) -> None:
        """Write text, holding back the last word until it is complete."""
        self._print(self._wrap.push(text.translate(_PICTURES)) if self._wrap else text)

    def end(self) -> None:
        """Write the word that was held back."""
        self._print(self._wrap.flush() if self._wrap else "")

    def _print(self, text: str) -> None:
        shown = _styled(text, _DIM, self._stream) if self._dim and text else text
        print(shown, end="", file=self._stream, flush=True)


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _in_lines(text: str) -> str:
    """Wrap text for a terminal between words, or between the items of a list separated by dots."""
    if not sys.stderr.isatty():
        return text
    whole = text.replace(" ", "\xa0").replace("\xa0·\xa0", " · ") if " · " in text else text
    wrapped = textwrap.fill(whole, _columns(), break_long_words=False, break_on_hyphens=False)
    return wrapped.replace("\xa0", " ")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 token, 2 tokens."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
