"""Prediction layers on the native backend: they propose what their formula gives."""

from __future__ import annotations

from dataclasses import replace

import predicted
import pytest
from drafted import BLOCKS, SIZE, SLOTS
from lowered import ISAS, plain, planned, tensors
from tiny import Dense

from quire.backends.draft_model import DraftModel
from quire.backends.native import _core
from quire.backends.native.backend import NativeBackend
from quire.backends.native.weights import load_packed
from quire.program import Program


def on_native(
    program: Program,
    layer: Program | None,
    weights: dict[str, Dense],
    *,
    max_tokens: int = 512,
    num_blocks: int = BLOCKS,
) -> NativeBackend:
    program, model = plain(program), None
    joined = program
    if layer is not None:
        model = DraftModel(plain(layer), None, max_tokens, 256)
        joined = replace(program, ops=(*program.ops, *model.program.ops))
    names = joined.weights()
    checkpoint = tensors({name: weights[name] for name in names}, "f32")
    packed = load_packed(planned(joined, checkpoint), isa=ISAS[0], nodes=_core.Nodes(1))
    return NativeBackend(
        program,
        packed.matrices,
        packed.vectors,
        num_blocks=[num_blocks] * len(program.cache_groups),
        block_size=SIZE,
        kv_cache_dtype="float32",
        isa=ISAS[0],
        nodes=_core.Nodes(2),
        max_num_seqs=SLOTS,
        ahead=True,
        draft=model,
    )


@pytest.mark.parametrize("name", ["qwen3_next", "glm4_moe", "deepseek_v32"])
def test_what_it_proposes_is_what_the_formula_gives(name: str) -> None:
    predicted.check_formula(on_native, name, 13)


def test_it_catches_up() -> None:
    predicted.check_formula(on_native, "deepseek_v3", 999, max_tokens=9)


def test_drawn_tokens_are_those_without_it() -> None:
    predicted.check_drawn(on_native, "qwen3_next", "penalized")


@pytest.mark.parametrize("known", [True, False])
def test_cached_blocks(known: bool) -> None:
    predicted.check_prefix(on_native, known)


def test_replaced_blocks() -> None:
    predicted.check_replaced(on_native)


def test_a_layer_that_is_right_is_accepted() -> None:
    predicted.check_accepted(on_native, "qwen3_5")
