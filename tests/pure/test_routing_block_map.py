"""The block map against a dictionary, and its memory."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.routing.block_map import BlockMap, keys_in, keys_of
from quire.routing.expected_blocks import ExpectedBlocks


def chain(name: object, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {index}".encode()).digest() for index in range(count)]


CHAINS = [chain(name, 120) for name in range(3)]
CHAINS += [CHAINS[0][:50] + chain("fork", 70)]
REPLICAS = st.sampled_from([0, 1, 2, 63, 64, 700])
PARTS = st.tuples(st.integers(0, 3), st.integers(0, 119), st.integers(0, 119)).map(
    lambda part: CHAINS[part[0]][min(part[1:]) : max(part[1:])]
)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), REPLICAS, PARTS),
        st.tuples(st.just("remove"), REPLICAS, PARTS),
        st.tuples(st.just("remove_replica"), REPLICAS, st.none()),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(CALLS)
def test_it_has_what_was_added_and_not_removed(calls):
    found, model = BlockMap(), dict[int, set[bytes]]()
    for name, replica, part in calls:
        own = model.setdefault(replica, set())
        if name == "add":
            found.add(replica, keys_of(part + part[:3]))
            own.update(part)
        elif name == "remove":
            found.remove(replica, keys_of(part))
            own.difference_update(part)
        else:
            found.remove_replica(replica)
            own.clear()
    assert {replica: found.count(replica) for replica in model} == {r: len(own) for r, own in model.items()}
    assert len(found) == sum(map(len, model.values()))
    for hashes in CHAINS:
        expected = {replica: leading(hashes, own) for replica, own in model.items()}
        assert found.match(keys_of(hashes)) == {r: n for r, n in expected.items() if n}


@settings(max_examples=60, deadline=None)
@given(CALLS)
def test_expected_blocks_are_those_added_and_not_removed(calls):
    found, model = ExpectedBlocks(10_000), dict[int, set[bytes]]()
    for name, replica, part in calls:
        own = model.setdefault(replica, set())
        if name == "add":
            found.add(replica, keys_of(part).tolist())
            own.update(part)
        elif name == "remove":
            found.remove(replica, keys_of(part).tolist())
            own.difference_update(part)
        else:
            found.remove_replica(replica)
            own.clear()
    assert len(found) == len(set().union(*model.values()))
    for hashes in CHAINS:
        expected = {replica: leading(hashes, own) for replica, own in model.items()}
        assert found.match(keys_of(hashes).tolist()) == {r: n for r, n in expected.items() if n}
    assert found.match([]) == {}


def test_expected_blocks_are_bounded():
    found = ExpectedBlocks(50)
    found.add(1, range(80))
    found.add(2, range(80))
    assert len(found) == 50
    assert found.match(range(80)) == {1: 50, 2: 50}
    found.remove(1, range(80))
    found.remove(2, range(80))
    assert len(found) == 0


def leading(hashes: list[bytes], own: set[bytes]) -> int:
    return next((i for i, one in enumerate(hashes) if one not in own), len(hashes))


@pytest.mark.parametrize(
    ("num_replicas", "num_calls"), [(1, 0), (3, 0), (130, 0), (3, 2**32 - 70), (130, 2**32 - 2)]
)
def test_it_is_bounded_and_what_was_used_last_stays(num_replicas, num_calls):
    """Also after more calls than a table can count."""
    found = BlockMap(max_pairs=1600)
    found._now = num_calls
    hot = keys_of(chain("hot", 100))
    found.add(0, hot)
    for index in range(100):
        found.add(index % num_replicas, keys_of(chain(index, 80)))
        assert len(found) <= 1600
        assert len(found) == sum(found.count(replica) for replica in range(num_replicas))
        assert found.match(hot) == {0: 100}  # which is a use
    last = keys_of(chain(99, 80))
    assert found.match(last) == {99 % num_replicas: 80}
    assert found.match(keys_of(chain(0, 80))) == {}
    assert len(found) > 1400
    found.add(0, keys_of(chain("too many", 5000)))
    assert len(found) <= 1600


def test_a_block_of_many_replicas_and_one_of_none():
    found, hashes = BlockMap(), chain("a", 40)
    for replica in range(1000):
        found.add(replica, keys_of(hashes[: replica % 40]))
    expected = {replica: replica % 40 for replica in range(1000) if replica % 40}
    assert found.match(keys_of(hashes)) == expected
    assert found.match(keys_of(chain("b", 5))) == {}
    assert found.match(keys_of([])) == {}
    assert keys_in(bytes(8)).tolist() == [1]  # a hash of zeros does not look like an empty row


def test_a_block_takes_at_most_64_bytes():
    found = BlockMap(max_pairs=200_000)
    dice = np.random.default_rng(1)
    tracemalloc.start()
    for index in range(150):  # more than fit, so it rebuilds and evicts
        found.add(index % 8, dice.integers(1, 2**64 - 1, 1600, dtype=np.uint64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 180_000 < len(found) <= 200_000
    assert found.nbytes <= 40 * 200_000
    assert peak <= 64 * 200_000
