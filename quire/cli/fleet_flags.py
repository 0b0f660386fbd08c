"""Flags of the replicas of `quire simulate`."""

from __future__ import annotations

import argparse
import math
import re

from quire.cli.load_flags import AddFlag
from quire.cli.option_types import FRACTION, TEXT, WHOLE, choice_of

SCALERS = ("goal", "queue-length")
NAMES = (
    "replicas",
    "router",
    "prefill_replicas",
    "autoscale",
    "scaler",
    "open_per_replica",
    "start_up",
    "fail",
)


def add_fleet_flags(add: AddFlag) -> None:
    """Add the flags."""
    text = "number of replicas, each with the whole machine; with --autoscale, those at the beginning"
    add("--replicas", type=WHOLE, metavar="N", help=f"{text} (default: 1)")
    text = "which replica gets a request: by predicted time to first token (prefix), in turns (round-robin), "
    text += "the less loaded of two (two-choices), or the one with most of the prompt cached (oracle); "
    text += "several names, separated by commas, are compared (default: prefix)"
    add("--router", type=TEXT, metavar="NAMES", help=text)
    text = (
        "how many of --replicas compute prompts only, and send their blocks to the others; several numbers, "
    )
    add("--prefill-replicas", type=TEXT, metavar="P[,P...]", help=text + "separated by commas, are compared")
    text = "rate at which a replica sends or receives such blocks, in 10^9 bits a second (default: 10)"
    add("--link-gbit", type=FRACTION, metavar="X", help=text)
    text = "start and drain replicas as the load needs them, between MIN and MAX"
    add("--autoscale", type=TEXT, metavar="MIN-MAX", help=text)
    text = "decides how many: goal, by predicted violations of the limits of --goal; queue-length, by open "
    add("--scaler", type=choice_of(SCALERS), metavar="NAME", help=text + "requests (default: goal)")
    text = "open requests for each replica that --scaler queue-length aims at (default: 4)"
    add("--open-per-replica", type=FRACTION, metavar="X", help=text)
    text = "seconds that a replica takes to start: loading the model (default: 60)"
    add("--start-up", type=FRACTION, metavar="S", help=text)
    text = "seconds after which a replica dies, several separated by commas; its requests go on elsewhere"
    add("--fail", type=TEXT, metavar="S[,S...]", help=text)


def check_fleet(args: argparse.Namespace) -> None:
    """Replace the texts of the flags by their values; refuse those that say nothing."""
    refuse = args.parser.refuse
    args.is_fleet = any(getattr(args, name) is not None for name in NAMES)
    if args.autoscale is not None:
        found = re.fullmatch(r"(\d{1,6})-(\d{1,6})", args.autoscale)
        least, most = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= least <= most:
            refuse(f"--autoscale {args.autoscale} is not a range", "give the least and the most: 2-20")
        args.autoscale = least, most
        if args.scaler != "queue-length" and not (args.goal and _has_ttft(args)):
            refuse("--autoscale needs to know the goal", "give one for the first token: --goal 'ttft<2s'")
    else:
        for name in ("scaler", "open_per_replica"):
            if getattr(args, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                refuse(f"{flag} says how --autoscale decides", "give --autoscale MIN-MAX as well")
    if args.open_per_replica is not None and args.scaler != "queue-length":
        refuse("--open-per-replica is for --scaler queue-length", "give --scaler queue-length as well")
    if args.fail is not None:
        if not re.fullmatch(r"\d+(\.\d*)?(,\d+(\.\d*)?)*", args.fail):
            refuse(f"--fail {args.fail} is not a list of seconds", "separate them by commas: --fail 30,90.5")
        args.fail = tuple(map(float, args.fail.split(",")))
    if args.replicas is not None and args.replicas < 1:
        refuse(f"--replicas {args.replicas} is out of range", "give 1 or more")
    if args.router is not None:
        from quire.simulation.fleet_run import ROUTERS

        args.router = args.router.split(",")
        unknown = [name for name in args.router if name not in ROUTERS]
        if unknown:
            refuse(f"--router {unknown[0]} is not known", f"there are {', '.join(ROUTERS)}")
    _check_numbers(args)
    _check_apart(args)
    if args.html and not args.is_fleet:
        refuse("--html is for several replicas", "give --replicas or --autoscale")


def _check_numbers(args: argparse.Namespace) -> None:
    for name, may_be_0 in (("open_per_replica", False), ("link_gbit", False), ("start_up", True)):
        value = getattr(args, name)
        if value is not None and not (0 < value < math.inf or (value == 0 and may_be_0)):
            flag = f"--{name.replace('_', '-')}"
            args.parser.refuse(f"{flag} {value:g} is out of range", "give a number above 0")


def _check_apart(args: argparse.Namespace) -> None:
    refuse, given = args.parser.refuse, args.prefill_replicas
    if given is None:
        if args.link_gbit is not None:
            refuse("--link-gbit says how fast blocks of prompts move", "give --prefill-replicas as well")
        return
    if args.autoscale is not None or args.fail is not None:
        refuse("--prefill-replicas is for a fixed number of replicas", "leave out --autoscale and --fail")
    if (args.max_steps_in_flight or 1) > 1:
        refuse("--prefill-replicas is simulated with one step in flight", "leave out --max-steps-in-flight")
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", given):
        refuse(f"--prefill-replicas {given} is not a list of numbers", "separate them by commas: 1,2,3")
    args.prefill_replicas = [*map(int, given.split(","))]
    if max(args.prefill_replicas) >= (args.replicas or 1):
        refuse(f"--prefill-replicas {given} leaves none to answer", "give fewer than --replicas")


def _has_ttft(args: argparse.Namespace) -> bool:
    return any(limit.measure == "ttft" for limit in args.goal.limits)
