"""Standard input, output and error, whatever they are: a terminal, a pipe, a full disk, or closed."""

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
    """Put the empty device where a stream is closed. False when there is nowhere to write an answer."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  for as long as the process lives, as all three
    closed = sys.stdout is None
    if closed:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what an ASCII terminal cannot show
    return not closed


def drop_output(stream: TextIO) -> None:
    """Forget what could not be written, or Python would try again, and complain, while it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def settle_notes() -> None:
    """Write out what standard error still holds, or forget it: a lost note fails nobody."""
    try:
        sys.stderr.flush()
    except OSError:
        drop_output(sys.stderr)


def note(text: str) -> None:
    """A line about the answer, not of it: to standard error, dim in a terminal. Lost if none can be had."""
    with contextlib.suppress(OSError):
        print(_styled(_in_lines(escape(text)), _DIM, sys.stderr), file=sys.stderr, flush=True)


def complain(message: str, hint: str | None = None) -> None:
    """An error, and what to do about it, to standard error: a line each, whatever they quote."""
    lines = [f"error: {escape(message)}", *([f"hint: {escape(hint)}"] if hint else ())]
    with contextlib.suppress(OSError):
        print(*map(_in_lines, lines), sep="\n", file=sys.stderr, flush=True)


def bold(text: str) -> str:
    """Bold when standard output is a terminal."""
    return _styled(text, _BOLD, sys.stdout)


def _styled(text: str, style: str, stream: TextIO) -> str:
    """rich knows what switches styles off: NO_COLOR, TERM=dumb. It is not imported for a pipe."""
    if not stream.isatty():
        return text
    from rich.console import Console

    console = Console(file=stream)
    plain = console.no_color or console.is_dumb_terminal or not console.is_terminal
    return text if plain else f"{style}{text}{_PLAIN}"


class AnswerWriter:
    """Writes an answer to standard output as it comes; in a terminal in lines that end between words.

    There, control characters become pictures of themselves: a model must not steer it.
    """

    def __init__(self) -> None:
        self._wrap = WordWrap(_columns) if sys.stdout.isatty() else None

    def write(self, text: str) -> None:
        """Write what is there of it; the last word waits for its end."""
        print(self._wrap.push(text.translate(_PICTURES)) if self._wrap else text, end="", flush=True)

    def end(self) -> None:
        """Write what waits."""
        print(self._wrap.flush() if self._wrap else "", end="", flush=True)


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _in_lines(text: str) -> str:
    """For a terminal, lines that end between words, or between the parts of a list with dots."""
    if not sys.stderr.isatty():
        return text
    whole = text.replace(" ", "\xa0").replace("\xa0·\xa0", " · ") if " · " in text else text
    wrapped = textwrap.fill(whole, _columns(), break_long_words=False, break_on_hyphens=False)
    return wrapped.replace("\xa0", " ")


def counted(number: int, noun: str) -> str:
    """1 token, 2 tokens."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
