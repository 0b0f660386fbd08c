"""Draw docs/terminal.svg: a real session of `quire run` in a pseudo-terminal, as the README shows it.

    python scripts/terminal_picture.py [--out FILE]

The session is typed into the program, and what it writes is drawn unchanged. Speeds are those of the machine.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import select
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

OUT = Path(__file__).resolve().parents[1] / "docs" / "terminal.svg"
COLUMNS = 100
COMMAND = "quire run"
PROMPT = "\n>>> "
TYPED = (
    "Tell me a story about a fox and a lantern.",
    "What is 27 + 14?",
    "What is the capital of Norway?",
)
PASTE_MODE = re.compile(r"\x1b\[\?2004[hl]\r?")  # readline switches it around each prompt
TIMEOUT_S = 60.0

# rich's own picture loads its font from the network; this one takes whatever monospace font there is.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


class Session:
    """`quire run` in a pseudo-terminal of a fixed width."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (40, COLUMNS))
        self._process = subprocess.Popen(
            [sys.executable, "-m", *COMMAND.split()],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "QUIRE_OFFLINE": "1"},
        )
        os.close(slave)
        self.shown = ""

    def type(self, line: str) -> None:
        """Type a line once the prompt is there."""
        os.write(self._master, f"{line}\n".encode())

    def wait_for_prompt(self, number: int) -> None:
        """Read what is shown until that many prompts are in it."""
        while PASTE_MODE.sub("", self.shown).replace("\r", "").count(PROMPT) < number:
            ready, _, _ = select.select([self._master], [], [], TIMEOUT_S)
            if not ready:
                raise SystemExit(f"no prompt after {TIMEOUT_S:.0f} s; shown so far: {self.shown!r}")
            self.shown += os.read(self._master, 4096).decode(errors="replace")

    def close(self) -> None:
        """Leave with Ctrl-D."""
        os.write(self._master, b"\x04")
        self._process.wait(TIMEOUT_S)
        os.close(self._master)


def capture() -> str:
    """Hold the conversation and return what the terminal showed, up to the last prompt."""
    session = Session()
    for number, line in enumerate(TYPED, 1):
        session.wait_for_prompt(number)
        session.type(line)
    session.wait_for_prompt(len(TYPED) + 1)
    shown = session.shown
    session.close()
    plain = PASTE_MODE.sub("", shown).replace("\r", "")
    return f"$ {COMMAND}\n{plain.removesuffix(PROMPT)}"


def draw(shown: str) -> str:
    """Return the picture of a terminal that shows this text."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown))
    return console.export_svg(title=COMMAND, code_format=SVG, unique_id="quire")


def main() -> None:
    """Capture, draw, write."""
    parser = argparse.ArgumentParser(description="Draw a session of quire run.")
    parser.add_argument("--out", type=Path, default=OUT, help="file to write (default: docs/terminal.svg)")
    args = parser.parse_args()
    args.out.write_text(draw(capture()), encoding="utf-8")
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
