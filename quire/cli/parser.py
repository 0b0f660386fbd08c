"""The command line as argparse sees it, and as Quire explains it: one error, one hint."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from quire import __version__
from quire.cli import batch, cache, inspect, probe, run, serve
from quire.cli.terminal import complain
from quire.errors import did_you_mean, shortened

EXAMPLES = """examples:
  quire run                                  chat with the small embedded model, no download
  quire run demo "Tell me a story about a fox and a lantern"
  quire run Qwen/Qwen3-0.6B --quantization int8
  echo "What is 3 + 4?" | quire run demo --json
  cat notes.txt | quire run demo "Summarize this."
  quire serve demo                           an OpenAI-compatible server at http://127.0.0.1:8000/v1
  quire inspect path/to/checkpoint           what it is, what it takes, whether it fits
  quire probe                                what this machine can do at most
  quire cache ls                             what is kept of quantized weights
  quire help run                             all flags of a command
"""


class Parser(argparse.ArgumentParser):
    """Takes flags by their full names; says what is wrong in two lines instead of the whole usage."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **options)
        self.allow_abbrev = False

    def print_help(self, file: Any = None) -> None:
        """argparse's own says nothing when the help cannot be written."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """`message` is argparse's own, or that of a type of ours, whose hint follows on a second line."""
        message, _, hint = message.removeprefix("argument ").partition("\nhint: ")
        self.refuse(message, hint or None)

    def refuse(self, message: str, hint: str | None = None) -> NoReturn:
        """End with exit status 2."""
        complain(message, hint or f"'{self.prog} --help' lists what there is")
        self.exit(2)

    def refuse_unknown(self, argument: str) -> NoReturn:
        """End with the flag nearest to an unknown one."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        near = did_you_mean(argument[:80].split("=")[0], flags) if argument.startswith("-") else None
        self.refuse(f"unknown argument {shortened(argument)!r}", near)


def parse(argv: list[str]) -> argparse.Namespace:
    """The namespace of one command: its flags, `function`, `parser`, and `words`, which are not flags.

    Words may stand before, between and after flags; after `--` everything is a word.
    """
    parser, commands = _make_parsers()
    name, *rest = argv or ["--help"]
    if name == "help":
        name, rest = (rest[0], ["--help"]) if rest else ("--help", [])
    if name not in commands:
        if not name.startswith("-"):
            parser.refuse(f"unknown command {shortened(name)!r}", did_you_mean(name[:80], commands))
        parser.parse_known_args([name])  # --help and --version end here
        parser.refuse_unknown(name)
    command = commands[name]
    end = rest.index("--") if "--" in rest else len(rest)
    args, unknown = command.parse_known_intermixed_args(rest[:end])
    if unknown:
        command.refuse_unknown(unknown[0])
    args.words += rest[end + 1 :]
    return args


def _make_parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole, which knows --help and --version, and those of the commands by name."""
    parser = Parser(
        prog="quire", description="Run large language models: fast, exact, explained.", epilog=EXAMPLES
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (run, serve, batch, inspect, probe, cache):
        command.add_parser(commands)
    return parser, dict(commands.choices)
