"""A deployment on Ray against one server: the time to the first token and between tokens of single streams.

    .ray/bin/python benchmarks/ray_overhead.py              'make ray' makes .ray; on the demo model
    .ray/bin/python benchmarks/ray_overhead.py --pairs 200 --max-tokens 64

Both run on this machine all the time, one engine with one thread each: `quire serve`, and `quire deploy ray`
with a cluster of its own. One stream at a time goes to either in turns. The prompts are equal for both and
new for each pair, so that none is cached.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from serving import processes
from serving.processes import ServerProcess

NUM_WARM = 5  # pairs that are not counted
FLAGS = ("demo", "--num-threads", "1", "--speculative", "off", "--no-page")


class Deployment(ServerProcess):
    """`quire deploy ray`, with the cluster that it starts."""

    def __init__(self, log: Path) -> None:
        super().__init__((), log)
        command = [sys.executable, "-m", "quire", "deploy", "ray", *FLAGS]
        self.command = [*command, "--replicas", "1", "--port", str(self.port)]


class Times(NamedTuple):
    """The times of a stream: to the first token, and the mean between two."""

    ttft_ms: float
    itl_ms: float


def stream(port: int, index: int, max_tokens: int) -> Times:
    """Send a request over a connection of its own, as Serve's proxies may close kept ones."""
    message = {"role": "user", "content": f"Tell me story {index}."}
    body = {"model": "demo", "messages": [message], "seed": index, "max_tokens": max_tokens}
    content = json.dumps(body | {"stream": True, "ignore_eos": True})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    begin_s = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", content, {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status} {answer.read()!r}")
    at_s = [time.perf_counter() for line in answer if b'"content":"' in line]
    connection.close()
    return Times(1e3 * (at_s[0] - begin_s), 1e3 * (at_s[-1] - at_s[0]) / (max_tokens - 1))


async def compare(options: argparse.Namespace, folder: Path) -> None:
    """Print the times of both, and the differences of neighbours."""
    async with ServerProcess(FLAGS, folder / "one.log") as one, Deployment(folder / "ray.log") as deployed:
        times: dict[str, list[Times]] = {"one server": [], "on Ray": []}
        ports = {"one server": one.port, "on Ray": deployed.port}
        for pair in range(options.pairs + NUM_WARM):
            for name in list(ports)[:: 1 if pair % 2 else -1]:
                times[name].append(stream(ports[name], pair, options.max_tokens))
    single, ray = (found[NUM_WARM:] for found in times.values())
    print(f"load {os.getloadavg()[0]:.1f}, {options.pairs} pairs of {options.max_tokens} tokens")
    for field in Times._fields:
        alone, beside = ([getattr(one, field) for one in found] for found in (single, ray))
        gaps = [b - a for a, b in zip(alone, beside, strict=True)]
        low, middle, high = statistics.quantiles(gaps)
        medians = f"{statistics.median(alone):.2f} by one server, {statistics.median(beside):.2f} on Ray"
        print(f"{field}: p50 {medians}; differences of neighbours: p50 {middle:.2f},", end=" ")
        print(f"quartiles {low:.2f} to {high:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument("--pairs", type=int, default=100, metavar="N", help="default: 100")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="default: 64")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.run(compare(options, Path(folder)))


if __name__ == "__main__":
    main()
