"""Check the cuda backend on a GPU, and measure it, in pieces that can be resumed.

    python scripts/gpu_check.py --quick                  # six minutes: what matters most, in this order
    python scripts/gpu_check.py                          # all pieces, each under ten minutes
    python scripts/gpu_check.py --report                 # writes what was measured into docs/gpu.md
    python scripts/gpu_check.py --interpreted --quick    # toy sizes on the CPU, with Triton: tests the script

Each piece runs in a process of its own and writes build/gpu_check/NAME.json; one that was finished, and not
only --quick or --interpreted, is left out unless --again is given, and what one that was ended had found is
kept. Needs the packages that Quire does, cuda-core, and the kernels of the GPU (`make cubins`), but not the
native core; nothing is built. The exit status is 0 if every piece that ran passed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "pure"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "model"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quire.backends.backend import Capacity
from quire.backends.cuda import divided, graphs, lower, segments
from quire.backends.cuda.accelerator import Accelerator, Argument, DeviceArray, Launch
from quire.backends.cuda.backend import CudaBackend
from quire.backends.cuda.caches import token_bytes
from quire.backends.cuda.coded_form import CodedForm, coded_form
from quire.backends.cuda.coded_launches import CodedArguments, coded_row, coded_tiles
from quire.backends.cuda.device import CudaDevice
from quire.backends.cuda.divided import divide, divided_axes
from quire.backends.cuda.kernels.product_variants import INTEGERS, quantized_tile
from quire.backends.cuda.kernels.variant import LARGE, row_block, size_of
from quire.backends.cuda.launch_list import product_grid
from quire.backends.cuda.library import LEAST_ROWS
from quire.backends.cuda.packing import packed, packed_shapes
from quire.backends.cuda.products import float_product
from quire.backends.cuda.quantizing import Quantizer
from quire.backends.cuda.refused import require_kernels
from quire.backends.cuda.rounding import quantized_row
from quire.backends.cuda.self_check import check_accelerator
from quire.backends.cuda.uploads import UploadRing
from quire.backends.cuda.weights import VECTOR, DeviceWeight, place_weights, plan_layout
from quire.backends.draft_model import DraftModel
from quire.backends.reference import ReferenceBackend
from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Program
from quire.program.builder import Builder, Names
from quire.program.numerics import SPAN
from quire.program.ops import Experts
from quire.program.passes import fuse, gather_products
from quire.program.program import WeightSpec
from quire.quantize.coded import Coded, pack_codes
from quire.quantize.kinds import DTYPES, Dense, FloatStorage, StoredWeight
from quire.quantize.round_to_nearest import quantize
from quire.quantize.scales import Scales
from quire.sampling_params import SamplingParams
from quire.types import Admission, Grant, Row, RowResult, Step

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 16
INT8, FLOAT = np.dtype(np.int8), np.dtype(np.float32)
BF16 = DTYPES["bf16"]
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
TOY = LLAMA_8B | {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
# Sizes of the tiny models of tests, raised to multiples of 16, which kernels for GPUs take for granted.
ALIGNED = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "intermediate_size_mlp": 192,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "n_embd": 128,
    "n_head": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "moe_num_experts": 16,
}
DENSE = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"),
    *("olmo2", "granite", "cohere2", "glm4", "gpt2", "starcoder2"),
)
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "minimax_m2")
# With recurrent states, convolutions, latents, or the cache of another layer.
OTHERS = ("qwen3_5", "lfm2", "falcon_h1", "nemotron_h", "gemma3n", "gemma4", "glm4_moe_lite", "deepseek_v3")
# Of weights and of the cache; the first two in a selection.
FORMATS = (
    ("bf16", "bfloat16"),
    ("int8", "int8"),
    ("int4", "bfloat16"),
    ("f32", "float32"),
    ("f16", "float16"),
)
OF_EXPERTS = (("bf16", "bfloat16"), ("mxfp4", "int8"), ("int8", "int8"), ("int4", "bfloat16"))
# Codes of other formats: bits, table, inputs of a group, type of the codes of scales, minimums or zeros.
CODED: dict[str, tuple[int, str, int, Any, str]] = {
    "mxfp4": (4, "fp4", 32, None, ""),
    "q8_0": (8, "signed", 32, None, ""),
    "q4_k": (4, "unsigned", 32, np.uint8, "minimums"),
    "q5_k": (5, "unsigned", 32, np.uint8, "minimums"),
    "q6_k": (6, "offset", 16, np.int8, ""),
    "q3_k": (3, "offset", 16, np.int8, ""),
    "iq4_xs": (4, "iq4nl", 32, np.int8, ""),
    "awq": (4, "unsigned", 128, None, "zeros"),
    "mlx of 8 bits": (8, "unsigned", 64, None, "minimums"),
}
TIMED = ("mxfp4", "q4_k", "q6_k", "q8_0")  # of them
ANY = SamplingParams(temperature=0.8, logprobs=1, max_tokens=4096)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.3},
    "top-k": {"top_k": 40},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.02},
    "all of these": {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2},
    "allowed": {"allowed_token_ids": list(range(3, 60, 2))},
}


@dataclass
class Piece:
    """An accelerator to measure, and what was found: rows of facts, and whether each is as it must be."""

    accelerator: Accelerator
    quick: bool
    toy: bool  # sizes for the interpreter
    save: Callable[[Piece], None]  # what was found so far
    rows: list[dict[str, Any]] = field(default_factory=list)
    passed: bool = True

    def found(self, passed: bool | None = None, **facts: Any) -> None:
        """Keep facts, with whether they are as they must be; None for a mere figure."""
        if passed is not None:
            facts["passed"] = bool(passed)
            self.passed &= bool(passed)
        self.rows.append(facts)
        self.save(self)
        print("  ", " ".join(f"{name}={_short(value)}" for name, value in facts.items()), flush=True)

    def sync(self) -> None:
        """Wait for everything that was launched."""
        self.accelerator.fetch(self.accelerator.allocate(256)).result()

    def seconds(self, launches: Sequence[Launch], repeats: int, dependent: bool = True) -> float:
        """Return the seconds of launches one after the other, in a graph, the mean of some replays."""
        for launch in launches:
            self.accelerator.launch(launch)
        graph = self.accelerator.capture(launches, dependent)
        graph.replay()
        self.sync()
        began_s = time.perf_counter()
        for _ in range(repeats):
            graph.replay()
        self.sync()
        return (time.perf_counter() - began_s) / repeats

    def array(self, values: np.ndarray) -> DeviceArray:
        """Return a copy of numbers on the accelerator."""
        found = self.accelerator.allocate(max(values.nbytes, 1)).part(0, values.shape, values.dtype)
        self.accelerator.write(found, values)
        return found

    def empty(self, *shape: int, dtype: np.dtype[Any] = FLOAT) -> DeviceArray:
        size = int(np.prod(shape)) * dtype.itemsize
        return self.accelerator.allocate(max(size, 1)).part(0, shape, dtype)


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def random_floats(seed: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return numbers of a normal distribution, repeated after a prime number of them."""
    some = np.random.default_rng(seed).standard_normal(min(int(np.prod(shape)), 1_000_003))
    return np.resize((some / np.sqrt(shape[-1])).astype(dtype), shape)


def random_integers(rng: np.random.Generator, parts: Sequence[tuple[Any, ...]]) -> list[np.ndarray]:
    """Return values, scales and channels of a packed weight, repeated after a prime number of them."""
    some = rng.integers(0, 256, 1_000_003, np.uint8)
    (values, kind), (scales, of_scales), (channels, _) = parts
    small = 1e-4 / np.sqrt(np.prod(values) / np.prod(channels))
    return [
        np.resize(some, values).view(kind),
        np.resize(some % 127 + 1, scales).astype(of_scales),
        np.full(channels, small, np.float32),
    ]


# Products by themselves


def rows_of(piece: Piece, x: np.ndarray) -> DeviceArray:
    """Return rows as products with bfloat16 weights take them: many are rounded before."""
    return piece.array(x.astype(BF16) if size_of(len(x)) == LARGE else x)


def product(piece: Piece, x: DeviceArray, weight: DeviceArray, out: DeviceArray) -> Launch:
    """Return the product of x [rows, inputs] and a bfloat16 weight [outputs, inputs]."""
    return float_product(out, x, weight, piece.empty(64))


@dataclass
class Integers:
    """Rows of quantized activations and a weight of random integers, for one quantized product."""

    piece: Piece
    format: str
    outputs: int
    inputs: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        parts = packed_shapes(self.format, (self.outputs, self.inputs))
        self.weight = [self.piece.array(own) for own in random_integers(rng, parts)]

    def launches(self, rows: int, out: DeviceArray) -> list[Launch]:
        """Return the quantization of random rows, and their product."""
        spans, piece = self.inputs // SPAN, self.piece
        x = piece.array(random_floats(2, (rows, self.inputs), FLOAT))
        parts = [piece.empty(rows, width, dtype=kind) for width, kind in quantized_row(self.inputs)]
        scaled = {"BLOCK_SCALED": self.format == "int8"}
        first = Launch("quantize_rows", (rows, spans, 1), (*parts, x, self.inputs), scaled)
        tile, none = quantized_tile(rows, self.outputs), piece.empty(64)
        grid = product_grid(-(-rows // tile["BLOCK_M"]), self.outputs, tile)
        args: tuple[Argument, ...] = (out, *parts, *self.weight, none, rows, self.outputs, spans)
        how = {"KIND": self.format, "BIAS": False, **tile}
        return [first, Launch("quantized_product", grid, args, how)]


@dataclass
class Codes(Integers):
    """The same of a weight in codes of another format, of which only the sizes matter."""

    def __post_init__(self) -> None:
        spec, few = WeightSpec("w", (16, 256), ("w",)), np.zeros((16, 256), np.float32)
        self.form = need_form(_stored(spec, few, self.format))
        some = np.random.default_rng(1).integers(0, 256, 1_000_003, np.uint8)
        self.weight = [
            self.piece.array(
                np.resize(some, shape).view(dtype) if dtype.itemsize == 1 else np.ones(shape, dtype)
            )
            for shape, dtype in self.form.parts((self.outputs, self.inputs)).values()
        ]

    def launches(self, rows: int, out: DeviceArray) -> list[Launch]:
        spans, piece, form = self.inputs // SPAN, self.piece, self.form
        x, none = piece.array(random_floats(2, (rows, self.inputs), FLOAT)), piece.empty(64)
        weight = DeviceWeight(form.format, (self.outputs, self.inputs), tuple(self.weight))
        own = CodedArguments.of(weight, form, none)
        parts = [piece.empty(rows, width, dtype=kind) for width, kind in coded_row(form, self.inputs)]
        order = piece.array(np.zeros(1, np.int32))
        how = {"SPAN_INPUTS": form.span, "UNIT": form.kind.unit}
        first = Launch("quantize_coded_rows", (rows, spans, 1), (*parts, x, order, self.inputs, 0), how)
        tile = coded_tiles(form)(rows)
        grid = product_grid(-(-rows // int(tile["BLOCK_M"])), self.outputs, tile)
        args: tuple[Argument, ...] = (out, *parts, *own.arrays, none, rows, self.outputs, spans)
        return [first, Launch("coded_product", grid, (*args, *own.numbers, 0), tile)]


def need_form(weight: StoredWeight) -> CodedForm:
    """Return the form of a weight in codes. Raises ValueError for another one."""
    if (form := coded_form(weight.storage)) is None:
        raise ValueError(f"{weight.storage} has no codes")
    return form


# Whole models


def random_model(
    piece: Piece, config: dict[str, Any], quantization: str | None
) -> tuple[Program, dict[str, DeviceWeight], int]:
    """Return a program, weights that all layers share, and the bytes that the layers would have alone."""
    program = fuse(read_model(config).program)
    device = CudaDevice(piece.accelerator, "check")
    specs = program.weights()
    storage = {name: device.storage(spec, FloatStorage("bf16"), quantization) for name, spec in specs.items()}
    held: dict[Any, DeviceWeight] = {}
    found, nbytes = {}, 0
    for place in plan_layout(program, storage).parts:
        key = place.format, place.shape
        if key not in held:
            held[key] = _random_weight(piece, place.format, place.shape)
        found[place.name] = held[key]
        nbytes += place.nbytes
    return program, found, nbytes


def _random_weight(piece: Piece, format: str, shape: tuple[int, ...]) -> DeviceWeight:
    if format == VECTOR:
        return DeviceWeight(format, shape, (piece.array(np.ones(shape, np.float32)),))
    if format in DTYPES:
        with UploadRing(piece.accelerator.ranks[0]) as ring:
            array = piece.empty(*shape, dtype=DTYPES[format])
            ring.put(array, random_floats(3, shape, DTYPES[format]))
        return DeviceWeight(format, shape, (array,))
    own = random_integers(np.random.default_rng(4), packed_shapes(format, shape))
    return DeviceWeight(format, shape, tuple(map(piece.array, own)))


@dataclass
class Asked:
    """A request of a stream: its prompt, how many tokens to draw, and its number."""

    number: int
    prompt: list[int]
    num_tokens: int
    params: SamplingParams = field(default_factory=lambda: ANY)


class Streams:
    """Runs requests by steps on a backend, as a scheduler would: prompts in chunks, then one token a step."""

    def __init__(
        self, piece: Piece, model: Any, num_slots: int, longest: int, kv_dtype: str = "bfloat16"
    ) -> None:
        program, weights, _ = model
        self.each = -(-longest // BLOCK)
        self.groups = len(program.cache_groups)
        capacity = Capacity([num_slots * self.each] * self.groups, BLOCK, kv_dtype, num_slots, 0, 2)
        self.backend = CudaBackend(program, weights, piece.accelerator, capacity)
        self.index = 0
        self.held: tuple[int, ...] = ()  # slots that the next run releases
        self.step_s: list[tuple[int, float]] = []  # rows that decode alone, and seconds
        self.first_s = 0.0  # until every prompt is computed

    def run(self, asked: Sequence[Asked], chunk: int = 512, ahead: bool = True) -> list[list[RowResult]]:
        """Return the results of each request, all computed together; as its slot each has its place."""
        results: list[list[RowResult]] = [[] for _ in asked]
        flight: deque[tuple[Any, Step]] = deque()
        began_s = last_s = time.perf_counter()
        self.step_s, self.first_s = [], 0.0
        for step in self._steps(asked, chunk):
            flight.append((self.backend.launch(step), step))
            while len(flight) > (1 if ahead else 0):
                last_s = self._collect(flight, results, began_s, last_s)
        while flight:
            last_s = self._collect(flight, results, began_s, last_s)
        return results

    def _collect(self, flight: Any, results: Any, began_s: float, last_s: float) -> float:
        launched, step = flight.popleft()
        found, now_s = launched.result(), time.perf_counter()
        for row, result in zip(step.rows, found.rows, strict=True):
            if result.error is not None:
                raise RuntimeError(f"a row failed: {result.error.message}")
            if row.sample:
                results[row.slot].append(result)
        if all(row.count == 1 for row in step.rows):
            self.step_s.append((len(step.rows), now_s - last_s))
        else:
            self.first_s = now_s - began_s
        return now_s

    def _granted(self, slot: int) -> tuple[Grant, ...]:
        blocks = tuple(range(slot * self.each, (slot + 1) * self.each))
        return tuple(Grant(slot, group, 0, blocks) for group in range(self.groups))

    def _steps(self, asked: Sequence[Asked], chunk: int) -> Iterator[Step]:
        """Yield steps: in each all rows that decode, and of prompts what is left of a chunk."""
        computed, drawn, admitted = [0] * len(asked), [0] * len(asked), [False] * len(asked)
        while True:
            rows, new = [], []
            left = chunk
            for slot, one in enumerate(asked):
                length = len(one.prompt)
                if drawn[slot] >= one.num_tokens:
                    continue
                if computed[slot] >= length:
                    rows.append(Row(slot, computed[slot], 1))
                    computed[slot] += 1
                    drawn[slot] += 1
                    continue
                count = min(left, length - computed[slot])
                if not count:
                    continue
                left -= count
                last = computed[slot] + count == length
                tokens = () if admitted[slot] else tuple(one.prompt)
                if not admitted[slot]:
                    params = replace(one.params, seed=one.number)
                    new.append(Admission(slot, str(one.number), 0, params, (), length))
                    admitted[slot] = True
                rows.append(Row(slot, computed[slot], count, tokens, last, int(last)))
                computed[slot] += count
                drawn[slot] += last
            if not rows:
                self.held = tuple(range(len(asked)))
                return
            granted = tuple(grant for one in new for grant in self._granted(one.slot))
            released, self.held = self.held, ()
            yield Step(self.index, tuple(rows), tuple(new), granted, released)
            self.index += 1


def told(results: Sequence[RowResult]) -> list[Any]:
    """Return tokens and the bits of their log-probabilities."""
    return [
        (one.token_ids, [np.float32(entry.logprob).tobytes() for place in one.logprobs for entry in place])
        for one in results
    ]


def prompts(number: int, vocab: int, lengths: Sequence[int], num_tokens: int) -> list[Asked]:
    rng = np.random.default_rng(number)
    return [
        Asked(i, rng.integers(3, vocab, lengths[i % len(lengths)]).tolist(), num_tokens)
        for i in range(number)
    ]


# The pieces, in the order of their value


def check_launch(piece: Piece) -> None:
    """Compiled kernels load and launch."""
    accelerator: Any = piece.accelerator
    piece.found(device=accelerator.in_words(), target=accelerator.target, free_bytes=accelerator.free_bytes())
    if not piece.toy:
        began_s, keys, wrong = time.perf_counter(), list(accelerator.manifest.targets[accelerator.target]), []
        for key in keys:
            try:
                accelerator._load(key)
            except Exception as error:
                wrong.append(f"{key}: {error}")
        facts = {"kernels": len(keys), "wrong": wrong, "seconds": time.perf_counter() - began_s}
        piece.found(not wrong, what="all kernels load", **facts)
    began_s = time.perf_counter()
    try:
        check_accelerator(accelerator)
        problem = ""
    except ConfigError as error:
        problem = error.message
    piece.found(not problem, what="self-check", problem=problem, seconds=time.perf_counter() - began_s)
    _dependent(piece)


def _dependent(piece: Piece) -> None:
    """Launches of a graph, each of which doubles what the one before wrote; and what one takes."""
    width, number = (1024, 4) if piece.toy else (1 << 21, 120)
    small, ones, replays = piece.empty(1, 1024), np.ones((1, width), np.float32), 1 if piece.toy else 50
    for dependent in (True, False):
        x = piece.array(ones)
        double = Launch("scale", (1, width // 1024, 1), (x, x, width, 2.0), {"BLOCK": 1024})
        piece.accelerator.launch(double)
        piece.accelerator.capture([double] * (number - 1), dependent).replay()
        right = bool((piece.accelerator.fetch(x).result() == 2.0**number).all())
        short = Launch("scale", (1, 1, 1), (small, small, 1024, 1.0), {"BLOCK": 1024})
        each_s = piece.seconds([short] * number, replays, dependent) / number
        piece.found(right, what="launches in a graph", dependent=dependent, us_each=each_s * 1e6)


def check_ops(piece: Piece) -> None:
    """Every op in models of all families, against the reference backend; products of integers exactly."""
    for format in (*INTEGERS, *CODED):
        for rows in (1, 18) if piece.toy else (1, 16, 17, 64, 129):
            _integer_bits(piece, format, rows, 256 if piece.toy else 1024)
    for format in INTEGERS:
        _rounded_weights(piece, format)
    families = ("llama", "gpt_oss", "lfm2") if piece.toy else (*DENSE, *MIXTURES, *OTHERS)
    for family in families:
        formats = OF_EXPERTS if family in MIXTURES else FORMATS
        for format, cache in formats[1:2] if piece.toy else formats[: 2 if piece.quick else None]:
            try:
                _family(piece, family, format, "bfloat16" if family == "gemma2" else cache)
            except Exception as error:  # of one family: the others are told, too
                piece.found(False, family=family, format=format, error=str(error)[:300])
    if not piece.toy:
        _fused(piece, "llama", 0.0)
    _drafts(piece)
    _images(piece)
    _fused(piece, "qwen3", 1e-2)  # another kernel adds the squares of a head, perhaps in another order


def _integer_bits(piece: Piece, format: str, rows: int, size: int) -> None:
    b, w = Builder(), Names("")
    x = b.sampled_rows(b.embed(w / "table", 256, size))
    program = b.program(b.linear(x, w / "matrix", size))
    table = random_floats(5, (256, size), FLOAT)
    matrix = _stored(program.weights()["matrix.weight"], random_floats(6, (size, size), FLOAT), format)
    paged = _pair(piece, program, {"table.weight": Dense(table), "matrix.weight": matrix}, "float32")
    found, wanted = (one.prefill(one.sequence(range(rows))) for one in paged)
    differ = int((found.view(np.uint32) != wanted.view(np.uint32)).sum())
    piece.found(differ == 0, what="integer product, bits", format=format, rows=rows, size=size, differ=differ)


def _rounded_weights(piece: Piece, format: str) -> None:
    """Round a matrix on the accelerator, and compare the integers and scales with those of the definition."""
    shape = (16, 96) if piece.toy else (1024, 4096)
    floats = random_floats(11, shape, BF16)
    arrays = tuple(piece.empty(*own, dtype=dtype) for own, dtype in packed_shapes(format, shape))
    spec = WeightSpec("matrix", shape, ("matrix",))
    with UploadRing(piece.accelerator.ranks[0]) as ring:
        quantizer = Quantizer(piece.accelerator, ring)
        quantizer.put(spec, floats, format, arrays)
        quantizer.finish()
    wanted: Any = packed(quantize(spec, floats, format))
    found = [piece.accelerator.fetch(array).result() for array in arrays]
    pairs = zip(found, (wanted.values, wanted.scales, wanted.channels), strict=True)
    differ = sum(int((own != other).sum()) for own, other in pairs)
    piece.found(differ == 0, what="a rounded matrix, bits", format=format, differ=differ)


def _pair(piece: Piece, program: Program, weights: dict[str, Any], cache: str) -> tuple[Any, Any]:
    """Return a program on the accelerator and on the reference backend."""
    from tiny import Paged

    def make(
        program: Program, weights: Any, *, num_blocks: Any, block_size: int, kv_cache_dtype: str, **_: Any
    ) -> Any:
        capacity = Capacity(num_blocks, block_size, kv_cache_dtype, 8)
        placed = place_weights(program, weights, piece.accelerator)
        return CudaBackend(program, placed, piece.accelerator, capacity)

    options: dict[str, Any] = {"num_blocks": 16, "kv_cache_dtype": cache}
    own = Paged(program, weights, make=make, **options)
    if cache == "int8":  # the reference backend has none
        options["kv_cache_dtype"] = "float32"
    return own, Paged(program, weights, make=ReferenceBackend, **options)


def _stored(spec: WeightSpec, floats: np.ndarray, format: str) -> StoredWeight:
    """Return a weight in a format; codes of others are random, with scales that make it about as large."""
    if format in DTYPES:
        return Dense(floats.astype(DTYPES[format]))
    if format not in CODED:
        return quantize(spec, floats, format)
    rng, inputs = np.random.default_rng(spec.shape[-1]), spec.shape[-1]
    bits, table, group, of_scales, shift = CODED[format]
    packed = pack_codes(rng.integers(0, 1 << bits, spec.shape).astype(np.uint8), bits)
    rows = (*spec.shape[:-1], -(-inputs // group))

    def scales(size: float) -> Scales:
        if format == "mxfp4":
            return Scales(rng.integers(121, 124, rows).astype(np.uint8))
        if of_scales is None:
            return Scales((size * rng.random(rows)).astype(np.float16))
        together = 256 // group
        values = (size / 32 * rng.random((*rows[:-1], -(-rows[-1] // together)))).astype(np.float16)
        return Scales(values, rng.integers(0, 64, rows).astype(of_scales), together, 6)

    minimums = scales(-0.05) if shift == "minimums" else None
    zeros = rng.integers(0, 1 << bits, rows).astype(np.uint8) if shift == "zeros" else None
    own = scales(0.2 / (1 << bits))
    return Coded(format, packed, bits, inputs, table, group, own, minimums, zeros)


def _model(family: str, format: str) -> tuple[Program, dict[str, Any]]:
    """Return a small model of a family with random weights."""
    from tiny import CONFIGS, random_weights
    from widened import wide_config

    config = CONFIGS[family] | {name: size for name, size in ALIGNED.items() if name in CONFIGS[family]}
    if family in OTHERS:
        config = wide_config(family)
    if family == "gemma2":  # its caps are compiled for heads of 128 and 256 over bfloat16
        config |= {"head_dim": 128, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    program = fuse(read_model(config).program)
    storage = {name: FloatStorage("bf16") for name in program.weights()}
    require_kernels(program, storage)
    weights: dict[str, Any] = {}
    for name, weight in random_weights(program).items():
        spec = program.weights()[name]
        # Of MXFP4 are the experts, as gpt-oss is published.
        kept = not spec.quantizable or (format == "mxfp4" and len(spec.shape) == 2)
        own = "bf16" if kept and format not in DTYPES else format
        weights[name] = _stored(spec, weight.array.astype(DTYPES.get(format, BF16)), own)
    return program, weights


def _family(piece: Piece, family: str, format: str, cache: str) -> None:
    program, weights = _model(family, format)
    own, reference = _pair(piece, program, weights, cache)
    tokens = (np.arange(40) * 13 % 250).tolist()
    length = 9 if piece.toy else 40
    found = own.prefill(own.sequence(tokens[:length]), (5, 1, 1))
    whole = own.prefill(own.sequence(tokens[:length]))
    wanted = reference.prefill(reference.sequence(tokens[:length]))
    errors = np.abs(found - wanted).max(-1) / np.abs(wanted).max()
    # Activations and caches are rounded differently, and then a token may choose another expert; the random
    # norms of Gemma 2 make much of little.
    chooses = any(isinstance(op, Experts) for op in program)
    error = float(np.median(errors) if chooses or family == "gemma2" else errors.max())
    same = found.tobytes() == whole.tobytes()
    facts = {
        "family": family,
        "format": format,
        "cache": cache,
        "error": error,
        "largest": float(errors.max()),
        "same_in_chunks": same,
    }
    piece.found(same and error <= (1e-3 if format == "f32" else 0.1), **facts)


def _fused(piece: Piece, family: str, most: float) -> None:
    """Compare norm, rotation and the write of keys and values in one launch with those of several."""
    program, weights = _model(family, "bf16")
    tokens, cuts = (np.arange(40) * 13 % 250).tolist(), (5, 1, 1)
    found, prepared = [], lower.prepared
    for how in (prepared, gather_products):
        lower.prepared = how
        try:
            own, _ = _pair(piece, program, weights, "bfloat16")
            found.append(own.prefill(own.sequence(tokens[: 9 if piece.toy else 40]), cuts))
        finally:
            lower.prepared = prepared
    error = float(np.abs(found[0] - found[1]).max() / np.abs(found[1]).max())
    same = found[0].tobytes() == found[1].tobytes()
    piece.found(
        same or error <= most, what="rotation and write in one", family=family, error=error, same=same
    )


def _drafts(piece: Piece) -> None:
    """Let a model draft for itself: every token that it proposes is accepted."""
    from drafted import TEXTS, Drafts

    program, stored = _model("llama", "bf16")
    weights = place_weights(program, stored, piece.accelerator)
    capacity = Capacity([64] * len(program.cache_groups), BLOCK, "bfloat16", len(TEXTS))
    draft = DraftModel(program, weights, 512, 256)
    drafts = Drafts(program, CudaBackend(program, weights, piece.accelerator, capacity, draft))
    texts = TEXTS[1:3] if piece.toy else TEXTS
    drafts.run([drafts.admit(slot, text) for slot, text in enumerate(texts)], 30 if piece.toy else 110)
    drafted, accepted = drafts.num_drafted, drafts.num_accepted
    piece.found(0 < drafted == accepted, what="a model drafts for itself", drafted=drafted, accepted=accepted)


def _images(piece: Piece) -> None:
    """Compare what models predict of prompts with images with the reference, and in chunks."""
    from seeing_on_gpu import MODELS, chunks_of, model, on_gpu, on_reference, scores

    for name in ("qwen3_vl",) if piece.toy else MODELS:
        of = model(name)
        found, parts = (
            scores(of, on_gpu(of, "bfloat16", "bf16", piece.accelerator), *chunks)
            for chunks in ((), chunks_of(of))
        )
        wanted = scores(of, on_reference(of))
        values = [
            [{entry.token_id: entry.logprob for entry in one[at]} for one in (found, wanted)] for at in wanted
        ]
        error = max(abs(own[token] - other[token]) for own, other in values for token in other)
        same = found == parts
        piece.found(same and error < 0.3, what="images", family=name, error=error, same_in_chunks=same)


def check_bits(piece: Piece) -> None:
    """A row has the same bits among any number of rows; a token the same alone and in a chunk."""
    shapes = (
        [(64, 128)] if piece.toy else [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (2048, 512)]
    )
    counts = (1, 2, 18) if piece.toy else (1, 2, 8, 16, 17, 32, 64, 128, 129, 512, 2048, 8192)
    for outputs, inputs in shapes[:4] if piece.quick else shapes:
        x = random_floats(7, (max(counts), inputs), FLOAT)
        weight = piece.array(random_floats(8, (outputs, inputs), BF16))
        first: np.ndarray | None = None
        for rows in counts:
            own, out = rows_of(piece, x[:rows]), piece.empty(rows, outputs)
            piece.accelerator.launch(product(piece, own, weight, out))
            found = piece.accelerator.fetch(out.rows(0, 1)).result()
            first = found if first is None else first
            differ = int((found.view(np.uint32) != first.view(np.uint32)).sum())
            piece.found(
                differ == 0, what="first row, bits", outputs=outputs, inputs=inputs, rows=rows, differ=differ
            )
    config = TOY if piece.toy else LLAMA_8B | {"num_hidden_layers": 2, "vocab_size": 1024}
    for quantization in (None, "int8"):
        model = random_model(piece, config, quantization)
        length = 8 if piece.toy else 700
        one = prompts(1, config["vocab_size"], (length,), 4)
        runs = [
            Streams(piece, model, 2, length + 8).run(one, chunk) for chunk in (length, 3 if piece.toy else 64)
        ]
        same = told(runs[0][0]) == told(runs[1][0])
        piece.found(same, what="a prompt whole and in chunks", quantization=quantization or "bf16")
    _segments(piece, random_model(piece, config, None), "llama")
    program, stored = _model("deepseek_v3", "bf16")
    _segments(piece, (program, place_weights(program, stored, piece.accelerator), 0), "deepseek_v3")


def _segments(piece: Piece, model: Any, family: str) -> None:
    """Compare decode steps whose contexts are divided into segments with those of one program each."""
    longest, length = 2600, 8 if piece.toy else 2560
    vocab, least, found = model[0].output.width, segments.LEAST, []
    asked = prompts(2, vocab, (length, length // 2), 3)
    for segments.LEAST in (least, 1 << 30):
        try:
            found.append([told(one) for one in Streams(piece, model, 2, longest).run(asked)])
        finally:
            segments.LEAST = least
    same = found[0] == found[1]
    piece.found(same, what="segments of a context and one program", family=family, tokens=length)


def check_exact(piece: Piece) -> None:
    """Requests give the same bits alone and together, in chunks, with graphs and without; and a control."""
    config = TOY if piece.toy else LLAMA_8B | {"num_hidden_layers": 4, "vocab_size": 32064}
    number, tokens = (2, 3) if piece.toy else (24, 24)
    lengths = (3, 9) if piece.toy else (5, 130, 47, 600, 1, 64, 513, 17)
    chosen: tuple[str | None, ...] = (None, "int8") if piece.quick else (None, "int8", "int4")
    chosen = chosen[:1] if piece.toy else chosen
    for quantization in chosen:
        model = random_model(piece, config, quantization)
        asked = prompts(number, config["vocab_size"], lengths, tokens)
        streams = Streams(piece, model, number, max(lengths) + tokens + 1)
        alone = [told(streams.run([one])[0]) for one in asked]
        ways: dict[str, dict[str, Any]] = {
            "together": {},
            "chunks": {"chunk": 7},
            "one step": {"ahead": False},
        }
        for name, how in ways.items():
            found = [told(results) for results in streams.run(asked, **how)]
            _same(piece, name, quantization, found, alone)
        for name, how in {"no graphs": {"rows": 0}, "launches in turn": {"dependent": False}}.items():
            with _graphs(**how):
                others = Streams(piece, model, number, max(lengths) + tokens + 1)
                _same(piece, name, quantization, [told(one) for one in others.run(asked)], alone)
        captured = sorted(rows for rows, _ in streams.backend._graphs._graphs)
        kept = quantization or "bf16"
        piece.found(bool(captured), what="steps were replayed", weights=kept, rows=captured)
        digest = hashlib.sha256(repr(alone).encode()).hexdigest()[:16]  # to compare GPUs of one target by
        piece.found(what="all results", weights=kept, sha256=digest)
    _samplings(piece, model, config["vocab_size"])
    for family in ("mixtral",) if piece.toy else ("llama", "mixtral", "deepseek_v3"):
        _divided(piece, family)
    _control(piece)


@contextmanager
def _graphs(rows: int = graphs.MOST_ROWS, dependent: bool = True) -> Iterator[None]:
    """Let steps of so many rows have graphs, whose launches are dependent or not."""
    before = graphs.MOST_ROWS, graphs.DEPENDENT
    graphs.MOST_ROWS, graphs.DEPENDENT = rows, dependent
    try:
        yield
    finally:
        graphs.MOST_ROWS, graphs.DEPENDENT = before


def _divided(piece: Piece, family: str) -> None:
    """Compare a model on one GPU with its parts on two, or on one twice: in chunks, then with graphs."""
    program, stored = _model(family, "bf16")
    asked = prompts(2, program.output.width, (5, 9) if piece.toy else (40, 70), 4)
    group, least, divided.LEAST_SIZE = _two_ranks(piece), divided.LEAST_SIZE, 0
    found = []
    try:
        for accelerator in (piece.accelerator, group):
            axes = divided_axes(program, accelerator.num_ranks)
            own = divide(program, accelerator.num_ranks, axes)
            model = own, place_weights(own, stored, accelerator, axes), 0
            streams = Streams(replace(piece, accelerator=accelerator), model, 2, 80)
            found.append([told(one) for one in streams.run(asked, 16)])
    finally:
        divided.LEAST_SIZE = least
    same, gpus = found[0] == found[1], ", ".join(rank.name for rank in group.ranks)
    piece.found(same, what="two ranks and one", family=family, on=gpus)


def _two_ranks(piece: Piece) -> Accelerator:
    """Return a group of the GPU that is checked and the next one, or of itself twice."""
    if piece.toy:
        from quire.backends.cuda.interpreted import InterpretedGroup

        return InterpretedGroup(2)
    from quire.backends.cuda.driver import open_gpu
    from quire.backends.cuda.gpu_group import GpuGroup

    index = int(piece.accelerator.name.partition(":")[2])
    try:
        return GpuGroup([open_gpu(index), open_gpu(index + 1)])
    except ConfigError:  # there is no other, or one of another kind
        return GpuGroup([open_gpu(index), open_gpu.__wrapped__(index)])  # each with a stream of its own


def _samplings(piece: Piece, model: Any, vocab: int) -> None:
    """Compare tokens that kernels draw with those that the host draws, by the definition."""
    asked = prompts(len(SAMPLINGS), vocab, (5, 9), 2 if piece.toy else 32)
    for one, (name, how) in list(zip(asked, SAMPLINGS.items(), strict=True))[:: 3 if piece.toy else 1]:
        # The last token is never drawn, so that a phrase of it, which the host alone knows, changes nothing.
        one.params = replace(ANY, **how, logit_bias={vocab - 1: -100.0})
        on_host = replace(one.params, bad_words_token_ids=((vocab - 1, vocab - 1),))
        found = [
            [token for result in Streams(piece, model, 1, 64).run([way])[0] for token in result.token_ids]
            for way in (one, replace(one, params=on_host))
        ]
        piece.found(found[0] == found[1], what="tokens of the host", sampling=name, tokens=len(found[0]))


def _same(piece: Piece, way: str, quantization: str | None, found: list[Any], wanted: list[Any]) -> None:
    differ = sum(own != other for own, other in zip(found, wanted, strict=True))
    piece.found(differ == 0, way=way, weights=quantization or "bf16", requests=len(found), differ=differ)


def _control(piece: Piece) -> None:
    """Show that another order of sums is seen: a product of two halves of the inputs, then their sum."""
    rows, outputs, inputs = (4, 64, 512) if piece.toy else (16, 4096, 4096)
    x, weight = random_floats(9, (rows, inputs), FLOAT), random_floats(10, (outputs, inputs), BF16)
    sums, half = [piece.empty(rows, outputs) for _ in range(4)], inputs // 2
    for i, part in enumerate((slice(None), slice(half), slice(half, None))):
        own, matrix = (np.ascontiguousarray(array[:, part]) for array in (x, weight))
        piece.accelerator.launch(product(piece, rows_of(piece, own), piece.array(matrix), sums[i]))
    block = row_block(outputs)
    grid = (rows, -(-outputs // block), 1)
    piece.accelerator.launch(Launch("add", grid, (sums[3], sums[1], sums[2], outputs), {"BLOCK": block}))
    whole, halves = (piece.accelerator.fetch(sums[i]).result() for i in (0, 3))
    differ = float((whole.view(np.uint32) != halves.view(np.uint32)).mean())
    close = np.allclose(whole, halves, rtol=1e-3, atol=1e-3)
    piece.found(differ > 0.01 and close, what="control: sums in another order differ", share=differ)


def check_speed(piece: Piece) -> None:
    """Bandwidth and arithmetic of products, of one kernel that only reads and writes, and of attention."""
    shapes = (
        [(64, 128)]
        if piece.toy
        else [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
    )
    few, many = ((1,), (18,)) if piece.toy else ((1, 8, 16, 64), (512, 2048, 8192))
    if piece.quick:
        shapes, few, many = shapes[2:4] or shapes, few[:1] + few[3:], many[1:2] or many
    repeats, copies = (1, 1) if piece.toy else (20, 4)
    _copy_speed(piece, repeats)
    for outputs, inputs in shapes:
        size = outputs * inputs
        weights = [piece.array(random_floats(i, (outputs, inputs), BF16)) for i in range(copies)]
        for rows in (*few, *many):
            x = rows_of(piece, random_floats(9, (rows, inputs), FLOAT))
            out = piece.empty(rows, outputs)
            took_s = piece.seconds([product(piece, x, weight, out) for weight in weights], repeats) / copies
            _rates(piece, "bf16", rows, outputs, inputs, 2 * size, took_s)
            if rows >= LEAST_ROWS:
                _by_cublas(piece, product(piece, x, weights[0], out), took_s, repeats)
        for format in (*INTEGERS, *TIMED):
            of = Integers if format in INTEGERS else Codes
            many_weights = [of(piece, format, outputs, inputs) for _ in range(copies)]
            for rows in (*few, *many):
                out = piece.empty(rows, outputs)
                launches = [one for own in many_weights for one in own.launches(rows, out)]
                took_s = piece.seconds(launches, repeats) / copies
                nbytes = sum(array.num_bytes for array in many_weights[0].weight)
                _rates(piece, format, rows, outputs, inputs, nbytes, took_s)


def _rates(
    piece: Piece, format: str, rows: int, outputs: int, inputs: int, nbytes: int, took_s: float
) -> None:
    moved = nbytes + 4 * rows * (outputs + inputs)
    rates = {"gb_per_s": moved / took_s / 1e9, "tops": 2 * rows * outputs * inputs / took_s / 1e12}
    piece.found(
        what="product", format=format, rows=rows, outputs=outputs, inputs=inputs, us=took_s * 1e6, **rates
    )


def _by_cublas(piece: Piece, launch: Launch, kernel_s: float, repeats: int) -> None:
    """Compare a large product with cuBLAS, where it is installed: bits, and times if they are equal."""
    if (library := piece.accelerator.ranks[0].open_library()) is None:
        return
    rows, outputs, inputs = launch.args[4:7]
    facts = {"what": f"product by {library.name}", "rows": rows, "outputs": outputs, "inputs": inputs}
    if not library.prove([launch]):
        piece.found(**facts, equal_bits=0)
        return
    piece.accelerator.launch(launch)
    piece.sync()
    began_s = time.perf_counter()
    for _ in range(repeats):
        piece.accelerator.launch(launch)
    piece.sync()
    took_s = (time.perf_counter() - began_s) / repeats
    piece.found(**facts, equal_bits=1, us=took_s * 1e6, times_as_fast=kernel_s / took_s)


def _copy_speed(piece: Piece, repeats: int) -> None:
    rows, width = (4, 256) if piece.toy else (1 << 17, 4096)
    x, out = piece.empty(rows, width), piece.empty(rows, width)
    block = row_block(width)
    grid = (rows, -(-width // block), 1)
    took_s = piece.seconds([Launch("scale", grid, (out, x, width, 2.0), {"BLOCK": block})], repeats)
    piece.found(what="scale: reads and writes", gb_per_s=8 * rows * width / took_s / 1e9)


def check_model(piece: Piece) -> None:
    """An 8B shape end to end: tokens per second by streams, the time of a prompt, with graphs and without."""
    config = TOY if piece.toy else LLAMA_8B
    runs = [(1, 128, 64), (64, 128, 64)] if piece.quick else [(1, 128, 128), (64, 1024, 128), (256, 1024, 64)]
    runs = [(1, 4, 3), (3, 4, 3)] if piece.toy else runs
    formats: tuple[str | None, ...] = (None, "int8") if piece.quick else (None, "int8", "int4")
    formats = formats[1:2] if piece.toy else formats
    for quantization in formats:
        model = random_model(piece, config, quantization)
        for number, length, tokens in runs:
            ways: dict[str, dict[str, Any]] = {
                "dependent launches": {},
                "launches in turn": {"dependent": False},
                "none": {"rows": 0},
            }
            for name, how in ways.items():
                with _graphs(**how):
                    _decode(piece, model, quantization, (number, length, tokens), name)
        length = 8 if piece.toy else 2048
        streams = Streams(piece, model, 1, length + 2)
        for chunk in (length,) if piece.quick or piece.toy else (512, length):
            streams.run(prompts(1, config["vocab_size"], (length,), 1), chunk)
            streams.run(prompts(1, config["vocab_size"], (length,), 1), chunk)
            facts = {"tokens": length, "chunk": chunk, "tokens_per_s": length / streams.first_s}
            piece.found(what="prompt", weights=quantization or "bf16", first_token_s=streams.first_s, **facts)
    few = random_model(piece, config if piece.toy else config | {"num_hidden_layers": 4}, None)
    for number in (1,) if piece.toy else (1, 64):
        _drafting(piece, few, number)


def _drafting(piece: Piece, model: Any, number: int) -> None:
    """Time the passes of a draft model of four layers, which propose four tokens after each step."""
    program, weights, nbytes = model
    each, num_steps = 8, 3 if piece.toy else 24
    capacity = Capacity([number * each] * len(program.cache_groups), BLOCK, "bfloat16", number)
    draft = DraftModel(program, weights, 64 * number, BLOCK * each)
    backend = CudaBackend(program, weights, piece.accelerator, capacity, draft)
    text, took_s, right = list(range(3, 11)), [], True
    for index in range(num_steps):
        rows, admitted, granted = [], [], []
        for slot in range(number):
            rows.append(Row(slot, len(text) + index - 1, 1))
            if index == 0:
                rows[slot] = Row(slot, 0, len(text), tuple(text), True, 1)
                admitted.append(Admission(slot, str(slot), slot, replace(ANY, seed=slot), (), len(text)))
                granted.append(Grant(slot, 0, 0, tuple(range(slot * each, (slot + 1) * each))))
        step = Step(index, tuple(rows), tuple(admitted), tuple(granted), num_proposed=4)
        result = backend.launch(step).result()
        took_s.append(result.draft_s)
        right &= all(sum(len(draft.token_ids) for draft in row.drafts) == 4 for row in result.rows)
    middle_s = float(np.median(took_s[len(took_s) // 2 :]))
    rate = 4 * nbytes / middle_s / 1e9  # each pass reads the weights
    piece.found(right, what="four drafted tokens", streams=number, ms=middle_s * 1e3, gb_per_s=rate)


def _decode(
    piece: Piece, model: Any, quantization: str | None, run: tuple[int, int, int], in_graphs: str
) -> None:
    program, _, nbytes = model
    number, length, tokens = run
    streams = Streams(piece, model, number, length + tokens + 1)
    asked = prompts(number, program.output.width, (length,), tokens)
    streams.run(asked, chunk=8192)
    steps = [took_s for rows, took_s in streams.step_s if rows == number][2:] or [1.0]
    middle_s = float(np.median(steps))
    cache = sum(token_bytes(spec, "bfloat16") for spec in program.caches) * number * (length + tokens // 2)
    facts = {"streams": number, "context": length, "graphs": in_graphs, "ms_per_step": middle_s * 1e3}
    facts |= {"tokens_per_s": number / middle_s, "gb_per_s": (nbytes + cache) / middle_s / 1e9}
    piece.found(what="decode", weights=quantization or "bf16", **facts)


def check_start(piece: Piece) -> None:
    """Uploads through the ring, and what graphs take: seconds to capture, bytes of a launch."""
    size = 1 << 16 if piece.toy else 4 << 30
    there = piece.accelerator.allocate(size)
    values = np.resize(np.arange(251, dtype=np.uint8), size)
    for _ in range(2):
        began_s = time.perf_counter()
        with UploadRing(piece.accelerator.ranks[0]) as ring:
            ring.put(there, values)
        took_s = time.perf_counter() - began_s
        piece.found(what="upload", gb_per_s=size / took_s / 1e9)
    last = piece.accelerator.fetch(there.part(size - 1024, (1024,))).result()
    piece.found(bool((last == values[-1024:]).all()), what="uploaded bytes")
    x = piece.empty(64, 1024)
    launches = [Launch("scale", (64, 1, 1), (x, x, 1024, 1.0), {"BLOCK": 1024})] * (4 if piece.toy else 300)
    piece.accelerator.launch(launches[0])
    piece.sync()
    free, began_s, kept = piece.accelerator.free_bytes(), time.perf_counter(), []
    for _ in range(2 if piece.toy else 16):
        kept.append(piece.accelerator.capture(launches))
        kept[-1].replay()
    piece.sync()
    took_s, taken = (time.perf_counter() - began_s) / len(kept), free - piece.accelerator.free_bytes()
    each = taken / len(kept) / len(launches)
    piece.found(what="graphs", launches=len(launches), capture_s=took_s, bytes_per_launch=each)


PIECES: dict[str, Callable[[Piece], None]] = {
    "launch": check_launch,
    "ops": check_ops,
    "bits": check_bits,
    "exact": check_exact,
    "speed": check_speed,
    "model": check_model,
    "start": check_start,
}
QUICK = {
    "launch": 40,
    "ops": 60,
    "bits": 50,
    "exact": 80,
    "speed": 50,
    "model": 80,
}  # seconds of each at most


def open_accelerator(interpreted: bool, index: int) -> Accelerator:
    """Return what is checked, without the check that Quire makes itself."""
    if interpreted:
        from quire.backends.cuda.interpreted import InterpretedAccelerator

        return InterpretedAccelerator()
    from quire.backends.cuda.driver import open_gpu

    return open_gpu(index)


@dataclass
class Part:
    """The file of a piece: written after each row, so that what a piece found stays if it is ended."""

    file: Path
    facts: dict[str, Any]

    def write(self, piece: Piece | None, finished: bool = False, error: str = "") -> None:
        """Write what was found so far."""
        rows, passed = ([], False) if piece is None else (piece.rows, piece.passed)
        seconds = time.time() - self.facts["began_at"]
        now = {"seconds": seconds, "finished": finished, "passed": passed and finished and not error}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")  # the process may be ended meanwhile
        partial.write_text(
            json.dumps(self.facts | now | {"error": error, "rows": rows}, indent=1) + "\n", "utf-8"
        )
        partial.replace(self.file)


def run_piece(name: str, folder: Path, quick: bool, interpreted: bool, index: int = 0) -> bool:
    """Run a piece and write its part; return whether it passed."""
    facts = {"piece": name, "device": "", "quick": quick, "interpreted": interpreted, "began_at": time.time()}
    part, piece, error = Part(folder / f"{name}.json", facts), None, ""
    try:
        accelerator = open_accelerator(interpreted, index)
        facts["device"] = accelerator.in_words()
        piece = Piece(accelerator, quick, interpreted, part.write)
        facts["state_before"] = accelerator.state()
        PIECES[name](piece)
        facts["state_after"] = accelerator.state()
    except Exception:
        error = traceback.format_exc()
        print(error, file=sys.stderr, flush=True)
    part.write(piece, True, error)
    return piece is not None and piece.passed and not error


def is_finished(file: Path, quick: bool, interpreted: bool) -> bool:
    """Return whether a piece was run to its end, on the same kind of device; all of it unless `quick`."""
    if not file.exists():
        return False
    part = json.loads(file.read_text("utf-8"))
    return part["finished"] and part["interpreted"] == interpreted and (quick or not part["quick"])


BEGIN, END = "<!-- measured: written by scripts/gpu_check.py -->", "<!-- end of what was measured -->"


def report(folder: Path) -> str:
    """Return what the parts say, as Markdown."""
    parts = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
    parts.sort(key=lambda part: list(PIECES).index(part["piece"]))
    if not parts:
        raise SystemExit(f"there are no parts in {folder}")
    lines = []
    for part in parts:
        checks = [row for row in part["rows"] if "passed" in row]
        good, when = (
            sum(row["passed"] for row in checks),
            time.strftime("%Y-%m-%d", time.gmtime(part["began_at"])),
        )
        quick = ", a selection" if part["quick"] else ""
        lines += ["", f"### {(PIECES[part['piece']].__doc__ or '').strip()}", ""]
        took = f"{part['seconds']:.0f} s{quick}"
        if part.get("state_after"):
            took += f", from {part['state_before']} to {part['state_after']}"
        lines.append(f"{part['device']}, {when}, {took}: {good} of {len(checks)} checks passed.")
        if not part["finished"]:
            lines.append("It was ended before its end.")
        if part["error"]:
            lines.append(f"It ended with `{part['error'].strip().splitlines()[-1]}`.")
        wrong = [row for row in checks if not row["passed"]]
        lines += [f"- not passed: {_facts(row)}" for row in wrong[:20]]
        lines += _tables([row for row in part["rows"] if "passed" not in row])
    return "\n".join(lines).strip() + "\n"


def _facts(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in row.items() if name != "passed")


def _tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return figures as tables: one for each kind of row, in order."""
    lines: list[str] = []
    starts = [
        0,
        *(i + 1 for i, (one, other) in enumerate(pairwise(rows)) if one.keys() != other.keys()),
        len(rows),
    ]
    for first, end in pairwise(starts):
        if not (own := rows[first:end]):
            continue
        names = list(own[0])
        lines += ["", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
        lines += [f"| {' | '.join(str(_short(row[name])) for name in names)} |" for row in own]
    return lines


def write_report(folder: Path, page: Path) -> None:
    """Replace what a page says was measured, or add it at the end."""
    text = page.read_text("utf-8")
    written = f"{BEGIN}\n\n## Measured\n\n{report(folder)}\n{END}"
    before, found, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if found else "\n"
    page.write_text(f"{before.rstrip()}\n\n{written}{after}", "utf-8")


def main() -> int:
    """Run pieces, each in a process of its own, or write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pieces", nargs="*", choices=PIECES, help="these instead of all")
    parser.add_argument(
        "--quick", action="store_true", help="six minutes: fewer sizes, without the last piece"
    )
    parser.add_argument("--interpreted", action="store_true", help="toy sizes in Triton's interpreter")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu_check", help="of the parts")
    parser.add_argument("--again", action="store_true", help="run pieces whose parts are there")
    parser.add_argument(
        "--limit", type=float, help="seconds of a piece; by default 590, and less with --quick"
    )
    parser.add_argument("--report", action="store_true", help="write docs/gpu.md from the parts")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the process of one piece
    given = parser.parse_args()
    if given.report:
        write_report(given.folder, ROOT / "docs" / "gpu.md")
        return 0
    chosen = given.pieces or (QUICK if given.quick else tuple(PIECES))
    if given.here:
        return 0 if run_piece(chosen[0], given.folder, given.quick, given.interpreted, given.device) else 1
    status = 0
    for name in chosen:
        done = is_finished(given.folder / f"{name}.json", given.quick, given.interpreted)
        if done and not given.again:
            print(f"{name}: done before", flush=True)
            continue
        print(f"{name}:", flush=True)
        own = ["--pieces", name, "--here", "--folder", str(given.folder), "--device", str(given.device)]
        own += ["--quick"] * given.quick + ["--interpreted"] * given.interpreted
        limit_s = given.limit or (QUICK[name] if given.quick and name in QUICK else 590)
        try:
            status |= subprocess.run([sys.executable, __file__, *own], timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            print(f"{name}: ended after {limit_s:.0f} s", flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
