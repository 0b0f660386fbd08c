"""The command line parser, which reports an error as one message and one hint."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from quire.cli import (
    batch,
    bench,
    cache,
    deploy,
    inspect,
    page,
    plan,
    probe,
    quantize,
    replay,
    run,
    serve,
    simulate,
)
from quire.cli.option_types import TEXT
from quire.cli.options import check_option, in_flags
from quire.cli.terminal import complain
from quire.errors import did_you_mean, shortened
from quire.vllm_options import VLLM_OPTIONS

CONFIG = "YAML file with flags, such as 'max-num-seqs: 16'; flags on the command line take precedence"
EXAMPLES = """examples:
  quire run                                  chat with the embedded demo model (no download)
  quire run demo "Tell me a story about a fox and a lantern"
  quire run Qwen/Qwen3-0.6B --quantization int8
  echo "What is 3 + 4?" | quire run demo --json
  cat notes.txt | quire run demo "Summarize this."
  quire serve demo                           OpenAI-compatible server at http://127.0.0.1:8000/v1
  quire deploy ray demo --replicas 2         the same on a Ray cluster, by several engines
  quire batch in.jsonl -o out.jsonl          answer a file of requests in OpenAI's batch format
  quire inspect path/to/checkpoint           architecture, size, and whether it fits in memory
  quire quantize demo -o demo-int4           write a copy with weights of 4 or 8 bits, rounded with care
  quire plan Qwen/Qwen3-8B --machine L40S    predicted speed, what fits, and what reaches a goal
  quire probe                                measure this machine's memory bandwidth and arithmetic
  quire bench --goal "itl_p99<50ms"          the highest rate of requests that keeps a goal
  quire simulate demo --request-rate 4       predict the latencies of a load
  quire cache ls                             list the packed weights kept on disk
  quire help run                             show all flags of a command
  quire replay FILE                          repeat a recorded run of a server, and compare every step
  quire page --out site                      the server's page with a recorded demo, as files
  quire serve --config serve.yaml            read flags from a file
"""


class CommandParser(argparse.ArgumentParser):
    """A parser that takes flags by their full names only, and reports an error in two lines."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **options)
        self.allow_abbrev = False

    def print_help(self, file: Any = None) -> None:
        """Print the help. Raises OSError where it cannot be written, which argparse would pass over."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Report an error of argparse, or of an OptionType, whose hint follows on a second line."""
        message, _, hint = message.removeprefix("argument ").partition("\nhint: ")
        self.refuse(message, hint or None)

    def refuse(self, message: str, hint: str | None = None) -> NoReturn:
        """End with exit status 2."""
        complain(message, hint or f"'{self.prog} --help' lists all flags")
        self.exit(2)

    def flags(self) -> dict[str, argparse.Action]:
        """Return the flags that a configuration file may set, by long name without dashes."""
        named = {
            next(option for option in action.option_strings if option.startswith("--"))[2:]: action
            for action in self._actions
            if action.option_strings
        }
        return {name: action for name, action in named.items() if name not in ("help", "config")}

    def refuse_unknown(self, argument: str) -> NoReturn:
        """End with exit status 2; say what to use for an option of vLLM, or name the flag nearest."""
        flags = [option for action in self._actions for option in action.option_strings]
        flag = argument[:80].split("=")[0]
        near = did_you_mean(flag, flags) if argument.startswith("-") else None
        _, instead = VLLM_OPTIONS.get(flag.removeprefix("--").replace("-", "_"), (None, near))
        self.refuse(f"unknown argument {shortened(argument)!r}", in_flags(instead) if instead else None)


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the namespace of one command: its flags, `function`, `parser`, and `words`, which are not flags.

    Words may come before, between and after flags; after `--` everything is a word. Flags that are not given
    have the values of the file that --config names. Raises ConfigError for that file.
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
    if args.config is not None:
        from quire.cli.config_file import read_flags

        given = read_flags(args.config, command.flags(), _owners(commands), check_option)
        args, _ = command.parse_known_intermixed_args(rest[:end], argparse.Namespace(**given))
    args.words += rest[end + 1 :]
    return args


class PrintVersion(argparse.Action):
    """The flag --version, which looks for the version only when it is given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        from quire import __version__

        print(f"quire {__version__}")
        parser.exit()


def _owners(commands: dict[str, CommandParser]) -> dict[str, str]:
    """Return the commands that have each flag, in words."""
    owners: dict[str, list[str]] = {}
    for name, command in commands.items():
        for flag in command.flags():
            owners.setdefault(flag, []).append(f"quire {name}")
    return {flag: " and ".join(names) for flag, names in owners.items()}


def _make_parsers() -> tuple[CommandParser, dict[str, CommandParser]]:
    """Make the top-level parser, which knows --help and --version, and those of the commands by name."""
    parser = CommandParser(
        prog="quire",
        description="Run large language models in the terminal, as a server, or over a file of requests.",
        epilog=EXAMPLES,
    )
    leave = "print the version and leave"
    parser.add_argument("--version", action=PrintVersion, nargs=0, default=argparse.SUPPRESS, help=leave)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (
        *(run, serve, deploy, batch, bench, inspect, quantize, plan, simulate, probe, cache, replay, page),
    ):
        command.add_parser(commands)
    for made in commands.choices.values():
        made.add_argument("--config", type=TEXT, metavar="FILE", help=CONFIG)
    return parser, dict(commands.choices)
