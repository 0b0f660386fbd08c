"""Cores for replicas: as many each, within a node wherever that can be, and none twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.cluster.placement import Core, Place, allowed_cores, divide, granted_cores, spread
from quire.errors import ConfigError


def machine(*num_cores: int, threads: int = 1) -> list[Core]:
    """Nodes with so many cores each."""
    found, number = [], 0
    for node, count in enumerate(num_cores):
        for _ in range(count):
            found.append(Core(tuple(range(number, number + threads)), node))
            number += threads
    return found


@pytest.mark.parametrize(
    ("nodes", "num_replicas", "expected"),
    [
        ((2,), 2, ["cpu 0", "cpu 1"]),
        ((8,), 3, ["cpu 0-1", "cpu 2-3", "cpu 4-5"]),
        ((8, 8), 2, ["cpu 0-7", "cpu 8-15"]),
        ((8, 8), 3, ["cpu 0-3", "cpu 4-7", "cpu 8-11"]),
        ((8, 8), 4, ["cpu 0-3", "cpu 4-7", "cpu 8-11", "cpu 12-15"]),
        ((4, 4, 4, 4), 2, ["cpu 0-7", "cpu 8-15"]),
        ((4, 4, 4), 2, ["cpu 0-3", "cpu 4-7"]),
        ((1, 7), 2, ["cpu 1-3", "cpu 4-6"]),
        ((1, 1), 2, ["cpu 0", "cpu 1"]),
    ],
)
def test_places(nodes: tuple[int, ...], num_replicas: int, expected: list[str]) -> None:
    assert [place.words for place in divide(machine(*nodes), num_replicas)] == expected


@pytest.mark.parametrize("nodes", [(1,), (5,), (16, 16), (3, 5), (4, 4, 4, 4), (1, 2, 3), (6, 1, 1)])
def test_places_are_equal_disjoint_and_within_nodes(nodes: tuple[int, ...]) -> None:
    cores = machine(*nodes)
    for num_replicas in range(1, len(cores) + 1):
        places = divide(cores, num_replicas)
        assert len(places) == num_replicas
        assert len({len(place.cores) for place in places}) == 1
        taken = [core for place in places for core in place.cores]
        assert len(set(taken)) == len(taken)
        if num_replicas > len(nodes) // 2:
            assert all(len(place.nodes) == 1 for place in places)


def test_hardware_threads_of_a_core_stay_together() -> None:
    first, second = divide(machine(4, threads=2), 2)
    assert (first.words, second.words) == ("cpu 0-3", "cpu 4-7")
    assert (len(first.cores), first.processors) == (2, (0, 1, 2, 3))


def test_more_replicas_than_cores() -> None:
    with pytest.raises(ConfigError, match=r"replicas = 3, but this machine has 2 cores") as refused:
        divide(machine(2), 3)
    assert refused.value.hint is not None
    with pytest.raises(ConfigError, match="has 1 core that may be used"):
        divide(machine(1), 2)


def test_threads_are_one_a_core_or_as_asked_for() -> None:
    places = divide(machine(8), 2)
    assert spread(places, None, granted=None) == 4
    assert spread(places, None, granted=100) == 4
    assert spread(places, None, granted=5) == 2  # cores' worth of time
    assert spread(places, None, granted=1) == 1
    assert spread(places, 3, granted=8) == 3
    with pytest.raises(ConfigError, match=r"num_threads = 5, but each of 2 replicas has 4 cores"):
        spread(places, 5, granted=8)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "350000 100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({}, None),
    ],
)
def test_the_quota_of_the_control_group(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert granted_cores(tmp_path) == expected


def test_the_least_quota_of_the_own_group_and_those_above_it_counts(tmp_path: Path) -> None:
    """As that of a systemd service, whose group is not at the root."""
    proc, service = tmp_path / "proc", tmp_path / "group/system.slice/quire.service"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/system.slice/quire.service\n")
    service.mkdir(parents=True)
    assert granted_cores(tmp_path / "group", proc) is None
    (service / "cpu.max").write_text("200000 100000\n")
    assert granted_cores(tmp_path / "group", proc) == 2
    (service.parent / "cpu.max").write_text("150000 100000\n")
    assert granted_cores(tmp_path / "group", proc) == 1


def test_cores_are_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes whose processors alternate, each core with two of them, one of which may not be used."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5, 6})
    for number in range(8):
        folder = tmp_path / f"cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "core_cpus_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    for node in (0, 1):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(f"{node},{node + 2},{node + 4},{node + 6}\n")
    cores = allowed_cores(tmp_path)
    assert cores == [Core((0, 4), 0), Core((2, 6), 0), Core((1, 5), 1), Core((3,), 1)]
    assert [place.words for place in divide(cores, 2)] == ["cpu 0,2,4,6", "cpu 1,3,5"]
    assert divide(cores, 2)[1].nodes == (1,)


def test_a_system_that_says_nothing_has_one_node(tmp_path: Path) -> None:
    found = allowed_cores(tmp_path)
    assert found == [Core((number,), 0) for number in sorted(os.sched_getaffinity(0))]
    assert Place(tuple(found)).processors == tuple(sorted(os.sched_getaffinity(0)))
