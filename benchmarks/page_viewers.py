"""The cost of the page: speed, gaps and processor time with viewers, without any, and without the page.

    python benchmarks/page_viewers.py                      135M random weights in int4; 10 viewers
    python benchmarks/page_viewers.py --model demo         the demo: 1,000 steps a second and more
    python benchmarks/page_viewers.py --first-paint        first paint in Chromium, too (make browser)

Two servers run at once, one of them with --no-page. Sixteen streams are sent to the one with the page while
viewers read its events, to it without viewers, and to the other, in turns that begin with each; ratios are
taken within a round, since the machine may be faster in the next. Viewers read ten times a second, in this
process: what they took of a core is reported, since those of users are on other machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from peers import checkpoints
from serving.processes import ServerProcess

LOAD = ("--max-concurrency", "16", "--random-input-len", "64", "--random-output-len", "192", "--ignore-eos")
WAYS = ("viewers", "none", "no page")
READ_S = 0.1
PAINTS = 15
BROWSER_PYTHON = Path(__file__).resolve().parents[1] / ".browser" / "bin" / "python"


class Viewers:
    """Readers of the events of a server, in a thread, while a block runs."""

    def __init__(self, port: int, count: int) -> None:
        self.port, self.count = port, count
        self.num_bytes, self.cpu_s, self.seconds = 0, 0.0, 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Viewers:
        head = f"GET /page/events HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n\r\n".encode()
        self._sockets = [socket.create_connection(("127.0.0.1", self.port)) for _ in range(self.count)]
        for one in self._sockets:
            one.sendall(head)
            status = one.recv(12)
            assert status.endswith(b"200"), status
            one.setblocking(False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for one in self._sockets:
            one.close()

    def _read(self) -> None:
        begin_s, begin_cpu_s = time.monotonic(), time.thread_time()
        while not self._end.wait(READ_S):
            for one in self._sockets:
                self.num_bytes += _drain(one)
        self.seconds = time.monotonic() - begin_s
        self.cpu_s = time.thread_time() - begin_cpu_s


def _drain(one: socket.socket) -> int:
    total = 0
    while True:
        try:
            found = len(one.recv(1 << 20))
        except BlockingIOError:
            return total
        assert found, "the server ended a stream of events"
        total += found


@dataclass(frozen=True)
class Figures:
    """Of one turn. `cpu_us_per_token`: of the server and the engine; other programs do not change it much."""

    tokens_per_s: float
    gap_p99_ms: float
    cpu_us_per_token: float


def cpu_s(server: ServerProcess) -> float:
    """Return the processor time that the server and its engine have taken."""
    return sum(one.cpu_s for one in server.usage().values())


def turn(server: ServerProcess, num_prompts: int, folder: Path, load: Sequence[str] = LOAD) -> Figures:
    """Send a load to a server."""
    path = folder / "figures.json"
    flags = ("--base-url", server.url, "--num-prompts", str(num_prompts), *load, "--json", str(path))
    begin_s = cpu_s(server)
    subprocess.run([sys.executable, "-m", "quire", "bench", *flags], check=True, capture_output=True)
    found: dict[str, Any] = json.loads(path.read_text())
    cpu_us = 1e6 * (cpu_s(server) - begin_s) / found["total_output_tokens"]
    return Figures(found["output_throughput"], found["p99_itl_ms"], cpu_us)


async def compare(options: argparse.Namespace, folder: Path) -> None:
    """Print the figures of each round, and the ratios over all."""
    flags = [options.model] if options.model else [str(checkpoints.make("s135", options.work))]
    flags += [] if options.model == "demo" else ["--quantization", "int4"]
    paged, bare = (
        ServerProcess(flags, folder / "a.log"),
        ServerProcess([*flags, "--no-page"], folder / "b.log"),
    )
    rounds: list[dict[str, Figures]] = []
    num_bytes = own_s = seconds = 0.0
    async with AsyncExitStack() as stack:
        for server in (paged, bare):
            await stack.enter_async_context(server)
            turn(server, options.num_prompts, folder)
        if options.first_paint:
            first_paint(paged.url)
        for number in range(options.rounds):
            found: dict[str, Figures] = {}
            for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
                if way != "viewers":
                    found[way] = turn(paged if way == "none" else bare, options.num_prompts, folder)
                    continue
                with Viewers(paged.port, options.viewers) as viewers:
                    found[way] = turn(paged, options.num_prompts, folder)
                num_bytes, own_s = num_bytes + viewers.num_bytes, own_s + viewers.cpu_s
                seconds += viewers.seconds
            rounds.append(found)
            print("   ".join(line(found[way]) for way in WAYS), flush=True)
    report(rounds)
    print(
        f"{options.viewers} viewers: {num_bytes / seconds / options.viewers:,.0f} bytes/s each; "
        f"they took {own_s / seconds:.1%} of a core themselves"
    )


def line(found: Figures) -> str:
    """Return the figures of a turn in words."""
    return f"{found.tokens_per_s:7,.0f}/s {found.gap_p99_ms:6.2f} ms {found.cpu_us_per_token:6,.0f} us"


def report(rounds: list[dict[str, Figures]]) -> None:
    """Print the ratios of two ways within each round: median and quartiles."""
    for way, base in (("viewers", "none"), ("none", "no page")):
        for name in (one.name for one in fields(Figures)):
            ratios = [getattr(one[way], name) / getattr(one[base], name) for one in rounds]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"{name:16} {way} / {base}: median {middle:.3f}, quartiles {low:.3f} and {high:.3f}")


def first_paint(url: str) -> None:
    """Print when Chromium painted the page first."""
    chromium = shutil.which("chromium")
    if not chromium or not BROWSER_PYTHON.exists():
        sys.exit("--first-paint needs Chromium and .browser: make browser")
    worker = Path(__file__).with_name("serving") / "first_paint.py"
    command = [str(BROWSER_PYTHON), str(worker), url, chromium, str(PAINTS)]
    found: list[float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    print(
        f"first paint of {PAINTS} loads: median {statistics.median(found):.0f} ms, "
        f"{min(found):.0f} to {max(found):.0f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument("--model", help="default: 135M random weights")
    parser.add_argument("--viewers", type=int, default=10, metavar="N", help="default: 10")
    parser.add_argument("--rounds", type=int, default=18, metavar="N", help="default: 18")
    parser.add_argument("--num-prompts", type=int, default=32, metavar="N", help="of a turn; default: 32")
    parser.add_argument("--first-paint", action="store_true", help="load the page in Chromium, too")
    checkpoints.add_work_option(parser)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
