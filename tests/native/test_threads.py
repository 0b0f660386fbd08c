"""Where the core's threads run, and that their caller does not notice."""

from __future__ import annotations

import os
from pathlib import Path

from quire import LLM, SamplingParams
from quire.backends.native import _core

ALL = os.sched_getaffinity(0)


def tasks() -> set[int]:
    return {int(folder.name) for folder in Path("/proc/self/task").iterdir()}


def where(num_threads: int) -> list[set[int]]:
    """The processors that each of the core's own threads may use. Its caller's computes beside them."""
    before = tasks()
    with LLM("demo", device="native", num_threads=num_threads) as llm:
        llm.generate("Once", SamplingParams(max_tokens=4), use_tqdm=False)
        assert os.sched_getaffinity(0) == ALL
        return [os.sched_getaffinity(thread) for thread in tasks() - before]


def test_as_many_threads_as_cores_keep_to_one_each() -> None:
    found = where(_core.usable_cores())
    assert len(found) == _core.usable_cores() - 1
    assert sum(map(len, found)) == len(set().union(*found)) < len(ALL)


def test_other_numbers_of_threads_go_where_they_like() -> None:
    cores = _core.usable_cores()
    assert where(cores + 1) == [ALL] * cores
