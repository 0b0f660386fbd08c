"""`quire bench`: put load on a server, and report latencies, throughput and goodput."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from quire.cli.load_flags import GOAL, AddFlag, add_arrival_flags, add_length_flags
from quire.cli.option_types import FRACTION, TEXT, WHOLE, OptionType, Repeated, choice_of

URL = "http://127.0.0.1:8000"
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
DESCRIPTION = """Put load on a server of the OpenAI API, and report latencies, throughput and goodput as its
clients see them. Flags and figures are those of `vllm bench serve` where it has them.

  quire bench                              100 random prompts at once to http://127.0.0.1:8000
  quire bench --max-concurrency 16         closed loop: 16 requests at a time
  quire bench --request-rate 4             open loop: 4 requests a second at random moments
  quire bench --arrivals AzureLLMInferenceTrace_conv.csv.gz --speed 0.1 --duration 60
                                           open loop: arrivals and lengths of a file
  quire bench --rates 1,2,4,8 --svg latency.svg
                                           latencies at several rates, and their plot
  quire bench --goal "ttft_p90<500ms,itl_p99<60ms"
                                           the highest rate that keeps a goal
  quire bench demo --goal "itl<20ms" -- --quantization int8
                                           start `quire serve demo --quantization int8` for it
  quire bench demo --trace run.pftrace     and what its engine did, for ui.perfetto.dev

"""
WORDS = """MODEL    start `quire serve MODEL` for the test, with the flags that follow `--`; without MODEL,
         the server at --base-url is tested"""


def add_parser(commands: Any) -> None:
    """Register the command."""
    from quire.bench.definitions import PERCENTILES, glossary

    parser = commands.add_parser(
        "bench",
        help="load a server, and find the highest rate that keeps a latency goal",
        usage="quire bench [MODEL] [flags] [-- flags of quire serve]",
        description=DESCRIPTION,
        epilog=f"measures:\n{glossary()}\n  ({PERCENTILES})",
    )
    words = parser.add_argument_group("arguments", WORDS)
    words.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    _add_server_flags(parser.add_argument_group("server").add_argument)
    _add_request_flags(parser.add_argument_group("requests").add_argument)
    _add_load_flags(parser.add_argument_group("load").add_argument)
    _add_report_flags(parser.add_argument_group("report").add_argument)
    parser.set_defaults(function=bench, parser=parser)


def _add_server_flags(add: AddFlag) -> None:
    text = f"address of the server (default: {URL}); its key is read from OPENAI_API_KEY or QUIRE_API_KEY"
    add("--base-url", type=TEXT, metavar="URL", help=text)
    add("--model", type=TEXT, metavar="NAME", help="model to ask for (default: the first that it lists)")
    text = f"endpoint to call (default: {ENDPOINTS[0]})"
    add("--endpoint", type=choice_of(ENDPOINTS), metavar="PATH", help=text)
    add("--timeout", type=FRACTION, metavar="S", help="limit of one request in seconds (default: 600)")
    text = "ask for whole answers; then only the end-to-end latency is meaningful"
    add("--no-stream", action="store_true", default=None, help=text)


def _add_request_flags(add: AddFlag) -> None:
    add_length_flags(add)
    text = 'prompts from a file: JSON lines with "prompt" or "messages", or ShareGPT\'s JSON'
    add("--dataset-path", type=TEXT, metavar="FILE", help=text)
    text = "shorten the requests of --arrivals to this many tokens (default: what the server can take)"
    add("--max-model-len", type=WHOLE, metavar="N", help=text)
    add("--temperature", type=FRACTION, metavar="X", help="sampling temperature (default: 0)")
    text = "generate all output tokens (default: on for Quire, vLLM and SGLang, which support it)"
    add("--ignore-eos", action=argparse.BooleanOptionalAction, help=text)
    add("--extra-body", type=_OBJECT, metavar="JSON", help="further fields of every request")
    text = "seed of lengths and arrivals; prompts are new in every run, so that none is cached (default: 0)"
    add("--seed", type=WHOLE, metavar="N", help=text)


def _add_load_flags(add: AddFlag) -> None:
    text = (
        "number of requests (default: 100, or what --duration allows); with --rates and --goal, of each trial"
    )
    add("--num-prompts", type=WHOLE, metavar="N", help=text)
    text = "send requests for this time; with --rates and --goal, at least this long (default: 10)"
    add("--duration", type=FRACTION, metavar="S", help=text)
    add_arrival_flags(add)
    add("--inject-long-prompt", type=WHOLE, metavar="N", help="send a prompt of N tokens beside the load")
    add("--at", type=FRACTION, metavar="S", help="when to send it (default: 5)")
    text = "requests a second of several trials, such as 1,2,4"
    add("--rates", type=_RATES, metavar="R,R", help=text)
    text = "limits of latency; without any load flag, search the highest request rate that keeps them"
    add("--goal", type=GOAL, metavar="GOAL", help=text)
    text = "rounds of --rates or of the search, each with other arrivals (default: 1 or 3)"
    add("--repeats", type=WHOLE, metavar="N", help=text)


def _add_report_flags(add: AddFlag) -> None:
    text = "the goal in vLLM's spelling, such as ttft:500 tpot:50: milliseconds that each request must keep"
    add("--goodput", type=TEXT, nargs="+", action=Repeated, metavar="KEY:MS", help=text)
    add("--json", type=TEXT, metavar="FILE", help="write all figures to FILE")
    add("--save-detailed", action="store_true", default=None, help="with the times of every chunk")
    text = "write the plot to FILE: latency over rate, or by percentile for one run"
    add("--svg", type=TEXT, metavar="FILE", help=text)
    text = "write a trace of requests, slots and steps to FILE, for ui.perfetto.dev; a server at --base-url "
    add("--trace", type=TEXT, metavar="FILE", help=text + "must run with --record")
    add("--html", type=TEXT, metavar="FILE", help="write the report and its plot to FILE as a page")


def bench(args: argparse.Namespace) -> int:
    """Test a server, or a model in a server of its own."""
    from quire.bench.server_process import served
    from quire.cli.bench_run import BenchFiles, BenchPlan, run
    from quire.cli.terminal import note

    plan, output = BenchPlan.of(args), BenchFiles.of(args)
    if not args.words:
        return run(plan, output, args.base_url or URL)
    model, *flags = args.words
    if model.startswith("-") or (flags and not flags[0].startswith("-")):
        wrong = model if model.startswith("-") else flags[0]
        args.parser.refuse(f"unexpected {wrong!r}", "give one MODEL; flags of quire serve follow it after --")
    if args.base_url is not None:
        args.parser.refuse("MODEL and --base-url exclude each other", "give --model NAME to ask for a model")
    note(f"starting quire serve {' '.join(args.words)}")
    with served(args.words, recorded=args.trace is not None) as url:
        return run(plan, output, url)


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates\nhint: write 1,2,4") from None
    return rates


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object\nhint: write '{{\"top_p\": 0.9}}'")
    return found


_RATES = OptionType("a list of rates such as 1,2,4", (str, int, float), _rates)
_OBJECT = OptionType("a JSON object", (str,), _object)
