"""`quire probe`: measure the peak performance of this machine."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from quire.cli.options import add_engine_flags, engine_options

if TYPE_CHECKING:
    from quire.backends.device import Loops
    from quire.roofline.probe import Ceilings

DESCRIPTION = """Measure the peak performance of this machine: read bandwidth of memory and caches, and
operations per second by number format, with the instructions that Quire's kernels use; or of
a GPU, with its own kernels. Takes about three seconds; run it while the machine is idle. The
results are stored for this CPU or GPU.
"""


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "probe",
        help="measure this machine's memory bandwidth and arithmetic throughput",
        usage="quire probe [flags]",
        description=DESCRIPTION,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--cached", action="store_true", help="show stored results instead, if there are any")
    add_engine_flags(parser, names=("num_threads", "device", "tensor_parallel_size"))
    parser.set_defaults(function=probe, parser=parser, words=[])


def probe(args: argparse.Namespace) -> int:
    """Measure, store and print."""
    if args.words:
        args.parser.refuse_unknown(args.words[0])
    from quire.backends.device import device_for
    from quire.config import EngineConfig
    from quire.roofline.probe import ceilings, keep

    loops = device_for(EngineConfig(**{"device": "native", **engine_options(args)})).loops()
    found = ceilings(loops) if args.cached else keep(_measure(loops, quiet=args.json))
    if args.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        _show(found)
    return 0


def _measure(loops: Loops, quiet: bool) -> Ceilings:
    from rich.console import Console
    from rich.progress import Progress

    from quire.roofline.probe import measure

    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("measuring", total=None)
        return measure(loops, lambda done, total: bar.update(task, completed=done, total=total))


def _show(found: Ceilings) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{found.cpu}, {found.isa.replace('_', ' ')}, {_threads(found.threads)}", highlight=False)
    rates = Table("arithmetic", "operations/s", box=None, pad_edge=False)
    for kind, rate in found.operations.items():
        rates.add_row(kind, f"{rate / 1e9:,.0f} G" if rate else "as f32")
    console.print(rates, highlight=False)
    reads = Table("read from", *map(_threads, found.read_bytes), box=None, pad_edge=False)
    for level in next(iter(found.read_bytes.values())):
        reads.add_row(level, *(f"{levels[level] / 1e9:,.1f} GB/s" for levels in found.read_bytes.values()))
    console.print(reads, highlight=False)
    console.print(
        f"stored for {found.cpu}: 'quire probe --cached' shows these results again",
        style="dim",
        highlight=False,
    )


def _threads(count: int) -> str:
    return f"{count} thread" + "s" * (count > 1)
