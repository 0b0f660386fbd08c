"""Streams through a deployment on Ray whose engines are stopped, started and replaced meanwhile.

    .ray/bin/python benchmarks/ray_changes.py               'make ray' makes .ray; on the demo model
    nice .ray/bin/python benchmarks/ray_changes.py --rounds 50 --minutes 60

In each round a deployment of two engines is scaled down to one and up again, and then moved to another
configuration, which replaces its front and its engines. Four clients send streams without end meanwhile.
Told are the requests, those that failed, and those with other tokens or log-probabilities than of one server.
It begins no round after so many minutes. Each engine has one thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve
from replicas import Connection, Load, body, server
from serving import processes

from quire.cluster.ray import RayConfig, application, deploy
from quire.config import EngineConfig, ServerConfig, served

NUM_KINDS = 16  # of requests
SIZES = (64, 65)  # max_num_seqs of one configuration and of the other


async def compare(options: argparse.Namespace, folder: Path) -> None:
    """Print what became of the requests of all rounds."""
    async with server(folder / "one.log") as one:
        connection = Connection(one.port)
        expected = [connection.stream(body(index, options.max_tokens))[1] for index in range(NUM_KINDS)]
    engine = EngineConfig(
        model="demo", num_threads=1, max_num_seqs=SIZES[0], **served({"speculative": "off"})
    )
    own = ServerConfig(port=options.port, page=False, drain_timeout_s=options.drain_s)
    config = RayConfig(server=own, engine=engine, replicas=2)
    end = deploy(config, print)
    load = Load(options.port, expected, options.max_tokens)
    times: dict[str, list[float]] = defaultdict(list)

    def change(name: str, **changes: Any) -> None:
        nonlocal config
        begin_s, config = time.monotonic(), replace(config, **changes)
        serve.run(application(config), name=config.name, route_prefix="/")
        times[name].append(time.monotonic() - begin_s)
        print(f"{time.strftime('%T')} {name} in {times[name][-1]:.1f} s", flush=True)

    last_s = time.monotonic() + 60 * options.minutes
    try:
        for number in range(1, options.rounds + 1):
            if time.monotonic() > last_s:
                break
            change("scaled down", replicas=1)
            change("scaled up", replicas=2)
            change("replaced", engine=replace(engine, max_num_seqs=SIZES[number % 2]))
            print(f"{number} rounds: {dict(load.counts)}", flush=True)
    finally:
        load.end()
        end()
    for name, seconds in times.items():
        print(f"{name} {len(seconds)} times, in {sum(seconds) / len(seconds):.1f} s in the mean")
    print(f"{sum(load.counts.values())} requests: {dict(load.counts)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="default: 50")
    parser.add_argument("--minutes", type=float, default=60, metavar="M", help="default: 60")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--drain-s", type=int, default=30, metavar="S", help="for open requests; default: 30")
    parser.add_argument("--port", type=int, default=processes.free_port(), metavar="P", help="default: any")
    with tempfile.TemporaryDirectory() as folder:
        processes.run(compare(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
