"""Flags of a load: lengths and arrivals of requests, as in `quire bench` and `quire simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from quire.cli.option_types import FRACTION, TEXT, WHOLE, OptionType
from quire.errors import ConfigError

AddFlag = Callable[..., argparse.Action]


def add_length_flags(add: AddFlag) -> None:
    """Add the flags of random requests and of recorded arrivals."""
    add("--random-input-len", type=WHOLE, metavar="N", help="tokens of prompts (default: 512)")
    add("--random-output-len", type=WHOLE, metavar="N", help="tokens of answers (default: 128)")
    text = "share by which both lengths vary around their means, such as 0.5 (default: 0)"
    add("--random-range-ratio", type=FRACTION, metavar="X", help=text)
    add("--random-prefix-len", type=WHOLE, metavar="N", help="further tokens that prompts share (default: 0)")
    add("--num-prefixes", type=WHOLE, metavar="N", help="number of different shared prefixes (default: 1)")
    text = "arrivals and lengths from a file: Azure's CSV, Mooncake's JSON lines, or JSON lines with "
    add("--arrivals", type=TEXT, metavar="FILE", help=text + "prompt_len, output_len and arrival_ms")
    add(
        "--speed",
        type=FRACTION,
        metavar="X",
        help="send --arrivals this many times as fast (default: 1)",
    )


def add_arrival_flags(add: AddFlag) -> None:
    """Add the flags of one rate or concurrency."""
    add("--request-rate", type=FRACTION, metavar="R", help="requests a second, by a Poisson process")
    add("--max-concurrency", type=WHOLE, metavar="N", help="maximum number of open requests")


def _goal(text: str) -> Any:
    from quire.goals import Goal

    try:
        return Goal.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error.message}\nhint: {error.hint}") from None


GOAL = OptionType("a goal", (str,), _goal)
