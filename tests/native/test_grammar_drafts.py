"""The rows of tests/model/test_grammar_drafts.py on the native backend."""

from __future__ import annotations

from typing import Any

import pytest
from constrained import PARAMS, rows_by_kind
from lowered import ISAS, plain, planned, tensors
from tiny import random_weights, tiny

from quire.backends.native import _core
from quire.backends.native.backend import NativeBackend
from quire.backends.native.weights import load_packed
from quire.program.passes import fuse

COUNT = 15


@pytest.mark.parametrize("name", PARAMS)
def test_the_same_with_drafts_of_every_kind(name: str) -> None:
    program = plain(fuse(tiny("gemma3").program))
    checkpoint = tensors(random_weights(program), "f32")
    packed = load_packed(planned(program, checkpoint), isa=ISAS[0], nodes=_core.Nodes(2))

    def backend() -> Any:
        return NativeBackend(
            program,
            packed.matrices,
            packed.vectors,
            num_blocks=[8 * COUNT] * len(program.cache_groups),
            block_size=16,
            kv_cache_dtype="float32",
            isa=ISAS[0],
            nodes=_core.Nodes(2),
            max_num_seqs=COUNT,
            ahead=True,
        )

    rows = rows_by_kind(program, backend, PARAMS[name], range(COUNT))
    assert rows["beyond"] < rows["right"] < rows["wrong"] < rows["any"] <= rows["none"]
    assert rows["forced"] < rows["none"]
