"""Graphs of decode steps: the bits of launches one by one, for any number of rows, wherever arrays move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from on_accelerator import CHECKPOINT, interpreted, wide, write_checkpoint
from test_cuda_device import FAMILIES, MIXTURES
from test_exactness import fingerprint
from test_whole_models import stored
from tiny import VOCAB

from quire import LLM, SamplingParams
from quire.backends.cuda import graphs
from quire.backends.cuda.accelerator import DeviceArray, Launch
from quire.backends.cuda.graphs import DecodeGraphs, graph_rows, padded_rows
from quire.backends.cuda.interpreted import InterpretedAccelerator
from quire.backends.cuda.step_arrays import StepArrays
from quire.models import read_model
from quire.program.passes import fuse
from quire.types import Admission, Grant, Row, Step

_RANDOM = np.random.default_rng(8)
PROMPTS = [_RANDOM.integers(3, VOCAB, 2 + 7 * i % 11).tolist() for i in range(10)]
ANY = SamplingParams(temperature=0.8, logprobs=1, detokenize=False, ignore_eos=True, seed=3)
NUMBERS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 14)  # of tokens: so steps have 10, 9, ..., 1 rows


class Counted:
    """What was captured and replayed, by number of launches of a kernel that has a program for each row."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replayed: Counter[int] = Counter()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found, capture = Counted(), InterpretedAccelerator.capture

    class Graph:
        def __init__(self, graph: Any, rows: int) -> None:
            self.graph, self.rows = graph, rows

        def replay(self) -> None:
            found.replayed[self.rows] += 1
            self.graph.replay()

    def counting(self: InterpretedAccelerator, launches: Sequence[Launch], dependent: bool) -> Any:
        rows = next(launch.grid[0] for launch in launches if launch.kernel == "rope_and_kv")
        found.captured.append(rows)
        return Graph(capture(self, launches, dependent), rows)

    monkeypatch.setattr(InterpretedAccelerator, "capture", counting)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What the same requests give with no graphs."""

    def ask_without(*args: Any, **options: Any) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "MOST_ROWS", 0)
            return ask(*args, **options)

    return ask_without


def ask(model: str, numbers: Sequence[int], prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> Any:
    how: dict[str, Any] = {"device": "cuda-interpreted", "block_size": 8, "speculative": "off"}
    llm = LLM(model, **{"max_model_len": 64, **how, **options})
    params = [replace(ANY, max_tokens=number) for number in numbers]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts[: len(numbers)]]
    outputs = llm.generate(asked, params, use_tqdm=False)
    preempted = llm.engine.scheduler.num_preemptions
    llm.close()
    return [fingerprint(output) for output in outputs] + [f"preempted: {preempted > 0}"]


def test_numbers_of_rows() -> None:
    wanted = [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert [padded_rows(rows) for rows in range(1, 10)] == wanted
    assert graph_rows(17) == [1, 2, 4, 8, 16, 24]
    assert graph_rows(1000)[-2:] == [248, 256]
    assert len(graph_rows(1000)) == 35


def test_any_number_of_rows(model: str, counted: Counted, one_by_one: Callable[..., list[str]]) -> None:
    found = ask(model, NUMBERS)
    assert found == one_by_one(model, NUMBERS)
    assert counted.captured == [16, 8, 4, 2, 1]
    assert set(counted.replayed) == set(counted.captured)


def test_arrays_that_move(
    model: str, counted: Counted, one_by_one: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables get longer and steps larger while others decode: graphs are captured anew."""
    monkeypatch.setattr("quire.backends.cuda.slot_tables._LEAST_BLOCKS", 1)
    prompts, numbers = [[5, 6, 7], [8, 9], [*range(3, 23)]], [16, 4, 6]
    found = ask(model, numbers, prompts, max_num_seqs=2)
    assert found == one_by_one(model, numbers, prompts, max_num_seqs=2)
    assert len(counted.captured) > len(set(counted.captured)) == 2


def test_after_preemption(model: str, counted: Counted, one_by_one: Callable[..., list[str]]) -> None:
    token_bytes = read_model(CHECKPOINT).program.kv_token_bytes(4)
    few = {"kv_cache_memory_bytes": token_bytes * 32, "max_model_len": 24, "enable_prefix_caching": False}
    numbers, prompts = [10, 9, 8], [prompt[:6] + [4] * 6 for prompt in PROMPTS]
    found = ask(model, numbers, prompts, max_steps_in_flight=2, **few)
    assert found[-1] == "preempted: True"
    assert found == one_by_one(model, numbers, prompts, max_steps_in_flight=2, **few)
    assert counted.replayed


def test_segments_that_appear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of over 2,048 positions bring kernels that no step had before: launched first, then captured."""
    program = fuse(wide("qwen3").program)
    admitted = tuple(Admission(slot, str(slot), 0, ANY, (), 3 + slot) for slot in range(2))
    prompts = tuple(Row(slot, 0, 3 + slot, token_ids=(5, 6, 7, 8)[: 3 + slot]) for slot in range(2))
    granted, longer = (Grant(0, 0, 0, (0,)), Grant(1, 0, 0, (1,))), (Grant(0, 0, 1, tuple(range(2, 40))),)
    steps = [Step(0, prompts, admitted=admitted, granted=granted)]
    for i in range(1, 8):
        rows = tuple(Row(slot, 2 + slot + i, 1) for slot in range(2))
        steps.append(Step(i, rows, granted=longer if i == 4 else ()))
    captured: list[set[str]] = []
    capture = InterpretedAccelerator.capture

    def capturing(self: InterpretedAccelerator, launches: Sequence[Launch], dependent: bool) -> Any:
        captured.append({launch.kernel for launch in launches if launch.grid[0]})
        return capture(self, launches, dependent)

    monkeypatch.setattr(InterpretedAccelerator, "capture", capturing)

    def results() -> list[Any]:
        sizes: dict[str, Any] = {"num_blocks": [40], "block_size": 64, "kv_cache_dtype": "bfloat16"}
        backend = interpreted(program, stored(program, "bf16"), **sizes)
        return [backend.launch(step).result().rows for step in steps]

    found = results()
    assert ["attend_segments" in kernels for kernels in captured] == [False, True]
    monkeypatch.setattr(graphs, "MOST_ROWS", 0)
    assert found == results()


@pytest.mark.parametrize(
    ("family", "format"),
    [*((family, "bf16") for family in (*FAMILIES, *MIXTURES)), ("qwen2", "int8"), ("mixtral", "int4")],
)
def test_launches_of_decode_steps_depend_on_their_rows_alone(
    monkeypatch: pytest.MonkeyPatch, family: str, format: str
) -> None:
    """Equal grids and arguments for three and for four rows, whatever contexts they have."""
    seen: list[list[Launch]] = []

    def launch(_: DecodeGraphs, launches: Sequence[Any], step: StepArrays, moves: int) -> None:
        seen.append([launch(step) for launch in launches])

    monkeypatch.setattr(InterpretedAccelerator, "launch", lambda *_: None)
    monkeypatch.setattr(DecodeGraphs, "launch", launch)
    program = fuse(wide(family).program)
    groups = len(program.cache_groups)
    backend = interpreted(program, stored(program, format), num_blocks=[64] * groups, block_size=8)
    slots, lengths = range(4), (3, 30, 1, 90)
    params = SamplingParams(seed=1)
    admitted = tuple(Admission(slot, str(slot), 0, params, (), lengths[slot]) for slot in slots)
    granted = tuple(Grant(slot, g, 0, tuple(range(16))) for slot in slots for g in range(groups))
    prompts = tuple(
        Row(slot, 0, length, token_ids=(3,) * length) for slot, length in zip(slots, lengths, strict=True)
    )
    decoded = [tuple(Row(slot, lengths[slot] + i, 1) for slot in slots[i:]) for i in range(2)]
    first = Step(0, prompts, admitted=admitted, granted=granted)
    for step in (first, Step(1, decoded[0]), Step(2, decoded[1])):
        backend._slots.apply(step)
        backend._forward(backend._slots.batch(step), backend._slots.tables)
    assert len(seen) == 2
    assert [told(launch) for launch in seen[0]] == [told(launch) for launch in seen[1]]


def told(launch: Launch) -> Any:
    args = [
        (id(arg.buffer), arg.first_byte, arg.shape, arg.dtype.name) if isinstance(arg, DeviceArray) else arg
        for arg in launch.args
    ]
    return launch.kernel, launch.grid, args, dict(launch.constants)
