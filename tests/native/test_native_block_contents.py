"""Contents of blocks on the native backend: see tests/model/test_block_contents.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_engine_caches
from lowered import plain, planned, tensors
from test_block_contents import (  # noqa: F401  # run here with this backend
    contents_of,
    load,
    new,
    test_a_content_of_another_size_is_refused,
    test_layouts_differ_where_contents_do,
    test_same_bits_from_a_store,
    test_same_bits_with_loaded_blocks,
    test_what_is_there_is_not_loaded_again,
    test_wrong_contents_are_noticed,
)
from test_engine_caches import Answer, each_alone, run
from tiny import random_weights

from quire.backends.backend import Backend, Capacity
from quire.backends.native.device import NativeDevice
from quire.program import Program

KV_DTYPES = ("float32", "float16", "bfloat16", "int8")
_format = {"kv_dtype": "float32"}


def native(program: Program, capacity: Capacity) -> Backend:
    program = plain(program)
    device = NativeDevice("test", num_threads=2, packed_cache=False)
    capacity = Capacity(
        capacity.num_blocks,
        capacity.block_size,
        _format["kv_dtype"],
        capacity.max_num_seqs,
        capacity.num_snapshots,
        capacity.max_steps_in_flight,
    )
    return device.build(program, planned(program, tensors(random_weights(program), "f32")), capacity)


@pytest.fixture(autouse=True, scope="module", params=KV_DTYPES)
def _on_native(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let tests of the reference drive this backend, with each format of keys and values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_engine_caches, "new_backend", native)
        patch.setitem(_format, "kv_dtype", request.param)
        yield


@pytest.fixture(scope="module")
def alone(_on_native: None) -> dict[int, Answer]:
    return each_alone()


def test_two_steps_in_flight(alone: dict[int, Answer]) -> None:
    engine = new(max_steps_in_flight=2)
    assert run(engine) == alone
    other = new(max_steps_in_flight=2, max_num_batched_tokens=60)
    assert load(other, contents_of(engine)) > 20
    assert run(other) == alone
    assert other.scheduler.num_cached_tokens >= 3 * 96


def test_layouts_tell_the_format() -> None:
    assert _format["kv_dtype"] in new().runner._backend.block_layout()
