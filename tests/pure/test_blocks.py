"""The block pool: holders, findability, order of eviction."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.blocks import BlockPool, chain_hash, root_hash


def hashes(count: int, salt: str = "") -> list[bytes]:
    chain = [root_hash(salt)]
    for index in range(count):
        chain.append(chain_hash(chain[-1], [index]))
    return chain[1:]


def filled(pool: BlockPool, count: int, salt: str = "") -> list[int]:
    blocks = pool.allocate(count)
    for block, block_hash in zip(blocks, hashes(count, salt), strict=True):
        pool.register(block, block_hash)
    return blocks


def test_the_hash_covers_tokens_order_parent_and_salt():
    root = root_hash("")
    variants = {
        chain_hash(root, [1, 2]),
        chain_hash(root, [2, 1]),
        chain_hash(root, [1, 2, 0]),
        chain_hash(chain_hash(root, [1]), [2]),
        chain_hash(root_hash("salt"), [1, 2]),
        chain_hash(root, [1 << 31, 2]),
    }
    assert len(variants) == 6
    assert chain_hash(root, [1, 2]) == chain_hash(root_hash(""), (1, 2))


def test_the_hash_is_the_same_on_every_machine():
    packed = b"".join(token_id.to_bytes(4, "little") for token_id in range(16))
    expected = hashlib.sha256(hashlib.sha256(b"salt").digest() + packed).digest()
    assert chain_hash(root_hash("salt"), range(16)) == expected


def test_a_released_block_is_found_until_it_is_given_away():
    pool = BlockPool(3)
    blocks = filled(pool, 2)
    pool.release(blocks)
    assert [pool.find(h) for h in hashes(2)] == blocks
    assert pool.num_free == 3
    pool.allocate(1)  # the block that was never used
    assert [pool.find(h) for h in hashes(2)] == blocks
    pool.allocate(1)  # the tail goes before the head
    assert [pool.find(h) for h in hashes(2)] == [blocks[0], None]
    pool.allocate(1)
    assert [pool.find(h) for h in hashes(2)] == [None, None]


def test_eviction_is_in_order_of_release_and_sharing_renews():
    pool = BlockPool(3)
    a, b, c = (filled(pool, 1, salt)[0] for salt in "abc")
    for block in (a, b, c):
        pool.release([block])
    pool.share([a])
    pool.release([a])
    assert [pool.allocate(1)[0] for _ in range(3)] == [b, c, a]


def test_a_shared_block_is_free_when_its_last_holder_leaves():
    pool = BlockPool(2)
    blocks = filled(pool, 1)
    assert pool.num_idle(blocks) == 0
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.check([blocks])
    pool.release(blocks)
    assert pool.num_free == 2
    assert pool.num_idle(blocks) == 1
    pool.check([])


def test_of_equal_blocks_the_first_stays_findable():
    pool = BlockPool(2)
    first, second = filled(pool, 1), filled(pool, 1)
    assert pool.find(hashes(1)[0]) == first[0]
    pool.release(second)
    assert pool.find(hashes(1)[0]) == first[0]
    assert pool.allocate(1) == second  # worth nothing, so reused first
    pool.check([first, second])


def test_without_retention_a_block_is_found_only_while_it_is_held():
    pool = BlockPool(2, retain=False)
    blocks = filled(pool, 1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.find(hashes(1)[0]) == blocks[0]
    pool.release(blocks)
    assert pool.find(hashes(1)[0]) is None
    pool.check([])


def test_more_than_is_free_cannot_be_taken():
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="3 blocks requested, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_check_sees_a_block_that_nobody_holds():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.check([blocks])
    for wrong in ([], [blocks, blocks], [blocks[:1]], [[3], blocks]):
        with pytest.raises(AssertionError):
            pool.check(wrong)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("tsfr"), st.integers(0, 5), st.integers(0, 7)), max_size=60))
def test_any_history_keeps_the_pool_coherent(history):
    pool = BlockPool(8)
    tables: list[list[int]] = []
    chain = hashes(8)
    for verb, count, index in history:
        if verb == "t" and count <= pool.num_free:
            tables.append(pool.allocate(count))
        elif verb == "s":
            found = [block for h in chain[:count] if (block := pool.find(h)) is not None]
            pool.share(found)
            tables.append(found)
        elif verb == "f" and tables:
            pool.release(tables.pop(index % len(tables)))
        elif verb == "r" and tables:
            for block, block_hash in zip(tables[index % len(tables)], chain, strict=False):
                if pool._hash_of[block] is None:
                    pool.register(block, block_hash)
        pool.check(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_free == 8
