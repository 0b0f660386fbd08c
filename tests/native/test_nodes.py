"""Several NUMA nodes: which threads run where, which tasks and pages are theirs, and that no bit changes.

Machines with several nodes are described to the core by a folder, as Linux describes them, or by counts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowered import FORMATS, ISAS, OneOp, nodes_of, on_native, planned
from safetensors.numpy import save_file
from test_coded import KINDS, coded, draw, held
from test_native_exactness import all_same, alone, load, prompts, together
from tiny import CONFIGS, same_bits

from quire.backends.native import _core
from quire.backends.native.device import NativeDevice
from quire.backends.native.weights import load_packed
from quire.backends.packed_cache import PackedCache
from quire.cli.chosen import in_words
from quire.program import Names, WeightSpec
from quire.program.ops.experts import ExpertWeights, Routing
from quire.weights.safetensors import Checkpoint

SPLITS = ((1, 1), (2, 1), (1, 1, 2))  # threads by node
W = Names("w")


# Which threads run where


def machine(folder: Path, nodes: dict[int, str], siblings: int = 1) -> str:
    """Write a description of a machine: the processors of each node; `siblings` in a row share a core."""
    for node, processors in nodes.items():
        (folder / f"node/node{node}").mkdir(parents=True)
        (folder / f"node/node{node}/cpulist").write_text(processors + "\n")
    (folder / "node/possible").write_text("0-3\n")
    for cpu in range(64):
        first = cpu // siblings * siblings
        (folder / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        together = f"{first}-{first + siblings - 1}" if siblings > 1 else str(cpu)
        (folder / f"cpu/cpu{cpu}/topology/core_cpus_list").write_text(together + "\n")
    return str(folder)


def spread(nodes: _core.Nodes) -> dict[int, list[list[int]]]:
    """The processors of each thread, by the number of its node."""
    found: dict[int, list[list[int]]] = {}
    for thread in range(nodes.num_threads):
        found.setdefault(nodes.ids[nodes.of_thread(thread)], []).append(nodes.processors(thread))
    assert list(found) == nodes.ids
    return found


def test_as_many_threads_as_cores_keep_to_one_each_node_by_node(tmp_path: Path) -> None:
    """Some machines number the cores of two nodes in turns."""
    system = machine(tmp_path, {0: "0,2,4,6", 1: "1,3,5,7"})
    found = spread(_core.Nodes(8, range(8), system))
    assert found == {0: [[0], [2], [4], [6]], 1: [[1], [3], [5], [7]]}


def test_fewer_threads_keep_to_their_node(tmp_path: Path) -> None:
    system = machine(tmp_path, {0: "0-5", 1: "6-7"})
    first, second = list(range(6)), [6, 7]
    assert spread(_core.Nodes(4, range(8), system)) == {0: [first] * 3, 1: [second]}
    assert spread(_core.Nodes(7, range(8), system)) == {0: [first] * 5, 1: [second] * 2}


def test_more_threads_than_cores_are_divided_likewise(tmp_path: Path) -> None:
    system = machine(tmp_path, {0: "0-1", 1: "2-3", 2: "4-5"})
    assert spread(_core.Nodes(12, range(6), system)) == {0: [[0, 1]] * 4, 1: [[2, 3]] * 4, 2: [[4, 5]] * 4}


@pytest.mark.parametrize("expected", [{1: 1}, {0: 1, 2: 1}, {0: 1, 1: 1, 2: 1}])
def test_nodes_without_threads_are_not_used(expected: dict[int, int], tmp_path: Path) -> None:
    num_threads = sum(expected.values())
    system = machine(tmp_path, {0: "0-3", 1: "4-7", 2: "8-11"})
    nodes = _core.Nodes(num_threads, range(12), system)
    assert {node: len(threads) for node, threads in spread(nodes).items()} == expected
    assert all(bool(nodes.processors(thread)) == (num_threads > 1) for thread in range(num_threads))


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    system = machine(tmp_path, {0: "0-3", 1: "4-7"}, siblings=2)
    assert spread(_core.Nodes(4, range(8), system)) == {0: [[0, 1], [2, 3]], 1: [[4, 5], [6, 7]]}
    allowed = [0, 1, 2, 4]  # a core of node 0 whole, one in part, and half a core of node 1
    assert spread(_core.Nodes(3, allowed, system)) == {0: [[0, 1], [2]], 1: [[4]]}


def test_numbers_with_gaps_and_nodes_that_have_memory_alone(tmp_path: Path) -> None:
    system = machine(tmp_path, {0: "", 2: "0-1", 8: "2,3", 255: ""})
    assert spread(_core.Nodes(4, range(4), system)) == {2: [[0], [1]], 8: [[2], [3]]}


def test_a_process_on_one_node_knows_no_other(tmp_path: Path) -> None:
    """A replica is confined so, and a container may be."""
    system = machine(tmp_path, {0: "0-3", 1: "4-7"})
    nodes = _core.Nodes(4, range(4, 8), system)
    assert (nodes.count, spread(nodes)) == (1, {1: [[4], [5], [6], [7]]})
    assert spread(_core.Nodes(2, range(4, 8), system)) == {1: [[], []]}  # where the system puts them


def test_a_machine_without_a_description_has_one_node(tmp_path: Path) -> None:
    assert spread(_core.Nodes(3, range(8), str(tmp_path / "none"))) == {0: [[], [], []]}
    assert spread(_core.Nodes(2, [], str(tmp_path / "none"))) == {0: [[], []]}
    system = machine(tmp_path, {3: "0-3"})  # processors 4 to 7 belong to no node
    assert spread(_core.Nodes(4, range(8), system)) == {0: [[4, 5, 6, 7]] * 2, 3: [[0, 1, 2, 3]] * 2}


def test_the_machine_itself() -> None:
    folders = Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
    used = sum(bool(folder.read_text().strip()) for folder in folders)
    nodes = _core.Nodes(_core.num_cores())
    assert nodes.count <= max(1, used)
    pinned = [cpu for thread in range(nodes.num_threads) for cpu in nodes.processors(thread)]
    assert nodes.num_threads == 1 or set(pinned) == os.sched_getaffinity(0)


# Which tasks and pages are theirs


@pytest.mark.parametrize("threads", [(1,), (2, 1), (1, 7), (3, 3, 2), (1,) * 8])
def test_things_are_divided_by_threads(threads: tuple[int, ...]) -> None:
    nodes = _core.Nodes.of(threads)
    for total in (0, 1, 2, 7, 64, 1000):
        ends = [nodes.first(total, node) for node in range(len(threads) + 1)]
        assert (ends[0], ends[-1]) == (0, total)
        for (first, last), own in zip(pairwise(ends), threads, strict=True):
            assert abs((last - first) - total * own / sum(threads)) < 1


@pytest.mark.parametrize("shares", [(1,), (0.05, 0.35, 0.4, 0.99, 1), (0.6, 1)])
@pytest.mark.parametrize("threads", [(1,), (3,), *SPLITS])
def test_threads_take_each_task_once_and_those_of_their_node_first(
    threads: tuple[int, ...], shares: tuple[float, ...]
) -> None:
    nodes, tasks = _core.Nodes.of(threads), 41
    taken = nodes.record(tasks, shares)
    assert sorted(task for own in taken for task in own) == list(range(tasks))
    for thread, own in enumerate(taken):
        node = nodes.of_thread(thread)
        first, last = nodes.first(tasks, node), nodes.first(tasks, node + 1)
        for begin, end in pairwise((0, *shares)):  # within a part
            part = [task for task in own if int(begin * tasks) <= task < int(end * tasks)]
            theirs = [first <= task < last for task in part]
            assert theirs == sorted(theirs, reverse=True)


@pytest.mark.parametrize("num_tasks", [0, 1, 2, 3])
def test_fewer_tasks_than_threads(num_tasks: int) -> None:
    taken = _core.Nodes.of([2, 1, 1]).record(num_tasks, [0.5, 1])
    assert sorted(task for own in taken for task in own) == list(range(num_tasks))


def sections(nodes: _core.Nodes, matrix: _core.Matrix) -> list[tuple[int, int, int, int]]:
    return [nodes.section(matrix, node) for node in range(nodes.count)]


@pytest.mark.parametrize("threads", [(2, 1), (1, 1, 1), (5, 3)])
@pytest.mark.parametrize("outputs", [1, 16, 17, 100, 1030])
def test_a_matrix_is_divided_by_pairs_of_panels(outputs: int, threads: tuple[int, ...]) -> None:
    nodes, num_panels, end = _core.Nodes.of(threads), -(-outputs // _core.PANEL), 0
    for first_matrix, last_matrix, first, last in sections(nodes, _core.Matrix("int4", 1, outputs, 64)):
        assert (first_matrix, last_matrix, first) == (0, 1, end)
        assert last % 2 == 0 or last == num_panels
        end = last
    assert end == num_panels


def test_small_matrices_among_several_are_not_divided() -> None:
    nodes = _core.Nodes.of([2, 1])
    assert sections(nodes, _core.Matrix("int4", 9, 64, 64)) == [(0, 6, 0, 4), (6, 9, 0, 4)]
    assert sections(nodes, _core.Matrix("int4", 2, 4096, 4096)) == [(0, 2, 0, 170), (0, 2, 170, 256)]


@pytest.mark.parametrize("format", ["f32", "int8", "int4", "coded 4 32 unsigned f16 f16 none"])
@pytest.mark.parametrize(("count", "parts"), [(1, (4, 9)), (5, (1, 4))])
def test_a_node_reads_the_bytes_of_its_panels(count: int, parts: tuple[int, int], format: str) -> None:
    """Of 13 panels, or of 5 matrices. Each byte is read by one node, but for the padding between parts."""
    nodes, matrix = _core.Nodes.of([1, 2]), _core.Matrix(format, count, 200, 128)
    ranges = sorted(nodes.bytes(matrix))
    assert (ranges[0][0], ranges[0][2]) == (matrix.data.ctypes.data, 0)
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    read = [sum(last - first for first, last, node in ranges if node == own) for own in (0, 1)]
    assert 0 <= matrix.nbytes - sum(read) <= count * 3 * _core.ALIGNMENT
    assert read[0] * parts[1] == read[1] * parts[0]


def divide(first: int, last: int, *read: tuple[float, float, int], nodes: int = 2) -> list[tuple[Any, ...]]:
    """`divide_pages` of addresses in pages."""
    page = _core.HUGE_PAGE
    asked = [(round(begin * page), round(end * page), node) for begin, end, node in read]
    found = _core.divide_pages(first * page // 4, last * page // 4, asked, nodes)
    return [(begin / page, end / page, node) for begin, end, node in found]


def test_a_huge_page_goes_to_the_node_that_reads_most_of_it() -> None:
    """`divide` takes the borders of memory in quarters of a page: they need not be those of huge pages."""
    assert divide(8, 24, (2, 4, 0), (4, 6, 1)) == [(2, 4, 0), (4, 6, 1)]
    assert divide(8, 24, (2, 3.6, 0), (3.6, 6, 1)) == [(2, 4, 0), (4, 6, 1)]
    assert divide(8, 24, (2, 3.4, 0), (3.4, 6, 1)) == [(2, 3, 0), (3, 6, 1)]
    assert divide(9, 23, (2.3, 3.4, 0), (3.4, 5.7, 1)) == [(2.25, 3, 0), (3, 5.75, 1)]
    assert divide(1, 3, (0.3, 0.4, 0), (0.4, 0.7, 1)) == [(0.25, 0.75, 1)]
    parts = ((0, 0.1, 0), (0.1, 0.2, 1), (0.2, 0.3, 0), (0.3, 0.45, 1), (0.5, 0.6, 0), (0.6, 1, 2))
    assert divide(0, 4, *parts, nodes=3) == [(0, 1, 2)]
    assert divide(0, 4, *parts[:-1], nodes=3) == [(0, 1, 0)]


def test_pages_that_no_node_reads_go_with_those_before() -> None:
    assert divide(0, 24, (0, 1, 1), (3, 4, 1), (4, 5, 0)) == [(0, 4, 1), (4, 6, 0)]
    assert divide(0, 8) == [(0, 2, 0)]


def policies() -> dict[int, str]:
    """The policies of this process's memory, by address; only those that it asked for."""
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError:
        pytest.skip("this kernel tells no policies")
    found = {int(line.split()[0], 16): line.split()[1] for line in lines}
    return {address: policy for address, policy in found.items() if policy.startswith(("prefer", "inter"))}


def test_the_system_is_asked_for_pages_near_their_threads(tmp_path: Path) -> None:
    """This machine has node 0 at least. Weights are packed into memory, or come from a file of the cache."""
    op = OneOp([draw(4, 1024)], lambda b, x: b.linear(b.linear(x, W / "a", 6000), W / "b", 3000))
    save_file({name: weight.array for name, weight in op.weights.items()}, tmp_path / "model.safetensors")
    checkpoint, nodes = Checkpoint.open(tmp_path), _core.Nodes.of([1, 2])
    kept = PackedCache(tmp_path / "packed", least_bytes=0)
    for quantization, packed_cache in ((None, None), ("int8", kept), ("int8", kept)):
        plan = planned(op.program, checkpoint, quantization)
        packed = load_packed(plan, isa=ISAS[0], nodes=nodes, cache=packed_cache)
        read = [one for matrix in packed.matrices.values() for one in nodes.bytes(matrix)]
        first, last = min(one[0] for one in read), max(one[1] for one in read)
        wanted = {begin for begin, _, node in _core.divide_pages(first, last, read, 2) if node == 0}
        asked = {address for address, policy in policies().items() if policy == "prefer:0"}
        if not asked:
            pytest.skip("the system refuses policies")
        assert {address for address in asked if first <= address < last} == wanted
        assert len(wanted) > 1
    assert packed.from_cache


def test_the_system_is_asked_for_caches_on_all_nodes() -> None:
    cache = _core.KVCache(0, "int8", 1, 64, 16, 4, 64, 64)
    states = _core.StateCache(0, "float32", 1, 64, 4, 4096, 64, 4, 8, 64)
    before = set(policies())
    cache.spread(_core.Nodes.of([1, 1]))
    states.spread(_core.Nodes.of([1, 1]))
    asked = {address for address, policy in policies().items() if policy.startswith("interleave")} - before
    if not asked:
        pytest.skip("the system refuses policies")
    places = [array.ctypes.data for array in (*cache.blocks(64), states.snapshots(4))]
    assert all(any(address <= place for address in asked) for place in places)


def test_one_node_asks_for_nothing() -> None:
    before = policies()
    op = OneOp([draw(4, 1024)], lambda b, x: b.linear(x, W, 6000))
    nodes = _core.Nodes.of([3])
    packed = load_packed(planned(op.program, op.checkpoint()), isa=ISAS[0], nodes=nodes)
    cache = _core.KVCache(0, "float32", 1, 64, 16, 4, 64, 64)
    cache.spread(nodes)
    states = _core.StateCache(0, "float32", 1, 64, 4, 4096, 64, 4, 8, 64)
    states.spread(nodes)
    assert policies() == before
    assert packed.matrices["w.weight"].nbytes >= 6000 * 1024 * 4


# That no bit changes


@cache
def expected(name: str, format: str) -> Sequence[np.ndarray]:
    return alone(name, prompts([90, 1, 33, 7]), format)


@pytest.mark.parametrize("threads", SPLITS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["wide", "wide-experts"])
def test_steps_have_the_bits_of_one_node(name: str, format: str, threads: tuple[int, ...]) -> None:
    """Queries, keys and values together, gated products, experts; more threads than cores; few rows, many."""
    paged = load(name, format, threads=threads)
    found = together(paged, name, prompts([90, 1, 33, 7]), [1, 7, 64])
    assert all_same(found, list(expected(name, format)))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_has_the_bits_of_one_node(name: str) -> None:
    """Products by head, states, windows and what else they have."""
    tokens = prompts([70, 3, 40])
    paged = load(name, threads=(1, 2))
    assert all_same(together(paged, name, tokens, [1, 5, 30]), alone(name, tokens))


@pytest.mark.parametrize("kind", ["q4_k", "q8_0", "act-order", "groups of 8"])
def test_codes_have_the_bits_of_one_node(kind: str) -> None:
    for outputs, tokens in ((16, 1), (90, 3), (520, 45)):
        op = OneOp([draw(tokens, 300)], lambda b, x, n=outputs: b.linear(x, W, n))
        weights = held(op, {"w.weight": coded((outputs, 300), **KINDS[kind])})
        one = op.run(on_native(op.program, weights, "f32", ISAS[0]))
        for threads in SPLITS:
            found = op.run(on_native(op.program, weights, "f32", ISAS[0], threads))
            assert same_bits(found, one), (outputs, threads)


def test_large_experts_are_divided_by_panels() -> None:
    """Those above are small, so that a node has whole ones."""
    inner, hidden = 2100, 4000

    def spec(name: str, *shape: int) -> WeightSpec:
        return WeightSpec(W / name, (2, *shape), (W / name,), quantizable=True)

    w = ExpertWeights(None, spec("up", inner, hidden), spec("down", hidden, inner))
    how: dict[str, Any] = {"routing": Routing(1), "activation": "relu2"}
    op = OneOp([draw(5, hidden)], lambda b, x: b.experts(x, b.linear(x, W / "router", 2), w, **how))
    checkpoint = op.checkpoint()
    found = [op.run(on_native(op.program, checkpoint, "f32", ISAS[0], threads)) for threads in (1, (1, 1))]
    assert same_bits(*found)
    matrix = _core.Matrix("f32", 2, inner, hidden)
    assert sections(_core.Nodes.of([1, 1]), matrix) == [(0, 2, 0, 66), (0, 2, 66, 132)]


def test_many_short_steps_with_several_nodes() -> None:
    """Threads that take a task twice or leave one show here."""
    tokens, runs = prompts([60] * 5), []
    for threads in (1, (1, 1), (2, 1, 1)):
        paged, rng, found = load("wide", threads=threads), np.random.default_rng(3), []
        sequences = [paged.sequence(ids) for ids in tokens]
        for _ in range(100):
            some = rng.permutation(5)[: rng.integers(1, 6)].tolist()
            rows = [(sequences[i], int(rng.choice([1, 1, 2, 9, 33]))) for i in some]
            for sequence, count in rows:
                sequence.computed %= 60 - count
            found += paged.step(rows)
        runs.append(found)
    assert all(all_same(run, runs[0]) for run in runs[1:])


@pytest.mark.parametrize("threads", [1, 2, (1, 1), (2, 1), (1, 1, 2)])
def test_each_task_is_done_once(threads: int | tuple[int, ...]) -> None:
    """A value is added to itself in place: twice what it was, where each task of 8 rows is done once."""
    tokens, width = 203, 8
    native = _core.Native(ISAS[0], nodes_of(threads))
    table = np.random.default_rng(0).standard_normal((tokens, width)).astype(np.float32)
    out = native.buffer("T", width)
    native.embed_stored(out, table, "f32", False, -1, -1)
    matrix = _core.Matrix("f32", 1, 16, width)
    logits = native.buffer("L", width)
    native.pack("T", out, width, matrix)
    native.products("T")  # a phase by itself, so that the next one is another
    native.linear(native.buffer("T", 16), matrix, None)
    native.add("T", out, out, out, width)
    native.sampled_rows(logits, out, width)
    ids, ends = np.arange(tokens), np.array([0, tokens])
    for count in (tokens, 8, 9, 1, 100):
        rows = np.arange(count)
        numbers = (ids[:count], ids[:count], np.minimum(ends, count), [], np.zeros(1, int), np.zeros(1, int))
        found = native.run(*numbers, rows, [], [], logits, width, [], None)
        assert same_bits(np.array(found), 2 * table[:count]), count


# What users see


def test_nodes_are_told_where_there_are_several() -> None:
    device = NativeDevice("test", num_threads=3)
    assert "NUMA" not in device.in_words()
    assert "numa_nodes" not in device.facts()
    device.nodes = _core.Nodes.of([2, 1])
    assert device.in_words().endswith(", 3 threads on 2 NUMA nodes")
    assert in_words({name: str(fact) for name, fact in device.facts().items()})[1:] == [
        "3 threads",
        "on 2 NUMA nodes",
    ]
    assert in_words({"num_threads": "1"}) == ["1 thread"]
