"""A short check of an accelerator before it answers: products, attention and rotation, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.backends.backend import Capacity
from quire.backends.cuda.accelerator import Accelerator, DeviceFault
from quire.backends.cuda.backend import CudaBackend
from quire.backends.cuda.weights import place_weights
from quire.backends.reference import ReferenceBackend
from quire.errors import ConfigError
from quire.program.batch import Batch
from quire.program.builder import Builder, Names
from quire.program.program import Program
from quire.program.rope import Rope
from quire.quantize.kinds import DTYPES, Dense
from quire.quantize.round_to_nearest import quantize

ROWS = 18  # more than the smallest tile of a product has
_WIDTH, _HEADS, _GROUPS, _DIM, _VOCAB = 128, 4, 2, 64, 64
_BLOCK = 16
# Of the largest number of the result: products round nothing but sums; attention rounds queries and weights.
_TOLERANCES = {"products of bfloat16": 1e-5, "attention": 2e-2}


def check_accelerator(accelerator: Accelerator) -> None:
    """Compare three small programs with the reference backend; products of integers have its bits.

    Raises ConfigError, which says what is wrong, if any result differs.
    """
    rng = np.random.default_rng(0)
    for name, format in (
        ("products of int8", "int8"),
        ("products of int4", "int4"),
        ("products of bfloat16", "bf16"),
        ("attention", "bf16"),
    ):
        program = _attention() if name == "attention" else _product()
        weights = _weights(program, format, rng)
        try:
            found, wanted = _both(accelerator, program, weights)
        except DeviceFault as fault:
            raise ConfigError(f"{accelerator.name} fails in {name}: {fault.message}", fault.hint) from fault
        error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
        most = _TOLERANCES.get(name, 0.0)
        if not (error <= most and (most or found.tobytes() == wanted.tobytes())):
            problem = f"{accelerator.name} computes {name} wrongly: {error:.1e} from what NumPy computes"
            raise ConfigError(problem, "report it with the name of the GPU; device='native' uses the CPU")


def _product() -> Program:
    b, w = Builder(), Names("")
    x = b.sampled_rows(b.embed(w / "table", _VOCAB, _WIDTH))
    return b.program(b.linear(x, w / "matrix", _VOCAB))


def _attention() -> Program:
    b, w = Builder(), Names("")
    x = b.embed(w / "table", _VOCAB, _WIDTH)
    q = b.linear(x, w / "q", (_HEADS, _DIM))
    k, v = (b.linear(x, w / name, (_GROUPS, _DIM)) for name in ("k", "v"))
    q, k = (b.rotary(x, Rope(_DIM, 10_000.0)) for x in (q, k))
    mixed = b.attention(q, k, v, scale=_DIM**-0.5)
    return b.program(b.linear(b.sampled_rows(mixed), w / "matrix", _VOCAB))


def _weights(program: Program, format: str, rng: np.random.Generator) -> dict[str, Any]:
    """Return random weights, exact in bfloat16; matrices in a format."""
    found: dict[str, Any] = {}
    for name, spec in program.weights().items():
        floats = (rng.standard_normal(spec.shape) / 8).astype(DTYPES["bf16"])
        quantized = format not in DTYPES and spec.quantizable
        found[name] = quantize(spec, floats, format) if quantized else Dense(floats)
    return found


def _both(
    accelerator: Accelerator, program: Program, weights: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Return what an accelerator and the reference backend compute for two rows, the second of one token."""
    groups, counts = len(program.cache_groups), np.array([ROWS - 1, 1])
    tokens = np.arange(ROWS) * 7 % _VOCAB
    batch = Batch(
        token_ids=tokens,
        positions=np.append(np.arange(ROWS - 1), 0),
        row_offsets=np.cumsum([0, *counts]),
        block_tables=(np.array([[2, 0], [1, 1]]),) * groups,
        context_lens=counts,
        slots=np.arange(2),
        variants=np.zeros(2, np.int64),
        logit_rows=np.arange(ROWS),
        block_size=_BLOCK,
    )
    blocks = [3] * groups
    capacity = Capacity(blocks, _BLOCK, "bfloat16", 2)
    backend = CudaBackend(program, place_weights(program, weights, accelerator), accelerator, capacity)
    reference = ReferenceBackend(
        program, weights, num_blocks=blocks, block_size=_BLOCK, kv_cache_dtype="bfloat16"
    )
    return backend.execute(batch), np.array(reference.execute(batch))
