"""Load on an OpenAI server, and what its users feel: latencies, throughput, goodput, errors.

    python benchmarks/serve_load.py --max-concurrency 32 --num-prompts 200
        closed loop: 32 requests at once, the next when one ends; 200 in all
    python benchmarks/serve_load.py --request-rate 4 --duration 30 --goodput ttft:500 tpot:50
        open loop: 4 requests a second by a Poisson process, however long answers take
    python benchmarks/serve_load.py --trace AzureLLMInferenceTrace_conv.csv.gz --speed 0.1 --duration 60
        open loop: arrivals and lengths of a trace (Azure, Mooncake, or lines of prompt_len, output_len,
        arrival_ms), here ten times as slow
    python benchmarks/serve_load.py --max-concurrency 32 --inject-long-prompt 4096 --at 5
        what running streams feel when a long prompt arrives
    python benchmarks/serve_load.py --endpoint /v1/chat/completions --dataset questions.jsonl

Needs nothing but Python, and works with any server of the API; options and definitions are those of `vllm
bench serve` where it has them. Prompts are random: token ids where the server has /tokenize, else words.
Latencies count from the moment of sending; "sent too late by" says whether this client kept up in an open
loop, and "µs of CPU a token" what it took from a server on the same machine. A refusal (429, 503) is a
failure and never tried again. Without a rate, a trace or a concurrency, everything is sent at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

from quire.bench import report
from quire.bench.driver import Done, LoadRun, Progress, drive
from quire.bench.http_client import Client
from quire.bench.openai_api import (
    CHAT,
    COMPLETIONS,
    Api,
    ServedModel,
    Unusable,
    ask,
    begin,
    find_model,
    learn,
)
from quire.bench.workload import (
    Lengths,
    PromptVocabulary,
    Request,
    file_requests,
    first,
    poisson,
    random_requests,
    read_trace,
    trace_requests,
)
from quire.goals import Goal

DEFAULT_PROMPTS = 100
WARM_UP_TOKENS = 64


def plan(options: argparse.Namespace, words: PromptVocabulary, server: ServedModel) -> Iterable[Request]:
    """The requests of a run. Only those of a run that a duration bounds alone are made as they are sent."""
    if options.trace:
        trace = read_trace(options.trace)
        longest = options.max_model_len or server.max_model_len
        found = trace_requests(trace, words, options.seed, speed=options.speed, longest=longest)
        return first(found, options.num_prompts or len(trace), options.duration)
    if options.dataset:
        found = file_requests(options.dataset, options.random_output_len)
    else:
        shape = Lengths(
            options.random_input_len,
            options.random_output_len,
            options.random_range_ratio,
            options.random_prefix_len,
            options.num_prefixes,
        )
        found = random_requests(shape, words, options.seed)
    if not math.isinf(options.request_rate):
        found = poisson(found, options.request_rate, options.seed)
    elif options.duration and not options.num_prompts and not options.dataset:
        return found
    count = options.num_prompts or (sys.maxsize if options.duration or options.dataset else DEFAULT_PROMPTS)
    return first(found, count, options.duration)


def injections(options: argparse.Namespace, words: PromptVocabulary) -> list[Request]:
    """Every long prompt at every moment."""
    return [
        Request(words.draw([(tokens, f"injected {tokens} {at_s}")]), 8, at_s)
        for tokens in options.inject_long_prompt
        for at_s in options.at
    ]


async def measure(options: argparse.Namespace) -> tuple[LoadRun, ServedModel]:
    """Learn about the server, warm it up, and send the load."""
    try:
        key = os.environ.get("OPENAI_API_KEY", "")
        client = Client(options.base_url, api_key=key, timeout_s=options.timeout)
    except ValueError as problem:
        raise Unusable(str(problem)) from None
    server = await find_model(client, options.model)
    extra = {"temperature": options.temperature} if options.temperature is not None else {}
    extra |= {"ignore_eos": True} if options.ignore_eos else {}
    api = Api(options.endpoint, server.name, not options.no_stream, extra | options.extra_body)
    words = await learn(client, api)
    try:
        requests = plan(options, words, server)
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise Unusable(f"the requests cannot be made: {type(problem).__name__}: {problem}") from problem
    warm_up = Request(words.draw([(WARM_UP_TOKENS, "warm up")]), 8)
    if error := (await ask(client, api, warm_up)).error:
        raise Unusable(f"a first request failed: {error}")
    progress = Progress(len(requests) if isinstance(requests, list) else None, options.duration)

    def send(request: Request, planned_s: float | None, done: Done) -> None:
        begin(client, api, request, done, planned_s, progress.chunk)

    gc.collect()
    gc.freeze()  # what was made until now is not looked through again
    is_open = bool(options.trace) or not math.isinf(options.request_rate)
    run = await drive(
        requests,
        send,
        progress,
        is_open=is_open,
        max_concurrency=options.max_concurrency,
        until_s=options.duration,
        injected=injections(options, words),
    )
    client.close()
    return run, server


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    add = parser.add_argument_group("server").add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="default: %(default)s")
    add("--endpoint", default=COMPLETIONS, choices=(COMPLETIONS, CHAT), help="default: %(default)s")
    add("--model", metavar="NAME", help="default: the first one that /v1/models lists")
    add("--timeout", type=float, default=600, metavar="S", help="of one request (default: 600)")
    add("--no-stream", action="store_true", help="whole answers: only the end-to-end time has a meaning")
    parser.epilog = "The API key, if the server wants one, is read from OPENAI_API_KEY."
    add = parser.add_argument_group("requests").add_argument
    add("--random-input-len", type=int, default=512, metavar="N", help="tokens of prompts (default: 512)")
    add("--random-output-len", type=int, default=128, metavar="N", help="and of outputs (default: 128)")
    add("--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths vary by this part")
    add("--random-prefix-len", type=int, default=0, metavar="N", help="more tokens, before, that are shared")
    add("--num-prefixes", type=int, default=1, metavar="N", help="different shared beginnings (default: 1)")
    add("--dataset", type=Path, metavar="FILE", help='lines of {"prompt": ...} or {"messages": ...}')
    add("--trace", type=Path, metavar="FILE", help="arrivals and lengths of an open loop")
    add("--speed", type=float, default=1.0, metavar="X", help="times as fast as the trace (default: 1)")
    add("--max-model-len", type=int, metavar="N", help="shorten the trace to it (default: the server's)")
    add("--temperature", type=float, default=0.0, help="default: 0")
    add("--ignore-eos", action="store_true", help="ask for all output tokens (vLLM's and Quire's extension)")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="more fields for every request")
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default: 0)")
    add = parser.add_argument_group("load").add_argument
    add("--num-prompts", type=int, metavar="N", help=f"default: {DEFAULT_PROMPTS}, or what --duration allows")
    add("--duration", type=float, metavar="S", help="begin no request after this")
    add("--request-rate", type=float, default=math.inf, metavar="R", help="a second; an open loop")
    add("--max-concurrency", type=int, metavar="N", help="requests at once")
    add("--inject-long-prompt", type=int, nargs="+", default=[], metavar="TOKENS", help="during the load ...")
    add("--at", type=float, nargs="+", default=[5.0], metavar="S", help="... at these moments (default: 5)")
    add = parser.add_argument_group("report").add_argument
    add("--goodput", nargs="+", default=[], metavar="KEY:MS", help="goals by ttft, tpot, e2el")
    add("--json", type=Path, metavar="FILE", help="write the figures here")
    add("--save-detailed", action="store_true", help="with the times of every chunk")
    options = parser.parse_args()
    try:
        options.goal = Goal.parse_pairs(options.goodput)
    except ValueError as problem:
        parser.error(str(problem))
    if options.trace and (options.dataset or not math.isinf(options.request_rate)):
        parser.error("--trace has its own arrivals and lengths: leave out --dataset and --request-rate")
    return options


def main() -> None:
    options = read_options()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a connection is a descriptor
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        run, server = asyncio.run(measure(options))
    except Unusable as problem:
        sys.exit(f"{options.base_url}: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key not in ("goal", "json")}
        settings["model"] = server.name
        figures = report.as_json(run, options.goal, settings, options.save_detailed)
        options.json.write_text(json.dumps(figures, indent=1, default=str) + "\n", "utf-8")
    print(report.text(run, options.goal))
    if not any(not timeline.error for timeline in run.timelines):
        sys.exit("no request succeeded")


if __name__ == "__main__":
    main()
