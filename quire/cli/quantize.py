"""`quire quantize`: write a model with weights of 4 or 8 bits that lose less than rounding to nearest."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quire.cli.arguments import add_words, check_model
from quire.cli.option_types import FRACTION, TEXT, WHOLE, choice_of
from quire.environment import user_path

if TYPE_CHECKING:
    import numpy as np

    from quire.cli.quantize_model import Original
    from quire.cli.quantize_run import Comparison
    from quire.program.program import WeightSpec
    from quire.progress import Advance
    from quire.quantize.grid import Grid

DESCRIPTION = """Write a copy of a model whose matrices have 4 or 8 bits a weight, rounded so that the outputs
of each layer change least: about half the cost of rounding to nearest (--quantization at load).

For that, the model reads a text: of every matrix, the inputs it meets are kept as a table of moments.
Columns are rounded one after the other, those not yet rounded make up for the error of those that are
(GPTQ), scales and integers are then improved in turn, with errors weighted by the inputs (AWQ). The text
should be like what the model is used for; a few thousand tokens are enough. Built in are English prose,
Python, JSON and dialogue.

Memory holds one layer at a time, and the activations of the text: by the widths of their layers about
20 KB for each token of a model of 1 billion parameters, 60 KB of one of 8 billion. A model of 135 million
takes two minutes on two cores.

The result is a folder in the format compressed-tensors, which quire, vLLM and transformers read. It
appears when it is complete. At the end, the cost is measured on another text, in float32: KL divergence
from the original model, and how often both rank the same token first.

  quire quantize demo -o demo-int4 --embedding
  quire quantize Qwen/Qwen3-0.6B -o qwen-int4 --calibration my-chats.txt
  quire quantize Qwen/Qwen3-0.6B -o qwen-5 --bits 5     the most sensitive matrices get 8 bits
  quire run demo-int4 "Tell me a story about a fox"
"""
LENGTH = 512  # tokens of a text, at most
LEAST_TOKENS = 32
PROBE = (4, 128)  # texts and tokens on which sensitivities are measured
MOST_LOGITS = 1 << 25  # of each model, in the comparison at the end
FILE_LIMIT_BYTES = 1 << 28
GROUPS = {4: 32, 8: 128}


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "quantize",
        help="write a model with weights of 4 or 8 bits, rounded to change its outputs least",
        usage="quire quantize MODEL -o DIR [flags]",
        description=DESCRIPTION,
    )
    add_words(parser, "MODEL    checkpoint folder, Hub id, or 'demo'")
    parser.add_argument(
        "-o", "--output", type=TEXT, metavar="DIR", help="the folder to write; must not exist"
    )
    parser.add_argument(
        "--bits",
        type=FRACTION,
        default=4,
        metavar="B",
        help="4 or 8: of every matrix, beside its scales. A number between them, such as 4.5: the mean of "
        "all, scales included; which matrices get 8 bits follows from their sensitivity, which is measured "
        "(default: 4)",
    )
    parser.add_argument(
        "--group-size",
        type=choice_of((32, 64, 128)),
        metavar="N",
        help="inputs that share a 16-bit scale, with --bits 4 or 8: 32 adds 0.5 bits a weight, 128 adds "
        "0.125 (default: 32 for 4 bits, 128 for 8)",
    )
    parser.add_argument(
        "--calibration", type=TEXT, metavar="FILE", help="UTF-8 text to calibrate on (default: built in)"
    )
    parser.add_argument(
        "--calibration-tokens",
        type=WHOLE,
        default=8192,
        metavar="N",
        help="tokens of the text to use, taken evenly from all of it (default: 8192)",
    )
    parser.add_argument(
        "--embedding",
        action="store_true",
        help="also quantize an embedding that is the output matrix as well (tied): smaller and faster here, "
        "but transformers does not read it. With --bits between 4 and 8 it may get 5 or 6",
    )
    parser.add_argument("--revision", type=TEXT, metavar="NAME", help="branch, tag or commit of a Hub model")
    parser.add_argument("--num-threads", type=WHOLE, metavar="N", help="(default: all processors)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(function=quantize, parser=parser)


def quantize(args: argparse.Namespace) -> int:
    """Quantize a model and print what it cost."""
    model, *more = args.words or [args.model]
    if model is None or args.output is None:
        missing = "MODEL is missing" if model is None else "the folder to write is missing"
        args.parser.refuse(missing, "try: quire quantize demo -o demo-int4")
    if more:
        args.parser.refuse_unknown(more[0])
    _check(args)
    check_model(model, args.revision)
    from quire.cli.quantize_output import new_folder
    from quire.progress import steps_bar

    started = time.perf_counter()
    output = user_path(args.output)
    with _sigterm_unwinds(), new_folder(output) as folder, steps_bar("reading") as advance:
        report = _quantized(args, model, folder, advance)
    report["seconds"] = round(time.perf_counter() - started, 1)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(args.output, report)
    return 0


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does: what is half written is removed first."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(args: argparse.Namespace) -> None:
    """Refuse values that contradict each other."""
    if not 4 <= args.bits <= 8.5:
        args.parser.refuse(f"--bits {args.bits:g} is not possible", "give 4, 8, or a number between them")
    if args.group_size is not None and args.bits not in GROUPS:
        hint = "leave --group-size out: mixed precision chooses it too"
        args.parser.refuse(f"--group-size needs --bits 4 or 8, not {args.bits:g}", hint)
    if args.calibration_tokens < LEAST_TOKENS:
        args.parser.refuse(f"--calibration-tokens: give at least {LEAST_TOKENS}", "the default is 8192")
    processors = len(os.sched_getaffinity(0))
    args.num_threads = processors if args.num_threads is None else args.num_threads
    if not 1 <= args.num_threads <= processors:
        args.parser.refuse(f"--num-threads: give 1 to {processors}", "leave it out to use all processors")


def _quantized(args: argparse.Namespace, model: str, folder: Path, advance: Advance) -> dict[str, Any]:
    """Write the quantized model to a folder, and return the report."""
    from concurrent.futures import ThreadPoolExecutor

    from threadpoolctl import threadpool_limits

    from quire.cli.quantize_choice import mixed, uniform
    from quire.cli.quantize_model import Original, matrices
    from quire.cli.quantize_output import QuantizedFolder
    from quire.cli.quantize_run import Rounding, measure
    from quire.weights.folder import ModelFolder
    from quire.weights.hub import open_model
    from quire.weights.renamed import under_own_names

    original = Original.opened(open_model(model, args.revision, weights=True))
    ids = _calibration(args, original)
    specs = matrices(original, args.embedding)
    with threadpool_limits(args.num_threads, "blas"), ThreadPoolExecutor(args.num_threads) as pool:
        if args.bits in GROUPS:
            grids = uniform(original, specs, int(args.bits), args.group_size or GROUPS[int(args.bits)])
        else:
            probe = ids[:: max(1, len(ids) // PROBE[0])][: PROBE[0], : PROBE[1]]
            grids = mixed(original, specs, args.bits, probe, advance)
        output = QuantizedFolder(folder, original, specs, grids)
        try:
            Rounding(original, grids, output.write, pool.map).run(ids, advance)
            output.finish()
        finally:
            output.abandon()
        written = under_own_names(original.program.weights(), ModelFolder.at(folder).tensors())
        report = measure(original, grids, written, _measured_text(original), advance)
        written.close()
    return _facts(original, specs, grids, report, folder, ids)


def _calibration(args: argparse.Namespace, original: Original) -> np.ndarray:
    """Return the texts to calibrate on, [texts, T]. Raises ConfigError for a file without enough text."""
    from quire.errors import ConfigError
    from quire.regular_file import read_limited

    if args.calibration is None:
        return _texts(original, _built_in("calibration.txt"), args.calibration_tokens)
    path = user_path(args.calibration)
    try:
        text = read_limited(path, FILE_LIMIT_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start:,}") from None
    return _texts(original, text, args.calibration_tokens, str(path))


def _measured_text(original: Original) -> np.ndarray:
    most = max(LEAST_TOKENS, MOST_LOGITS // original.model.config.vocab_size)
    return _texts(original, _built_in("quality.txt"), most)


def _built_in(name: str) -> str:
    from importlib.resources import files

    return files("quire.assets").joinpath(name).read_text("utf-8")


def _texts(original: Original, text: str, most: int, where: str = "the text") -> np.ndarray:
    """Return tokens of a text, [texts, T], at most `most`: pieces taken evenly from all of it."""
    import numpy as np

    from quire.errors import ConfigError
    from quire.text.tokenizer import need_tokenizer

    ids = np.array(need_tokenizer(original.source).encode(text))
    if len(ids) < LEAST_TOKENS:
        raise ConfigError(f"{where}: {len(ids)} tokens are too few", "give some pages of text")
    length = min(LENGTH, original.model.max_context, most, len(ids))
    pieces = min(most, len(ids)) // length
    starts = np.linspace(0, len(ids) - length, pieces).astype(int)
    return np.stack([ids[start : start + length] for start in starts])


def _facts(
    original: Original,
    specs: Mapping[str, WeightSpec],
    grids: Mapping[str, Grid],
    report: Comparison,
    folder: Path,
    ids: np.ndarray,
) -> dict[str, Any]:
    from dataclasses import asdict

    from quire.cli.quantize_model import width_of
    from quire.quantize.walk import tables

    weights, nbytes = Counter[str](), Counter[str]()
    for name, spec in specs.items():
        grid = grids[name]
        kind = f"int{grid.bits}, " + (
            f"groups of {grid.group}" if grid.group < width_of(spec) else "a scale a row"
        )
        weights[kind] += spec.size
        nbytes[kind] += grid.nbytes(spec.size // width_of(spec), width_of(spec))
    total = sum(spec.size for spec in original.program.weights().values())
    return {
        "model": original.source.where,
        "parameters": total,
        "quantized_parameters": sum(weights.values()),
        "bits_per_quantized_weight": 8 * sum(nbytes.values()) / sum(weights.values()),
        "kinds": {kind: weights[kind] for kind in sorted(weights)},
        "file_bytes": (folder / "model.safetensors").stat().st_size,
        "plain_embedding": bool(tables(original.program) - specs.keys()),
        "calibration_tokens": int(ids.size),
        "quality": {"nearest": asdict(report.nearest), "written": asdict(report.written)},
    }


def _print(output: str, report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from quire.memory import gigabytes

    share = report["quantized_parameters"] / report["parameters"]
    kinds = "; ".join(
        f"{n / report['quantized_parameters']:.0%} {kind}" for kind, n in report["kinds"].items()
    )
    print(f"{output}: {gigabytes(report['file_bytes'])}, written in {report['seconds']:,.0f} s")
    if report["plain_embedding"]:
        print("the embedding, also the output matrix, is as before: --embedding quantizes it for Quire alone")
    print(
        f"{share:.0%} of the weights have {report['bits_per_quantized_weight']:.2f} bits with scales: {kinds}"
    )
    quality = report["quality"]
    table = Table(
        title=f"\nAgainst the original, over {quality['written']['positions']:,} tokens", title_justify="left"
    )
    table.add_column("rounding at these bits")
    for name in ("mean KL", "1 in 100 above", "same best"):
        table.add_column(name, justify="right")
    for name, row in (("to nearest", quality["nearest"]), ("as written", quality["written"])):
        mean = f"{max(row['mean'], 0):.2g} ± {row['error']:.1g}"
        table.add_row(name, mean, f"{max(row['worst'], 0):.2g}", f"{row['agreement']:.2%}")
    Console().print(table)
    print("KL: divergence of next-token probabilities, in nats (0.01: negligible, 0.1: noticeable)")
