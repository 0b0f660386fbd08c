"""Several replicas against one engine: their cost for a single stream, and requests while they are replaced.

    python benchmarks/replicas.py                           both parts, on the demo model
    python benchmarks/replicas.py --parts overhead --pairs 300
    python benchmarks/replicas.py --parts rolling --rounds 50

    overhead   one stream at a time, to a server with one engine and to one with two replicas, in turns: the
               median times to the first token, and the median of the differences of neighbours
    rolling    streams without end to two replicas that are drained, stopped, started and replaced meanwhile:
               requests, those that failed, those with other tokens or log-probabilities than of one engine

Each engine has one thread. Both servers of the first part are there all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving import processes
from serving.processes import ServerProcess

PROMPT = "Once upon a time there was a {word}. " * 6
WORDS = ("bird", "fox", "king", "tree", "river", "star", "house", "ship")
NUM_CLIENTS = 4
CALM_S = 0.2  # between two operations


class Refused(RuntimeError):
    """A request that got no stream."""


class Cut(RuntimeError):
    """A stream that was not finished."""


class Connection:
    """A kept connection to a server."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return its JSON."""
        content = None if body is None else json.dumps(body)
        self._http.request(method, path, content, {"content-type": "application/json"})
        answer = self._http.getresponse()
        found = json.loads(answer.read())
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {found}")
        return found

    def stream(self, body: Any) -> tuple[float, list[Any]]:
        """Send a completion; return the seconds to its first event, and what its choices gave.

        Raises Refused for an answer that is no stream, and Cut for a stream without its end.
        """
        begin_s = time.perf_counter()
        content = json.dumps(body | {"stream": True, "model": "demo"})
        self._http.request("POST", "/v1/completions", content, {"content-type": "application/json"})
        answer = self._http.getresponse()
        if answer.status != 200:
            raise Refused(f"{answer.status} {answer.read()[:300]!r}")
        first_s, given, has_ended = 0.0, [], False
        for line in answer:
            has_ended = has_ended or line.startswith(b"data: [DONE]")
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - begin_s
                given += _given(json.loads(line[6:]))
        if not has_ended:
            raise Cut(f"after {len(given)} tokens")
        return first_s, given


def _given(event: Any) -> Iterator[Any]:
    if "error" in event:
        raise Cut(event["error"])
    for choice in event["choices"]:
        probabilities = choice.get("logprobs") or {}
        yield from zip(
            probabilities.get("tokens") or [], probabilities.get("token_logprobs") or [], strict=True
        )
        if choice["finish_reason"]:
            yield choice["finish_reason"]


@contextlib.asynccontextmanager
async def server(log: Path, *flags: str) -> Any:
    arguments = ("demo", "--num-threads", "1", "--speculative", "off", "--log-format", "json", *flags)
    async with ServerProcess(arguments, log) as running:
        yield running


def body(index: int, max_tokens: int) -> dict[str, Any]:
    """A request of its own kind: greedy or sampled, always with log-probabilities."""
    prompt = PROMPT.format(word=WORDS[index % len(WORDS)])
    sampling = {"temperature": 0} if index % 2 else {"temperature": 1, "seed": index}
    return {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 1, **sampling}


async def overhead(options: argparse.Namespace, folder: Path) -> None:
    """The prompts are equal for both and new for each pair, so that none is cached."""
    async with (
        server(folder / "one.log") as one,
        server(folder / "two.log", "--replicas", "2") as two,
    ):
        connections = {"one engine": Connection(one.port), "two replicas": Connection(two.port)}
        times: dict[str, list[float]] = {name: [] for name in connections}
        for pair in range(options.pairs + 10):
            for name in list(connections)[:: 1 if pair % 2 else -1]:
                prompt = f"{pair} times a story of a {WORDS[pair % len(WORDS)]} was told. "
                ttft_s, _ = connections[name].stream({"prompt": prompt, "max_tokens": 4, "temperature": 0})
                times[name].append(1e3 * ttft_s)
        measured = {name: found[10:] for name, found in times.items()}  # the first ones warm up
        for name, found in measured.items():
            tenth = statistics.quantiles(found, n=10)[0]
            print(f"{name}: TTFT p50 {statistics.median(found):.2f} ms, p10 {tenth:.2f} ms")
        gaps = [b - a for a, b in zip(*measured.values(), strict=True)]
        quarters = statistics.quantiles(gaps)
        print(
            f"difference of neighbours: p50 {quarters[1]:.2f} ms, quartiles {quarters[0]:.2f} to "
            f"{quarters[2]:.2f} ms, {len(gaps)} pairs"
        )


class Load:
    """Clients that send one request after the other, and compare the answers with what is expected."""

    def __init__(self, port: int, expected: list[Any], max_tokens: int) -> None:
        self.counts: Counter[str] = Counter()
        self.longest_s = 0.0  # of a request that was answered
        self._port, self._expected, self._max_tokens = port, expected, max_tokens
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(one,)) for one in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _send(self, first: int) -> None:
        connection, index = Connection(self._port), first
        while not self._ends.is_set():
            number, begin_s = index % len(self._expected), time.monotonic()
            try:
                _, given = connection.stream(body(number, self._max_tokens))
                self.counts["same" if given == self._expected[number] else "different"] += 1
                self.longest_s = max(self.longest_s, time.monotonic() - begin_s)
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                kind, seconds = type(error).__name__, time.monotonic() - begin_s
                self.counts["refused" if isinstance(error, Refused) else "cut"] += 1
                print(f"{time.strftime('%T')} {kind} after {seconds:.1f} s: {error}", flush=True)
                connection = Connection(self._port)
            index += NUM_CLIENTS

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


def operate(control: Connection, path: str, content: Any = None) -> float:
    """Run an operation on replicas; return its seconds."""
    control.ask("POST", path, content)
    while (found := control.ask("GET", "/replicas")["operation"])["seconds"] is None:
        time.sleep(0.02)
    if found["error"] is not None:
        raise RuntimeError(found["error"])
    seconds: float = found["seconds"]
    return seconds


async def rolling(options: argparse.Namespace, folder: Path) -> None:
    async with server(folder / "one.log") as one:
        connection = Connection(one.port)
        expected = [connection.stream(body(index, options.max_tokens))[1] for index in range(16)]
    flags = ("--replicas", "2", "--drain-timeout-s", str(options.drain_s))
    async with server(folder / "two.log", *flags) as two:
        load = Load(two.port, expected, options.max_tokens)
        control, times = Connection(two.port), Counter[str]()
        try:
            for _ in range(options.rounds):
                times["down"] += operate(control, "/replicas", {"count": 1})  # type: ignore[assignment]
                times["up"] += operate(control, "/replicas", {"count": 2})  # type: ignore[assignment]
                times["replaced"] += operate(control, "/replicas/restart")  # type: ignore[assignment]
                time.sleep(CALM_S)
        finally:
            load.end()
        decisions = control.ask("GET", "/router/decisions")["num_decisions"]
    means = ", ".join(f"{name} {seconds / options.rounds:.1f} s" for name, seconds in times.items())
    total = sum(load.counts.values())
    print(f"{options.rounds} scale-downs, as many rolling updates; means: {means}")
    print(f"{total} requests, moved {decisions - total} times: {dict(load.counts)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("overhead", "rolling"), default=("overhead", "rolling")
    )
    parser.add_argument("--pairs", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="default: 50")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--drain-s", type=int, default=0, metavar="S", help="for open requests; default: 0")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            processes.run({"overhead": overhead, "rolling": rolling}[part](options, Path(folder)))


if __name__ == "__main__":
    main()
