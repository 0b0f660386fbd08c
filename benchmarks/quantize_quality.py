"""Compare ways to round weights to about 4 bits: KL divergence from the original, at equal size.

    python benchmarks/quantize_quality.py demo --gguf demo-Q4_K_M.gguf
    python benchmarks/quantize_quality.py path/to/stories260K

Every row is computed in float32 on the text of `quire inspect --quality`, so only weights differ. "GPTQ" and
"AWQ" are the published formulas, written here and run on the calibration text of `quire quantize`; Q4_0 is
computed as llama.cpp does; a GGUF file is read as it is. Tied embeddings are rounded too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quire.cli.quantize import LENGTH, PROBE, _built_in, _texts
from quire.cli.quantize_choice import mixed, uniform
from quire.cli.quantize_model import Original, matrices, pulled, width_of
from quire.cli.quantize_run import Rounding
from quire.program.ops.linear import Linear
from quire.quantize.compensate import Moments, _in_order
from quire.quantize.grid import Grid, nearest
from quire.quantize.kinds import Dense
from quire.quantize.quality import compare
from quire.quantize.round_to_nearest import quantize
from quire.weights.hub import open_model
from quire.weights.load import canonical

Weights = dict[str, np.ndarray]


def logits(original: Original, ids: np.ndarray, weight: Callable[[Any], np.ndarray]) -> np.ndarray:
    """Return the logits of texts [texts, T] with the weights that a function gives."""
    run = original.stream(ids)
    for number, op in enumerate(original.program):
        run.compute(number, {spec.name: weight(spec) for spec in op.weights()})
    return run.output()


def input_moments(original: Original, ids: np.ndarray) -> dict[str, Moments]:
    """Return the moments of the inputs of every matrix in the original model."""
    run, found = original.stream(ids), dict[str, Moments]()
    for number, op in enumerate(original.program):
        if isinstance(op, Linear):
            found[op.weight.name] = Moments.empty(op.x.width)
            found[op.weight.name].add(run.inputs(op.x), run.inputs(op.x))
        run.compute(number, original.weights(op))
    return found


def q4_0(weight: np.ndarray, grid: Grid) -> np.ndarray:
    """ggml's Q4_0 and back: the largest magnitude of a group is -8 times its float16 scale."""
    groups = weight.reshape(len(weight), -1, grid.group)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    scale = largest / np.float32(-8)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.minimum(15, np.trunc(groups * inverse + np.float32(8.5))) - 8
    return (codes * scale.astype(np.float16).astype(np.float32)).reshape(weight.shape)


def gptq(weight: np.ndarray, grid: Grid, moments: Moments) -> np.ndarray:
    """GPTQ (arXiv:2210.17323): columns in order, damping of 1%, scales of the largest magnitudes."""
    damped = moments.damped(0.01)
    factor = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    largest = np.abs(weight.reshape(len(weight), -1, grid.group)).max(-1)
    scales = grid.scales(largest / np.float32(7.5))
    codes = _in_order(weight, scales, factor, np.arange(weight.shape[1]), grid)
    return codes * np.repeat(scales, grid.group, axis=1)


def awq(weight: np.ndarray, grid: Grid, moments: Moments) -> np.ndarray:
    """AWQ (arXiv:2306.00978): inputs are scaled by a power of their size, the best of 20 for the outputs."""
    damped = moments.damped(0.0).astype(np.float32)
    size = np.sqrt(np.maximum(np.diag(damped), 1e-8))
    best, least = weight, np.inf
    for power in np.arange(20) / 20:
        factor = (size**power / np.exp(np.log(size**power).mean())).astype(np.float32)
        found = nearest(weight * factor, grid).dense() / factor
        rest = found - weight
        if (error := float(((rest @ damped) * rest).sum())) < least:
            best, least = found, error
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--gguf", help="the same model, quantized by llama.cpp")
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    original = Original.opened(open_model(args.model, None, weights=True))
    specs = matrices(original, embedding=True)
    grids = uniform(original, specs, 4, 32)
    calibration = _texts(original, _built_in("calibration.txt"), args.tokens)
    text = _texts(original, _built_in("quality.txt"), 4 * LENGTH)
    base = logits(original, text, original.weight)
    total = sum(spec.size for spec in specs.values())

    def show(name: str, bits: float, weight: Callable[[Any], np.ndarray]) -> None:
        quality = compare([(base, logits(original, text, weight))])
        row = f"{quality.mean:.4f} | {quality.error:.4f} | {quality.agreement:.1%}"
        print(f"| {name} | {bits:.2f} | {row} |", flush=True)

    def rounded(change: Callable[[Any, np.ndarray], np.ndarray]) -> Callable[[Any], np.ndarray]:
        return lambda spec: (
            change(spec, original.weight(spec)) if spec.name in specs else original.weight(spec)
        )

    def bits_of(chosen: dict[str, Grid]) -> float:
        return 8 * sum(chosen[n].nbytes(s.size // width_of(s), width_of(s)) for n, s in specs.items()) / total

    def ours(name: str, chosen: dict[str, Grid]) -> None:
        found: Weights = {}
        Rounding(original, chosen, lambda source, r: found.update({source: r.dense()})).run(
            calibration, lambda *told: None
        )
        show(
            name,
            bits_of(chosen),
            rounded(lambda spec, w: canonical(spec, Dense(found[spec.sources[0]])).dense()),
        )

    print(f"{args.model}: {total} weights, {text.size} tokens, calibrated on {calibration.size} others\n")
    print("| rounding | bits | mean KL | standard error | same best |\n|---|---|---|---|---|")
    show("`--quantization int4` at load", 4.25, rounded(lambda spec, w: quantize(spec, w, "int4").dense()))
    show("to nearest", bits_of(grids), rounded(lambda spec, w: nearest(w, grids[spec.name]).dense()))
    show("Q4_0", bits_of(grids), rounded(lambda spec, w: q4_0(w, grids[spec.name])))
    moments = input_moments(original, calibration)
    show("GPTQ", bits_of(grids), rounded(lambda s, w: gptq(w, grids[s.name], moments[s.name])))
    show("AWQ", bits_of(grids), rounded(lambda s, w: awq(w, grids[s.name], moments[s.name])))
    ours("`quire quantize`", grids)
    probe = calibration[:: max(1, len(calibration) // PROBE[0])][: PROBE[0], : PROBE[1]]
    ours("`quire quantize --bits 4.5`", mixed(original, specs, 4.5, probe, lambda *told: None))
    if args.gguf:
        tensors = open_model(args.gguf, None, weights=True).tensors()
        sizes = [tensors[s].storage.nbytes(tensors[s].shape) for w in specs.values() for s in w.sources]
        bits = 8 * sum(sizes) / total
        show(Path(args.gguf).stem, bits, lambda spec: pulled(spec, tensors))
        ours(f"`quire quantize --bits {bits:.2f}`", mixed(original, specs, bits, probe, lambda *told: None))


if __name__ == "__main__":
    main()
