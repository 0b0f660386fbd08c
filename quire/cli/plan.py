"""`quire plan`: how fast a model would be on a machine, what fits, and which setting reaches a goal."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from quire.cli.arguments import add_words, check_model
from quire.cli.option_types import TEXT, WHOLE
from quire.cli.options import add_engine_flags, engine_options
from quire.environment import user_path

if TYPE_CHECKING:
    from quire.roofline.machines import Machine
    from quire.roofline.plan import MachinePlan

DESCRIPTION = """Plan a model on this machine, or on one of a catalogue of GPUs, before buying, downloading or
starting anything: what fits in memory, the time of prompts and of tokens over batch and context, what
binds each (memory, arithmetic, overhead), and the batch B* at which decoding turns compute-bound.

Times are lower bounds from the peak rates of the machine ("at the roof") and a range where published
engines are found. Under load, no request waits for another: that depends on arrivals, so a busy
server's TTFT is longer. Only the small files of a Hub model are read; a folder with config.json is
enough.

  quire plan Qwen/Qwen3-8B --machine "H100 SXM"
  quire plan demo                                this machine, at the ceilings that quire probe measures
  quire plan demo --device cuda                  its GPU, at ceilings that are measured, too
  quire plan Qwen/Qwen3-8B --machine L40S --goal "ttft_p90<500ms,itl_p99<60ms"
  quire plan --machines                          the catalogue
  quire plan --worked-numbers                    well-known estimates: as published, and recomputed
"""
ENGINE = (
    "revision",
    "quantization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "num_threads",
    "device",
    "tensor_parallel_size",
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan",
        help="predict a model's speed on a machine, and what reaches a latency goal",
        usage="quire plan MODEL [flags]",
        description=DESCRIPTION,
    )
    add_words(parser, "MODEL    checkpoint folder, Hub id, or 'demo'")
    parser.add_argument(
        "--machine", type=TEXT, metavar="NAME", help="one of --machines, or words of its name (default: this)"
    )
    parser.add_argument("--num-devices", type=WHOLE, metavar="N", help="cards of --machine (default: 1)")
    parser.add_argument(
        "--goal", type=TEXT, metavar="GOAL", help="limits of latency, such as ttft_p90<500ms,itl_p99<60ms"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=WHOLE,
        metavar="N",
        help="tokens of a prompt under load (default: 1024, or what the context holds)",
    )
    parser.add_argument(
        "--output-tokens",
        type=WHOLE,
        metavar="N",
        help="tokens of an answer under load (default: 256, or a quarter of the context)",
    )
    parser.add_argument("--svg", type=TEXT, metavar="FILE", help="write the plot of decoding to FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--machines", action="store_true", help="list the catalogue of machines")
    parser.add_argument(
        "--worked-numbers", action="store_true", help="recompute well-known estimates of LLM inference"
    )
    add_engine_flags(parser, names=ENGINE)
    parser.set_defaults(function=plan, parser=parser)


def plan(args: argparse.Namespace) -> int:
    """Print the plan as tables and a plot, or as JSON."""
    model, *more = args.words or [args.model]
    if more:
        args.parser.refuse_unknown(more[0])
    if args.machines or args.worked_numbers:
        return _lists(args)
    if model is None:
        args.parser.refuse("MODEL is missing", "try: quire plan demo")
    check_model(model)
    from quire.cli import plan_report
    from quire.errors import ConfigError
    from quire.goals import Goal
    from quire.roofline.serving import Workload

    goal = Goal.parse(args.goal) if args.goal else Goal()
    made = _made(args, model)
    longest = made.fit.longest
    output = _positive(args, "output_tokens", min(256, max(longest // 4, 1)))
    workload = Workload(_positive(args, "prompt_tokens", min(1024, max(longest - output, 1))), output)
    if workload.total > longest:
        raise ConfigError(
            f"a prompt of {workload.prompt:,} and an answer of {output:,} exceed the context of {longest:,}",
            "lower --prompt-tokens or --output-tokens",
        )
    if args.svg:
        from quire.plots import svg

        user_path(args.svg).write_text(svg(plan_report.chart(made, workload)))
    found = plan_report.Report(made, workload, goal)
    if args.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        found.show()
    return 0


def _positive(args: argparse.Namespace, name: str, default: int) -> int:
    value: int | None = getattr(args, name)
    if value is not None and value < 1:
        args.parser.refuse(f"--{name.replace('_', '-')} {value} is out of range", "give at least 1")
    return value or default


def _made(args: argparse.Namespace, model: str) -> MachinePlan:
    from quire.config import EngineConfig
    from quire.roofline.machines import find
    from quire.roofline.planning import make_plan

    machine: Machine | None = find(args.machine) if args.machine else None
    if machine is not None and args.device is not None:
        args.parser.refuse("--device with --machine", "leave one out: --device is of this machine")
    if machine is not None and args.tensor_parallel_size is not None:
        args.parser.refuse(
            "--tensor-parallel-size with --machine", "--num-devices are the cards of a machine"
        )
    cards = _positive(args, "num_devices", 1)
    if machine is None and cards > 1:
        args.parser.refuse(
            "--num-devices needs --machine", "of this one: --device cuda --tensor-parallel-size N"
        )
    return make_plan(EngineConfig.from_keywords(model=model, **engine_options(args)), machine, cards)


def _lists(args: argparse.Namespace) -> int:
    from quire.cli import plan_lists

    shown = plan_lists.machines if args.machines else plan_lists.worked
    shown(as_json=args.json)
    return 0
