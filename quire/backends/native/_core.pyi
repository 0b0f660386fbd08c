"""Types of the native core; csrc/bindings.cpp and csrc/bind_*.cpp describe each."""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
NodeBytes = tuple[int, int, int]  # addresses of the first byte and after the last, node
Snapshots = Sequence[tuple[int, int, int, int]]  # slot, group, position, snapshot

PACKING_VERSION: int
PANEL: int  # outputs in a panel of a packed matrix
GROUP: int  # inputs that share a block scale
SPAN: int  # inputs of a quantized activation that share a float32 scale
ALIGNMENT: int  # bytes: alignment of packed weights
HUGE_PAGE: int  # bytes

def isas() -> list[str]: ...
def num_cores() -> int: ...
def divide_pages(first: int, last: int, read: Sequence[NodeBytes], nodes: int) -> list[NodeBytes]: ...
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
def pack_codes(
    matrix: Matrix,
    index: int,
    packed: NDArray[Any],
    group: int,
    is_signed: bool,
    scales: NDArray[Any] | None,
    scale_codes: NDArray[Any] | None,
    minimums: NDArray[Any] | None,
    minimum_codes: NDArray[Any] | None,
    zeros: NDArray[Any] | None,
    order: NDArray[np.int32] | None,
    table: NDArray[np.float32] | None,
    first: int,
    last: int,
) -> None: ...
def activations(format: str) -> str: ...

class Nodes:
    def __init__(self, threads: int, processors: Sequence[int] | None = None, system: str = ...) -> None: ...
    @staticmethod
    def of(threads: Sequence[int]) -> Nodes: ...
    @property
    def count(self) -> int: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def ids(self) -> list[int]: ...
    def of_thread(self, thread: int) -> int: ...
    def processors(self, thread: int) -> list[int]: ...
    def first(self, total: int, node: int) -> int: ...
    def section(self, matrix: Matrix, node: int) -> tuple[int, int, int, int]: ...
    def bytes(self, matrix: Matrix) -> list[NodeBytes]: ...
    def record(self, tasks: int, shares: Sequence[float]) -> list[list[int]]: ...
    def place(self, memory: Bytes, weights: Sequence[Matrix]) -> None: ...

class Matrix:
    def __init__(self, format: str, count: int, outputs: int, inputs: int) -> None: ...
    @staticmethod
    def mapped(format: str, count: int, outputs: int, inputs: int, buffer: Bytes) -> Matrix: ...
    @staticmethod
    def joined(parts: Sequence[Matrix]) -> Matrix: ...
    @property
    def format(self) -> str: ...
    @property
    def order(self) -> NDArray[np.int32] | None: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def data(self) -> Bytes: ...

class KVCache:
    def __init__(
        self,
        group: int,
        format: str,
        layers: int,
        num_blocks: int,
        block_size: int,
        heads: int,
        dim: int,
        value_dim: int,
        every: int = 1,
        apart: int = 1,
    ) -> None: ...
    def blocks(self, num_blocks: int) -> list[Bytes]: ...
    def spread(self, nodes: Nodes) -> None: ...

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
    def snapshots(self, num_snapshots: int) -> Bytes: ...
    def spread(self, nodes: Nodes) -> None: ...

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

class Adapter:
    def __init__(self, sites: int, shapes: Sequence[tuple[int, str, int, int, int, float]]) -> None: ...
    def down(self, site: int) -> Matrix: ...
    def up(self, site: int) -> Matrix: ...
    @property
    def nbytes(self) -> int: ...

class Routing:
    def __init__(
        self,
        chosen: int,
        affinity: str,
        normalized: bool,
        bias: Floats | None,
        groups: int,
        kept_groups: int,
        by_two: bool,
        scaling: float,
        floor: float,
        factors: Floats | None,
        on_inputs: bool,
        margin: float,
        listed: Floats | None,
    ) -> None: ...

class Native:
    @overload
    def __init__(self, isa: str, threads: int) -> None: ...
    @overload
    def __init__(self, isa: str, nodes: Nodes) -> None: ...
    @overload
    def __init__(self, isa: str, beside: Native) -> None: ...
    def buffer(self, rows: str, width: int) -> int: ...
    def embed(self, out: int, table: Matrix, by_position: bool, replaced: int, same: int) -> None: ...
    def embed_stored(
        self, out: int, table: NDArray[Any], format: str, by_position: bool, replaced: int, same: int
    ) -> None: ...
    def embed_segments(self, out: int, table: Matrix, separator: int) -> None: ...
    def pool_rows(self, out: int, x: int, width: int, mean: bool) -> None: ...
    def sampled_rows(self, out: int, x: int, width: int) -> None: ...
    def previous_hidden(self, out: int, width: int) -> None: ...
    def join(self, rows: str, out: int, x: int, x_width: int, y: int, y_width: int) -> None: ...
    def add(self, rows: str, out: int, x: int, y: int, width: int) -> None: ...
    def scale(self, rows: str, out: int, x: int, width: int, factor: float) -> None: ...
    def scale_by_position(
        self, out: int, x: int, width: int, beta: float, period: int, first: int
    ) -> None: ...
    def scale_by_weight(self, rows: str, out: int, x: int, width: int, weight: Floats) -> None: ...
    def soft_cap(self, rows: str, out: int, x: int, width: int, cap: float) -> None: ...
    def clip(self, rows: str, out: int, x: int, width: int, low: float, high: float) -> None: ...
    def standardize(self, rows: str, out: int, x: int, bias: Floats, factors: Floats) -> None: ...
    def xielu(
        self, rows: str, out: int, x: int, width: int, positive: float, negative: float, beta: float
    ) -> None: ...
    def unary(self, rows: str, out: int, x: int, width: int, activation: str) -> None: ...
    def gate(
        self, rows: str, out: int, gate: int, up: int, width: int, activation: str, limit: float = 0.0
    ) -> None: ...
    def gate_rows(self, rows: str, out: int, gate: int, up: int, width: int, activation: str) -> None: ...
    def match_magnitude(self, rows: str, out: int, x: int, like: int, width: int, floor: float) -> None: ...
    def above_cutoff(self, rows: str, out: int, x: int, width: int, deviations: float) -> None: ...
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
    def gated_norm(
        self,
        rows: str,
        out: int,
        x: int,
        gate: int,
        width: int,
        weight: Floats,
        eps: float,
        activation: str,
        gate_first: bool,
        groups: int,
    ) -> None: ...
    def rope_table(self, pairs: int, scale: float, axes: Sequence[int], behind: int = 0) -> int: ...
    def place_table(self, places: int, axes: int, pairs: int, frequencies: Floats) -> int: ...
    def mixed_rows(self, out: int, places: int, table: Matrix, number: int) -> None: ...
    def join_rows(self, out: int, x: int, width: int) -> None: ...
    def mean_of_rows(self, out: int, x: int, number: int, width: int) -> None: ...
    def place_images(self, out: int, x: int, width: int, column: int, added: bool) -> None: ...
    def frequencies(self, table: int, variant: int, values: Floats) -> None: ...
    def rotary(
        self,
        rows: str,
        out: int,
        x: int,
        heads: int,
        dim: int,
        table: int,
        interleaved: bool,
        first: int = 0,
        inverse: bool = False,
    ) -> None: ...
    def pack(self, rows: str, x: int, width: int, like: Matrix) -> None: ...
    def products(self, rows: str) -> None: ...
    def linear(self, out: int, weight: Matrix, bias: Floats | None) -> None: ...
    def gated_linear(self, out: int, gate: Matrix, up: Matrix, activation: str) -> None: ...
    def add_adapters(self, rows: str, x: int, width: int, targets: Sequence[tuple[int, int]]) -> None: ...
    def experts(
        self,
        out: int,
        x: int,
        scores: int,
        matrices: Sequence[Matrix | None],
        biases: Sequence[Floats | None],
        routing: Routing,
        activation: str,
        limit: float,
        shifted: bool,
    ) -> None: ...
    def repeat_streams(self, rows: str, out: int, x: int, streams: int, hidden: int) -> None: ...
    def stream_weights(
        self,
        rows: str,
        out: int,
        x: int,
        mixed: int,
        streams: int,
        hidden: int,
        base: Floats,
        scale: Floats,
        eps: float,
        floor: float,
        rounds: int,
    ) -> None: ...
    def collapse_streams(
        self, rows: str, out: int, x: int, w: int, w_width: int, streams: int, hidden: int
    ) -> None: ...
    def mix_streams(self, out: int, x: int, y: int, w: int, streams: int, hidden: int) -> None: ...
    def write_kv(self, k: int, v: int, cache: KVCache, layer: int) -> None: ...
    def attend(
        self,
        rows: str,
        out: int,
        q: int,
        cache: KVCache,
        layer: int,
        heads: int,
        scale: float,
        window: int,
        chunked: bool,
        softcap: float,
        sinks: Floats | None,
        causal: bool,
    ) -> None: ...
    def attend_latents(
        self,
        out: int,
        q: int,
        q_rest: int,
        cache: KVCache,
        layer: int,
        heads: int,
        scale: float,
        chosen: int = -1,
        number: int = 0,
    ) -> None: ...
    def attend_vectors(
        self,
        out: int,
        q: int,
        cache: KVCache,
        layer: int,
        heads: int,
        scale: float,
        window: int,
        sinks: Floats | None,
        entries: KVCache | None,
        entry_layer: int,
        chosen: int = -1,
        number: int = 0,
    ) -> None: ...
    def compress(
        self,
        out: int,
        values: int,
        gates: int,
        cache: KVCache,
        layer: int,
        bias: Floats,
        every: int,
        dim: int,
    ) -> None: ...
    def choose_positions(
        self, out: int, q: int, factors: int, cache: KVCache, layer: int, heads: int, number: int
    ) -> None: ...
    def attend_rows(
        self,
        out: int,
        q: int,
        k: int,
        v: int,
        heads: int,
        groups: int,
        dim: int,
        value_dim: int,
        scale: float,
        reach: int,
        biases: Floats | None,
        first_after: int,
        halves: bool,
        windowed: bool,
    ) -> None: ...
    def linear_by_head(self, rows: str, out: int, x: int, weight: Matrix) -> None: ...
    def restore_states(self, cache: StateCache) -> None: ...
    def convolve(
        self,
        out: int,
        x: int,
        cache: StateCache,
        layer: int,
        weight: Floats,
        bias: Floats | None,
        activation: str,
    ) -> None: ...
    def recur(self, out: int, x: int, decay: int, cache: StateCache, layer: int) -> None: ...
    def delta_rule(
        self,
        out: int,
        q: int,
        k: int,
        v: int,
        decay: int,
        beta: int,
        cache: StateCache,
        layer: int,
        log_rate: Floats,
        bias: Floats,
        key_heads: int,
        key_dim: int,
        beta_factor: float,
    ) -> None: ...
    def state_space(
        self,
        out: int,
        x: int,
        step: int,
        cache: StateCache,
        layer: int,
        log_rate: Floats,
        bias: Floats,
        skip: Floats,
        groups: int,
        state_dim: int,
        low: float,
        high: float,
    ) -> None: ...
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
        adapters: Sequence[Adapter | None],
        visible_ends: Ints | None,
    ) -> Floats: ...

BOUNDARY: int  # stands between texts
LONGEST_MATCH: int

class TextIndex:
    def __init__(self, before: TextIndex | None = None, capacity: int = 0) -> None: ...
    def append(self, token_ids: Sequence[int]) -> None: ...
    def append_text(self, other: TextIndex) -> None: ...
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def continuations(
    rows: list[tuple[TextIndex, TextIndex | None]], most_tokens: int, most_places: int
) -> list[
    tuple[int, tuple[int, ...], int, tuple[int, ...]]
]: ...  # for each text: length of the match, token ids

class Step:
    def __init__(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        logits: Sequence[int],
        samples: Sequence[bool],
    ) -> None: ...
    num_proposed: int
    results: SampledResults
    proposed: list[list[int]]
    began_s: float
    ended_s: float
    mask_s: float
    sampling_s: float
    core_wait_s: float
    draft_s: float
    image_s: float
    def draft(self, row: int, token_ids: Sequence[int]) -> None: ...
    def release(self, slots: Sequence[int]) -> None: ...
    def admit(
        self,
        slot: int,
        variant: int,
        token_ids: Sequence[int],
        params: SlotParams,
        adapter: Adapter | None,
    ) -> None: ...
    def rotate(self, slot: int, known: Ints, shift: int) -> None: ...
    def show(
        self,
        slot: int,
        first: int,
        rows: int,
        line: int,
        gap: int,
        whole: bool,
        share: float,
        patches: Floats | None,
        windows: Sequence[int],
        places: Sequence[int],
    ) -> None: ...
    def grant(self, slot: int, group: int, first: int, block_ids: Sequence[int]) -> None: ...
    def restore(self, snapshots: Snapshots) -> None: ...
    def save(self, snapshots: Snapshots) -> None: ...
    def frequencies(self, native: Native, table: int, variant: int, values: Floats) -> None: ...

class Steps:
    def __init__(self, native: Native, output: int, slots: int, groups: int, vocab_size: int) -> None: ...
    def see_with(self, native: Native, output: int, width: int) -> None: ...
    def draft_with(
        self,
        native: Native,
        *,
        output: int,
        width: int,
        groups: int,
        group: int,
        window: int,
        reach: int,
        blocks: int,
        block_size: int,
        spare: int,
        max_tokens: int,
        max_len: int,
        hidden: int,
        given: int,
        own: int,
    ) -> None: ...
    def forget_drafted(self, blocks: Sequence[int]) -> None: ...
    def forward(self, step: Step) -> None: ...
    def sample(self, step: Step, masks: Sequence[tuple[int, Sequence[NDArray[np.uint32]]]]) -> None: ...
    def launch(self, step: Step) -> None: ...
    def wait(self, step: Step) -> None: ...
