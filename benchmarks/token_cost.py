"""Processor time that the server's process takes for a streamed token, and that of another version.

    python benchmarks/token_cost.py                                  this version alone
    python benchmarks/token_cost.py --other ../before/.venv/bin/python --rounds 8

Both versions serve the demo model on this machine; each round loads one after the other with the same
streams. The engine is another process and does not count: what counts is text, JSON, HTTP and the system
calls that send it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from serving.processes import ServerProcess

QUESTION = "Tell me a story about a fox and a lantern."
TURNS = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 0, "ignore_eos": True}
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", TURNS),
    "chat with logprobs": ("/v1/chat/completions", TURNS | {"logprobs": True, "top_logprobs": 5}),
    "completions": ("/v1/completions", {"prompt": QUESTION, "max_tokens": 0, "ignore_eos": True}),
    "responses": ("/v1/responses", {"input": QUESTION, "max_output_tokens": 0, "ignore_eos": True}),
    "messages": ("/v1/messages", TURNS),
}


class Version:
    """A server of one version: its process, and the time it has taken."""

    def __init__(self, name: str, python: str, streams: int, folder: Path) -> None:
        self.name = name
        self.server = ServerProcess(["demo", "--max-num-seqs", str(streams)], folder / f"{name}.log")
        self.server.command[:3] = [python, "-P", "-m", "quire"]

    def cpu_us(self) -> float:
        """Return the processor time of all threads so far."""
        tasks = Path(f"/proc/{self.server.pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in tasks) / 1e3


async def stream(port: int, path: str, body: dict[str, Any]) -> None:
    """Read one stream to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{path}: {status.decode().strip()} {(await reader.read()).decode()[-300:]}")
    while await reader.read(1 << 16):
        pass
    writer.close()


async def measure(version: Version, api: str, streams: int, tokens: int) -> float:
    """Return microseconds of processor time a token."""
    path, body = APIS[api]
    limit = "max_output_tokens" if "max_output_tokens" in body else "max_tokens"
    body = body | {limit: tokens, "stream": True, "temperature": 1.0, "seed": 7}
    before = version.cpu_us()
    await asyncio.gather(*(stream(version.server.port, path, body) for _ in range(streams)))
    return (version.cpu_us() - before) / (streams * tokens)


async def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pythons = {"this": sys.executable} | ({"other": options.other} if options.other else {})
        versions = [Version(name, p, options.streams, Path(folder)) for name, p in pythons.items()]
        for version in versions:
            await version.server.__aenter__()
        try:
            for api in options.apis:
                found: dict[str, list[float]] = {version.name: [] for version in versions}
                for number in range(options.rounds + 1):
                    for version in versions if number % 2 else versions[::-1]:
                        cost = await measure(version, api, options.streams, options.tokens)
                        if number:  # the first round warms up
                            found[version.name].append(cost)
                words = [f"{name} {statistics.median(costs):6.1f} us" for name, costs in found.items()]
                if options.other:
                    ratios = [a / b for a, b in zip(found["this"], found["other"], strict=True)]
                    low, high = min(ratios), max(ratios)
                    words.append(f"this / other {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
                print(f"{api:20}", "   ".join(words), flush=True)
        finally:
            for version in versions:
                await version.server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", metavar="PYTHON", help="interpreter that has another version of Quire")
    parser.add_argument("--apis", nargs="+", choices=APIS, default=[*APIS], help="default: all")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="default: 6")
    parser.add_argument("--streams", type=int, default=16, metavar="N", help="at once; default: 16")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of each stream; default: 256")
    asyncio.run(compare(parser.parse_args()))


if __name__ == "__main__":
    main()
