"""Where pages lie and threads run on a machine with several NUMA nodes: scripts/numa_in_qemu.py makes one."""

from __future__ import annotations

import ctypes
import os
import platform
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from lowered import ISAS, OneOp, planned
from safetensors.numpy import save_file
from test_coded import draw
from test_threads import where

from quire import LLM, SamplingParams
from quire.backends.native import _core
from quire.backends.native.weights import load_packed
from quire.backends.packed_cache import PackedCache
from quire.program import Names
from quire.weights.safetensors import Checkpoint

NODES = _core.Nodes(_core.num_cores())
PAGE = os.sysconf("SC_PAGE_SIZE")
MOVE_PAGES = {"x86_64": 279, "aarch64": 239}  # the number of the system call
W = Names("w")


def nodes_of_pages(first: int, last: int) -> list[int]:
    """The node of each page that overlaps [first, last), negative for those that were never written."""
    addresses = np.arange(first // PAGE * PAGE, last, PAGE, np.uint64)
    found = np.zeros(len(addresses), np.int32)
    places = (ctypes.c_void_p(array.ctypes.data) for array in (addresses, found))
    pages, status = places
    call, none = ctypes.CDLL(None, use_errno=True).syscall, ctypes.c_void_p(None)
    failed = call(MOVE_PAGES[platform.machine()], 0, ctypes.c_ulong(len(addresses)), pages, none, status, 0)
    assert failed == 0, os.strerror(ctypes.get_errno())
    return found.tolist()


def huge_bytes(first: int, last: int) -> int:
    """The bytes in huge pages of the mappings that begin in [first, last)."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            inside = first <= int(name.split("-")[0], 16) < last
        elif inside and name == "AnonHugePages:":
            total += 1024 * int(rest[0])
    return total


def test_weights_lie_on_the_nodes_of_their_threads(tmp_path: Path) -> None:
    """As packed, and from a file of the cache that is written and one that is read."""
    op = OneOp([draw(4, 1024)], lambda b, x: b.linear(b.linear(x, W / "a", 8000), W / "b", 3000))
    save_file({name: weight.array for name, weight in op.weights.items()}, tmp_path / "model.safetensors")
    checkpoint, kept = Checkpoint.open(tmp_path), PackedCache(tmp_path / "packed", least_bytes=0)
    for quantization, packed_cache in ((None, None), ("int8", kept), ("int8", kept)):
        plan = planned(op.program, checkpoint, quantization)
        packed = load_packed(plan, isa=ISAS[0], nodes=NODES, cache=packed_cache)
        read = [one for matrix in packed.matrices.values() for one in NODES.bytes(matrix)]
        first, last = min(one[0] for one in read), max(one[1] for one in read)
        for begin, end, node in _core.divide_pages(first, last, read, NODES.count):
            assert set(nodes_of_pages(begin, end)) <= {NODES.ids[node], -2}  # -2: no page there
        near = sum(nodes_of_pages(one[0], one[1]).count(NODES.ids[one[2]]) * PAGE for one in read)
        assert near > 0.85 * (last - first)
        assert huge_bytes(first - PAGE, last) > 0.8 * (last - first)
    assert packed.from_cache


def test_caches_lie_on_all_nodes() -> None:
    cache = _core.KVCache(0, "float32", 4, 256, 16, 4, 64, 64)
    cache.spread(NODES)
    for array in cache.blocks(256):
        array[:] = 1
        found = Counter(nodes_of_pages(array.ctypes.data, array.ctypes.data + array.nbytes))
        assert sorted(found) == NODES.ids
        assert max(found.values()) - min(found.values()) <= 2 * _core.HUGE_PAGE // PAGE


@pytest.mark.parametrize("fewer", [0, 1])
def test_threads_run_on_their_nodes(fewer: int) -> None:
    nodes = _core.Nodes(_core.num_cores() - fewer)
    expected = [nodes.processors(thread) for thread in range(1, nodes.num_threads)]
    assert sorted(map(sorted, where(nodes.num_threads))) == sorted(expected)
    for thread in range(nodes.num_threads):
        (listed,) = Path("/sys/devices/system/node").glob(f"node{nodes.ids[nodes.of_thread(thread)]}/cpulist")
        numbers = [int(number) for part in listed.read_text().split(",") for number in part.split("-")]
        assert numbers[0] <= nodes.processors(thread)[0] <= numbers[-1]


def test_answers_are_those_of_one_node() -> None:
    """Threads that are confined to one node, as those of a replica are, know no other."""

    def answer() -> tuple[list[int], list[float]]:
        params = SamplingParams(max_tokens=24, logprobs=1, seed=3, temperature=1.0)
        with LLM("demo", device="native", speculative="off") as llm:
            (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
            told.append(llm.chosen.get("numa_nodes"))
        choice = output.outputs[0]
        ids = list(choice.token_ids)
        return ids, [one[token].logprob for token, one in zip(ids, choice.logprobs or [], strict=True)]

    told: list[str | None] = []
    everywhere, before = answer(), os.sched_getaffinity(0)
    last = [cpu for t in range(NODES.num_threads) for cpu in NODES.processors(t) if NODES.of_thread(t) == 1]
    os.sched_setaffinity(0, last)
    try:
        assert answer() == everywhere
    finally:
        os.sched_setaffinity(0, before)
    assert told == [str(NODES.count), None]
