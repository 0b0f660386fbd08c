"""Types of the native core; csrc/bindings.cpp and csrc/bind_*.cpp describe each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Snapshots = Sequence[tuple[int, int, int, int]]  # slot, group, position, snapshot

PACKING_VERSION: int
PANEL: int  # outputs in a panel of a packed matrix
GROUP: int  # inputs that share a block scale
SPAN: int  # inputs of a quantized activation that share a float32 scale
ALIGNMENT: int  # bytes: alignment of packed weights

def isas() -> list[str]: ...
def usable_cores() -> int: ...
def peak_operations(threads: int, isa: str, kind: str, seconds: float) -> float: ...
def read_bandwidth(threads: int, isa: str, bytes: int, seconds: float) -> float: ...
def checksum(data: Bytes) -> int: ...
def packed_bytes(format: str, count: int, outputs: int, inputs: int) -> int: ...
def row_bytes(inputs: int) -> int: ...
def pack(
    matrix: Matrix,
    index: int,
    source: NDArray[Any],
    dtype: str,
    tries: Sequence[float],
    isa: str,
    first: int,
    last: int,
) -> bool: ...

class Matrix:
    def __init__(self, format: str, count: int, outputs: int, inputs: int) -> None: ...
    @staticmethod
    def mapped(format: str, count: int, outputs: int, inputs: int, buffer: Bytes) -> Matrix: ...
    @property
    def format(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def data(self) -> Bytes: ...

class KVCache:
    def __init__(
        self, group: int, format: str, layers: int, num_blocks: int, block_size: int, heads: int, dim: int
    ) -> None: ...

class StateCache:
    def __init__(
        self,
        group: int,
        format: str,
        layers: int,
        slots: int,
        snapshots: int,
        width: int,
        inputs: int,
        reach: int,
        history: int,
        chunk: int,
    ) -> None: ...

class SlotParams:
    def __init__(
        self,
        temperature: float,
        top_p: float,
        min_p: float,
        top_k: int,
        seed: int,
        sequence: int,
        repetition_penalty: float,
        frequency_penalty: float,
        presence_penalty: float,
        bias_ids: Sequence[int],
        biases: Sequence[float],
        allowed_ids: Sequence[int] | None,
        bad_words: Sequence[Sequence[int]],
        stop_ids: Sequence[int],
        min_tokens: int,
        num_prompt_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> None: ...

class SampledResults:
    token_ids: list[int]
    counts: list[int]
    faults: list[int]
    scored: list[int]
    listed: list[int]
    entries: list[int]
    ranks: list[int]
    listed_ids: list[int]
    logprobs: list[float]
    plain: bool

SampledRow = tuple[
    int, int, Sequence[int], int, Sequence[int], Sequence[NDArray[np.uint32] | None] | None
]  # slot, first scored, following, first sampled or -1, drafted, masks

class Sampler:
    def __init__(self, isa: str, vocab_size: int, max_slots: int, threads: int) -> None: ...
    @property
    def vocab_size(self) -> int: ...
    def admit(self, slot: int, params: SlotParams, token_ids: Sequence[int]) -> None: ...
    def release(self, slot: int) -> None: ...
    def sample(self, logits: Floats, rows: list[SampledRow]) -> SampledResults: ...

class Native:
    def __init__(self, isa: str, threads: int) -> None: ...
    def buffer(self, rows: str, width: int) -> int: ...
    def embed(self, out: int, table: Matrix, by_position: bool) -> None: ...
    def sampled_rows(self, out: int, x: int, width: int) -> None: ...
    def add(self, rows: str, out: int, x: int, y: int, width: int) -> None: ...
    def scale(self, rows: str, out: int, x: int, width: int, factor: float) -> None: ...
    def soft_cap(self, rows: str, out: int, x: int, width: int, cap: float) -> None: ...
    def unary(self, rows: str, out: int, x: int, width: int, activation: str) -> None: ...
    def gate(self, rows: str, out: int, gate: int, up: int, width: int, activation: str) -> None: ...
    def slice(self, rows: str, out: int, width: int, x: int, x_width: int, first: int) -> None: ...
    def norm(
        self,
        rows: str,
        out: int,
        x: int,
        width: int,
        weight: Floats,
        bias: Floats | None,
        eps: float,
        offset: float,
        centered: bool,
    ) -> None: ...
    def rope_table(self, pairs: int, scale: float) -> int: ...
    def frequencies(self, table: int, variant: int, values: Floats) -> None: ...
    def rotary(self, out: int, x: int, heads: int, dim: int, table: int, interleaved: bool) -> None: ...
    def pack(self, rows: str, x: int, width: int, like: Matrix) -> None: ...
    def products(self, rows: str) -> None: ...
    def linear(self, out: int, weight: Matrix, bias: Floats | None) -> None: ...
    def gated_linear(self, out: int, gate: Matrix, up: Matrix, activation: str) -> None: ...
    def experts(
        self,
        out: int,
        x: int,
        scores: int,
        matrices: Sequence[Matrix],
        biases: Sequence[Floats | None],
        chosen: int,
        over_chosen: bool,
        activation: str,
        limit: float,
    ) -> None: ...
    def write_kv(self, k: int, v: int, cache: KVCache, layer: int) -> None: ...
    def attend(
        self,
        out: int,
        q: int,
        cache: KVCache,
        layer: int,
        heads: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: Floats | None,
    ) -> None: ...
    def restore_states(self, cache: StateCache) -> None: ...
    def convolve(self, out: int, x: int, cache: StateCache, layer: int, weight: Floats) -> None: ...
    def recur(self, out: int, x: int, decay: int, cache: StateCache, layer: int) -> None: ...
    def run(
        self,
        token_ids: Ints,
        positions: Ints,
        row_offsets: Ints,
        block_tables: Sequence[Ints],
        slots: Ints,
        variants: Ints,
        logit_rows: Ints,
        restored: Snapshots,
        saved: Snapshots,
        output: int,
        width: int,
    ) -> Floats: ...

class Step:
    def __init__(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        logits: Sequence[int],
        samples: Sequence[bool],
    ) -> None: ...
    results: SampledResults
    began_s: float
    ended_s: float
    mask_s: float
    sampling_s: float
    core_wait_s: float
    def draft(self, row: int, token_ids: Sequence[int]) -> None: ...
    def release(self, slots: Sequence[int]) -> None: ...
    def admit(self, slot: int, variant: int, token_ids: Sequence[int], params: SlotParams) -> None: ...
    def grant(self, slot: int, group: int, first: int, block_ids: Sequence[int]) -> None: ...
    def restore(self, snapshots: Snapshots) -> None: ...
    def save(self, snapshots: Snapshots) -> None: ...
    def frequencies(self, native: Native, table: int, variant: int, values: Floats) -> None: ...

class Steps:
    def __init__(self, native: Native, output: int, slots: int, groups: int, vocab_size: int) -> None: ...
    def forward(self, step: Step) -> None: ...
    def sample(self, step: Step, masks: Sequence[tuple[int, Sequence[NDArray[np.uint32]]]]) -> None: ...
    def launch(self, step: Step) -> None: ...
    def wait(self, step: Step) -> None: ...
