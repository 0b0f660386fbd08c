"""Types of options, shared by command-line flags and configuration files."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.config_option import is_numbered
from quire.errors import ConfigError, did_you_mean, shortened
from quire.goals import duration_ms

NOT_YET = ("gpu", "rocm", "hip", "mps", "metal", "xpu", "tpu")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OptionType:
    """The type of an option. argparse calls it with the text of a flag.

    `expected` describes its values; `in_file` are the types it may have in a configuration file.
    """

    expected: str
    in_file: tuple[type, ...]
    parse: Callable[[str], Any]

    def __call__(self, text: str) -> Any:
        return self.parse(text)


class Repeated(argparse.Action):
    """A flag that may be repeated. Its first use replaces the values from a configuration file."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*(earlier if isinstance(earlier, list) else ()), values])


def choice_of(
    choices: tuple[Any, ...],
    numbered: tuple[str, ...] = (),
    misread: tuple[str, ...] = (),
    instead: str | None = None,
) -> OptionType:
    """Return a type that accepts these values, and suggests the nearest one for others.

    `numbered` ones may also have a number: "cuda:1". For `misread` ones the hint is `instead`.
    """
    by_name = {str(choice): choice for choice in choices}

    def choose(text: str) -> Any:
        if text in by_name:
            return by_name[text]
        if is_numbered(text, numbered):
            return text
        if text.split(":")[0].lower() in NOT_YET:
            raise _refusal(
                f"{text!r} is not supported yet",
                "models run on the CPU, or with 'cuda' on NVIDIA GPUs, untried so far",
            )
        if text in misread:
            raise _refusal(f"{text!r} is not possible", instead)
        hint = did_you_mean(text[:80], by_name) or f"choose one of {', '.join(by_name)}"
        raise _refusal(f"{shortened(text)!r} is not possible", hint)

    return OptionType(f"one of {', '.join(by_name)}", tuple({str, *map(type, choices)}), choose)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _refusal(f"{shortened(text)!r} is not a whole number") from None


def _range(text: str) -> int | tuple[int, int]:
    if (match := re.fullmatch(r"(\d{1,6})-(\d{1,6})", text)) is None:
        return _whole(text)
    least, most = int(match[1]), int(match[2])
    return (least, most) if least != most else least


def _fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _refusal(f"{shortened(text)!r} is not a number") from None


def _size(text: str) -> int:
    if (match := _SIZE.fullmatch(text.strip())) is None:
        raise _refusal(f"{shortened(text)!r} is not a size", "give bytes, or a number with K, M or G: 512M")
    number, unit, binary = match.groups()
    power = " kmgt".index(unit.lower()) if unit else 0
    return round(float(number) * (1024 if binary else 1000) ** power)


def _duration(text: str) -> float:
    try:
        return duration_ms(text) / 1e3
    except ConfigError as error:
        raise _refusal(error.message, error.hint) from None


def _models(text: str) -> Any:
    raise _refusal("models cannot be given on the command line", "write `models:` in a --config file")


def _drafts(text: str) -> str:
    return "off" if text == "False" else text  # YAML reads off as false


def _refusal(message: str, hint: str | None = None) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{message}\nhint: {hint}" if hint else message)


TEXT = OptionType("text", (str,), str)
WHOLE = OptionType("a whole number", (int,), _whole)
RANGE = OptionType("a whole number, or two such as 2-8", (int, str), _range)
DRAFTS = OptionType("auto, off or the name of a model", (str, bool), _drafts)
FRACTION = OptionType("a number", (int, float), _fraction)
# 512M and 4G are in powers of 1000, as Quire prints them; 4Gi is in powers of 1024.
DURATION = OptionType("a duration such as 60ms or 1.5s", (str,), _duration)
SIZE = OptionType("a size such as 512M", (int, str), _size)
MODELS = OptionType("a mapping of names to flags", (dict,), _models)
