"""Cache specs of programs, their groups, and the block tables that slots keep for each group."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import tiny

from quire.backends.slots import Slots
from quire.errors import ConfigError
from quire.program import Builder, Names, PagedKV, PagedLatent
from quire.sampling_params import SamplingParams
from quire.types import Admission, Grant, Row, Step


def test_layers_of_equal_spec_form_a_group_in_order_of_first_appearance() -> None:
    program = tiny("gemma3").program
    local, whole = PagedKV(2, 4, 4, 24), PagedKV(2, 4, 4)
    assert program.caches == (local, local, whole)
    assert program.cache_groups == (local, whole)
    assert program.layer_groups == (0, 0, 1)
    cohere = tiny("cohere2").program
    assert (cohere.cache_groups, cohere.layer_groups) == ((local, whole), (0, 1))


def test_bytes_of_a_token() -> None:
    assert PagedKV(2, 8, 4).token_bytes(2) == 2 * (8 + 4) * 2
    assert PagedKV(2, 8, 4).token_bytes(1, 4) == 2 * (8 + 4 + 2 * 4)
    assert PagedLatent(512, 64).token_bytes(2) == 1152
    assert tiny("gemma3").program.kv_token_bytes(1, 4) == 3 * 2 * (4 + 4 + 8)


def test_keys_must_be_as_wide_as_queries() -> None:
    b = Builder()
    q, k = (b.linear(b.embed(Names("e"), 4, 4), Names(n), (2, dim)) for n, dim in (("q", 8), ("k", 6)))
    with pytest.raises(ConfigError, match="shapes differ"):
        b.attention(q, k, k)


def step(*rows: Row, granted: tuple[Grant, ...], admit: tuple[int, ...] = (), **more) -> Step:
    params = SamplingParams(temperature=0, seed=0)
    admitted = tuple(Admission(slot, str(slot), 0, params, (), 1) for slot in admit)
    return Step(0, rows, admitted, granted, **more)


def test_each_group_has_a_table_of_its_own() -> None:
    """Grants go to the group they name, wherever they begin, and leave what was granted before."""
    slots = Slots(32, 4, num_tables=2)
    known = tuple(range(30))
    first = (Grant(1, 0, 0, (7, 8)), Grant(1, 1, 0, (3, 4)), Grant(0, 0, 0, (9,)), Grant(0, 1, 0, (1,)))
    batch = slots.batch(step(Row(1, 0, 6, known), Row(0, 0, 3, known), granted=first, admit=(0, 1)))
    assert [table.tolist() for table in batch.block_tables] == [[[7, 8], [9, 0]], [[3, 4], [1, 0]]]
    assert batch.slots.tolist() == [1, 0]
    later = (Grant(1, 1, 2, (5, 6, 2)), Grant(1, 0, 2, (1,)))
    batch = slots.batch(step(Row(1, 6, 10), granted=later))
    assert batch.block_tables[1].tolist() == [[3, 4, 5, 6, 2]]
    assert batch.block_tables[0][:, :3].tolist() == [[7, 8, 1]]
    places = batch.places(1)
    assert places[0].tolist() == [4, 4, *[5] * 4, *[6] * 4]
    assert places[1].tolist() == [2, 3, *range(4), *range(4)]


def test_a_table_may_begin_behind_what_slid_out_of_the_window() -> None:
    """A prefix hit grants only the blocks that the window still sees."""
    slots = Slots(32, 4, num_tables=1)
    batch = slots.batch(
        step(Row(5, 80, 2, tuple(range(90))), granted=(Grant(5, 0, 18, (4, 6, 5)),), admit=(5,))
    )
    assert batch.block_tables[0][0, 18:].tolist() == [4, 6, 5]
    assert np.array_equal(batch.places(0)[0], [5, 5])
