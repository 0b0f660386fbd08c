"""`quire simulate`: predict the latencies of a load without computing any token."""

from __future__ import annotations

import argparse
from typing import Any

from quire.cli.arguments import add_words, check_model
from quire.cli.fleet_flags import add_fleet_flags, check_fleet
from quire.cli.load_flags import GOAL, add_arrival_flags, add_length_flags
from quire.cli.option_types import FRACTION, TEXT, WHOLE
from quire.cli.options import add_engine_flags, add_server_flags, engine_options

DESCRIPTION = """Predict the latencies of a load on a model, without computing any token: the scheduler and
engine of quire serve run on a virtual clock, with steps as long as a law says. The report is that of
quire bench, in seconds instead of hours.

  quire simulate demo --request-rate 4         this machine; calibrated once, by running the model
  quire simulate demo --arrivals AzureLLMInferenceTrace_conv.csv.gz --max-num-seqs 16
  quire simulate Qwen/Qwen3-8B --machine L40S --request-rate 2
                                               a machine of the catalogue, at typical shares of its peaks
  quire simulate demo --fit run.json --request-rate 8
                                               a server as measured: by quire bench --request-rate 4
                                               --json run.json --save-detailed
  quire simulate demo --arrivals TRACE --replicas 8 --router prefix,two-choices
                                               several replicas: routers side by side
  quire simulate demo --arrivals TRACE --autoscale 2-20 --goal ttft<2s --html fleet.html
                                               as many as the goal needs, with plots (docs/scale.md)
Above 0.9 of saturation small errors of the law become large ones of waiting times: the report then says
how latencies change with steps that are 2% faster or slower.
"""
ENGINE = (
    "revision",
    "quantization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_prefill_tokens",
    "max_steps_in_flight",
    "itl_goal",
    "block_size",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "enable_prefix_caching",
    "scheduling_policy",
    "num_threads",
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "simulate",
        help="predict the latencies of a load, on this machine or another one",
        usage="quire simulate [MODEL] [flags]",
        description=DESCRIPTION,
    )
    add_words(parser, "MODEL    checkpoint folder, Hub id, or 'demo' (default)")
    add = parser.add_argument_group("time of steps").add_argument
    text = "machine of the catalogue, or words of its name (default: this one); 'quire plan --machines' lists"
    add("--machine", type=TEXT, metavar="NAME", help=f"{text} all")
    add("--law", type=TEXT, metavar="FILE", help="law of steps that --save-law wrote")
    text = "fit the law, and the delays of clients, to a run that 'quire bench --save-detailed' wrote"
    add("--fit", type=TEXT, metavar="FILE", help=text)
    text = "calibrate this machine again, instead of taking the law kept in the cache"
    add("--calibrate", action="store_true", default=None, help=text)
    add("--save-law", type=TEXT, metavar="FILE", help="write the law to FILE")
    add = parser.add_argument_group("requests").add_argument
    add_length_flags(add)
    add("--seed", type=WHOLE, metavar="N", help="seed of lengths and arrivals (default: 0)")
    add = parser.add_argument_group("load").add_argument
    text = "number of requests (default: 100, or what --duration allows)"
    add("--num-prompts", type=WHOLE, metavar="N", help=text)
    add("--duration", type=FRACTION, metavar="S", help="send requests for this time")
    add_arrival_flags(add)
    add("--goal", type=GOAL, metavar="GOAL", help="limits of latency that a good request keeps")
    add_fleet_flags(parser.add_argument_group("replicas").add_argument)
    add = parser.add_argument_group("report").add_argument
    add("--json", type=TEXT, metavar="FILE", help="write all figures to FILE")
    add("--html", type=TEXT, metavar="FILE", help="of replicas: write the report and its plots as a page")
    add("--save-detailed", action="store_true", default=None, help="with the times of every token")
    add_engine_flags(parser, names=ENGINE)
    add_server_flags(parser, ("max_queued_requests", "max_queued_tokens"))
    parser.set_defaults(function=simulate, parser=parser)


def simulate(args: argparse.Namespace) -> int:
    """Simulate a load and report it."""
    model, *more = args.words or [args.model or "demo"]
    if more:
        args.parser.refuse_unknown(more[0])
    check_model(model)
    from quire.cli.simulate_run import run
    from quire.config import SERVED_PREFILL_TOKENS, EngineConfig

    given = [f"--{name}" for name in ("law", "fit", "calibrate") if getattr(args, name)]
    if len(given) > 1:
        args.parser.refuse(f"{given[0]} and {given[1]} exclude each other", "give one of them")
    if args.machine and args.calibrate:
        args.parser.refuse(
            "--machine and --calibrate exclude each other", "only this machine can be measured"
        )
    check_fleet(args)
    options = engine_options(args)
    if not args.machine:
        options.setdefault("max_num_prefill_tokens", SERVED_PREFILL_TOKENS)  # as in quire serve
    return run(args, EngineConfig.from_keywords(model=model, **options))
