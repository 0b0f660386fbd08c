"""Products of one value that few rows launch as one: the bits of those that are launched one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from on_accelerator import interpreted, wide
from test_coded_kernels import INTEGERS, activations, run, weight_of
from test_whole_models import TOKENS, stored
from tiny import Paged, same_bits

from quire.backends.cuda import joined, products
from quire.backends.cuda.accelerator import Launch, RankExchange
from quire.backends.cuda.interpreted import InterpretedAccelerator
from quire.program import Builder, Names
from quire.program.passes import adaptable, fuse
from quire.quantize.kinds import Dense


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every launch that is not empty."""
    found, launch = list[Launch](), InterpretedAccelerator.launch

    def noted(self: InterpretedAccelerator, one: Launch | RankExchange) -> None:
        launch(self, one)
        if isinstance(one, Launch) and not one.is_empty:
            found.append(one)

    monkeypatch.setattr(InterpretedAccelerator, "launch", noted)
    return found


def logits(program: Any, format: str, length: int) -> np.ndarray:
    paged = Paged(program, stored(program, format), make=interpreted)
    found: np.ndarray = paged.prefill(paged.sequence(TOKENS[:length]))
    return found


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(
    ("name", "by_layer", "rows"),
    [("llama", 1, 5), ("llama", 1, 20), ("qwen2", 1, 5), ("qwen2", 1, 20), ("deepseek_v3", 2, 5)],
)
def test_bits_are_those_of_products_one_by_one(
    name: str, by_layer: int, rows: int, format: str, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases in Qwen 2, and twice two products of one value in a layer of DeepSeek-V3."""
    program, found, kernels = fuse(wide(name).program), list[np.ndarray](), list[list[str]]()
    for most in (joined.MOST, 1):
        monkeypatch.setattr(joined, "MOST", most)
        before = len(launched)
        found.append(logits(program, format, rows))
        kernels.append([one.kernel for one in launched[before:]])
    assert same_bits(*found)
    layers = sum(kernel.startswith("attend") for kernel in kernels[1])
    assert sum(kernel.startswith("joined") for kernel in kernels[0]) == by_layer * layers
    assert len(kernels[1]) - len(kernels[0]) == 2 * layers
    assert not any(kernel.startswith("joined") for kernel in kernels[1])


def test_many_rows_launch_products_one_by_one(
    launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "JOINED_ROWS", 19)
    program = fuse(wide("llama").program)
    logits(program, "int8", 20)
    assert not any(one.kernel.startswith("joined") for one in launched)


def test_products_with_others_between_them_are_apart(launched: list[Launch]) -> None:
    """The adapters of queries are added before keys are computed, and no buffer is written early."""
    program = adaptable(fuse(wide("llama").program))
    logits(program, "bf16", 5)
    assert not any(one.kernel.startswith("joined") for one in launched)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["awq", "act-order", "q4_k", "w8a8", "fp8", "nf4"])
def test_codes_of_other_formats(name: str, biased: bool, launched: list[Launch]) -> None:
    """Three weights of one kind: 17 rows are multiplied one product at a time, and 4 of them together."""
    b, w, inputs = Builder(), Names(""), 172 if name in INTEGERS else 176
    x = b.sampled_rows(b.embed(w / "table", 18, inputs))
    q, k, v = (b.linear(x, w / part, 40, bias=biased) for part in "qkv")
    program = fuse(b.program(b.add(b.add(q, k), v)))
    weights: dict[str, Any] = {"table.weight": Dense(activations(18, inputs))}
    for seed, part in enumerate("qkv"):
        weights[f"{part}.weight"] = weight_of(name, 40, inputs, seed=seed)
        weights |= {f"{part}.bias": Dense(activations(1, 40, seed)[0])} if biased else {}
    whole, few = (run(program, rows, weights) for rows in (18, 5))
    assert same_bits(few, whole[:5])
    kernels = [one.kernel for one in launched]
    apart = 0 if name == "act-order" else 3  # inputs in orders of their own are rounded apart
    assert sum(kernel.startswith("joined") for kernel in kernels) == apart
