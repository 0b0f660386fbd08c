"""The command `quire`: finds the subcommand, shows errors as one message and a hint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from quire import __version__
from quire.cli import inspect, run
from quire.errors import QuireError, did_you_mean

EXAMPLES = """examples:
  quire run                                  chat with the small embedded model, no download
  quire run demo "Tell me a story about a fox and a lantern"
  quire run Qwen/Qwen3-0.6B --quantization int8
  echo "What is 3 + 4?" | quire run demo --json
  quire inspect path/to/checkpoint           what it is, what it takes, whether it fits
"""


class _Parser(argparse.ArgumentParser):
    """Takes flags by their full names, and suggests the nearest for a mistyped one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.allow_abbrev = False

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args)
        if unknown:
            parser = parsed.parser if "parser" in parsed else self
            flags = [flag for action in parser._actions for flag in action.option_strings]
            near = did_you_mean(unknown[0].split("=")[0], flags) if unknown[0].startswith("-") else None
            hint = near or f"'{parser.prog} --help' lists what there is"
            parser.exit(2, f"error: unknown argument {unknown[0]!r}\nhint: {hint}\n")
        return parsed


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = _Parser(
        prog="quire",
        description="Run large language models: fast, exact, explained.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for command in (run, inspect):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command; exit status 0, 1 for an error that was explained, 2 for a wrong command line."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        sys.exit(0)
    try:
        sys.exit(args.function(args))
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe has left, which is no error
        sys.stderr.close()
        sys.exit(0)
