"""The load that measurements put on a server, and the program around them: a model before, figures after."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from peers import checkpoints

from quire.bench.driver import Done, LoadRun, Progress, drive
from quire.bench.http_client import Client
from quire.bench.openai_api import Api, Unusable, begin
from quire.bench.workload import Request
from serving import processes


async def send(client: Client, api: Api, requests: Iterable[Request], **how: Any) -> LoadRun:
    """Send a load: a closed loop unless `how`, the options of `drive`, says otherwise."""
    progress = Progress(len(requests) if isinstance(requests, list) else None, how.get("until_s"))

    def start(request: Request, planned_s: float | None, done: Done) -> None:
        begin(client, api, request, done, planned_s, progress.chunk)

    return await drive(requests, start, progress, **{"is_open": False, **how})


class Measurement(Protocol):
    """Parts that each give some of the figures."""

    figures: dict[str, Any]

    async def run(self) -> None: ...


def add_options(parser: argparse.ArgumentParser, default_kind: str) -> None:
    """Add the options of the model and of the file."""
    parser.add_argument("--model", metavar="MODEL", help="default: 135M random weights, made in --work")
    help_text = f"default: {default_kind}"
    parser.add_argument("--kind", choices=("bf16", "int8", "int4"), default=default_kind, help=help_text)
    checkpoints.add_work_option(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")


def prepare(options: argparse.Namespace) -> None:
    """Make the model that is measured by default."""
    options.work.mkdir(parents=True, exist_ok=True)
    if options.model is None:
        options.model = checkpoints.make("s135", options.work)


def measure(parts: Measurement, json_file: Path | None) -> None:
    """Run all parts and write their figures; those that there are, if the server fails or on Ctrl-C."""
    try:
        processes.run(parts.run())
    except Unusable as problem:
        sys.exit(str(problem))
    finally:
        if json_file:
            json_file.write_text(json.dumps(parts.figures, indent=1) + "\n", "utf-8")
