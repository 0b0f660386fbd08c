"""`quire probe`: what is measured, kept and shown. The loops run a moment each; no figure is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lowered import ISAS

from quire.backends.native import _core
from quire.backends.native.device import NativeLoops
from quire.cli.main import main
from quire.roofline import probe

ISA = ISAS[0]
LOOPS = NativeLoops(ISA, 2)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of this test."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ceilings"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every measurement asked for; each is over at once, and has found 1e9 for each thread."""
    seen: list[tuple[Any, ...]] = []

    def found(what: str) -> Callable[..., float]:
        def measurement(threads: int, *how: Any) -> float:
            seen.append((what, threads, *how))
            return 1e9 * threads

        return measurement

    for name in ("peak_operations", "read_bandwidth"):
        monkeypatch.setattr(_core, name, found(name))
    return seen


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["probe", *words])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("isa", ISAS)
def test_an_instruction_set_may_be_measured_before_any_is_looked_for(isa: str) -> None:
    """AMX wants to be asked for once in a process."""
    code = f"from quire.backends.native import _core; _core.peak_operations(1, {isa!r}, 'bf16', 0.001)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot run kernels for avx9000"):
        _core.peak_operations(1, "avx9000", "bf16", 0.0)


@pytest.mark.parametrize("isa", ISAS)
def test_the_loops_find_something(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_SECONDS", 0.0)
    monkeypatch.setattr(probe, "MEMORY_BYTES", 1 << 20)
    told: list[tuple[int, int]] = []
    found = probe.measure(NativeLoops(isa, 2), lambda *done: told.append(done))
    assert (found.isa, found.threads) == (isa, 2)
    assert found.operations["f32"] > 0
    assert min(found.operations.values()) >= 0  # 0: no instruction for it
    assert set(found.read_bytes) == {1, 2}
    assert all(rate > 0 for levels in found.read_bytes.values() for rate in levels.values())
    assert told == [(i, len(told)) for i in range(1, len(told) + 1)]


@pytest.mark.parametrize("shared", ["0,2,4,6", "0-3", "0-1,64-65"])
def test_a_buffer_for_each_level(tmp_path: Path, shared: str) -> None:
    caches = [("1", "Data", "48K", "0"), ("1", "Instruction", "32K", "0"), ("2", "Unified", "2048K", "0")]
    caches += [("3", "Unified", "32768K", shared), ("4", "Unified", "much", "0")]
    for index, (level, kind, size, own) in enumerate(caches):
        cache = tmp_path / f"index{index}"
        cache.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", own)):
            (cache / name).write_text(text + "\n")
    found = probe.level_bytes(tmp_path)
    kib = {"L1": 24, "L2": 1024, "L3": 4096}
    assert found == {level: size << 10 for level, size in kib.items()} | {"memory": probe.MEMORY_BYTES}
    assert probe.level_bytes(tmp_path / "none") == {"memory": probe.MEMORY_BYTES}


def test_the_name_of_the_processor(tmp_path: Path) -> None:
    proc = tmp_path / "cpuinfo"
    assert probe.cpu_name(proc) == "unknown CPU"
    one = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: Some CPU @ 2: fast\nstepping\t: 1\n"
    proc.write_text(one + one.replace("Some", "Other"))
    assert probe.cpu_name(proc) == "Some CPU @ 2: fast (25-17-1)"


def test_what_was_measured_is_kept(measured: list[Any], folder: Path) -> None:
    first = probe.ceilings(LOOPS)
    count = len(measured)
    assert count == len(probe.KINDS) + 2 * len(probe.level_bytes())
    assert first.bandwidth == 2e9
    assert probe.ceilings(LOOPS) == probe.cached(LOOPS) == first
    assert len(measured) == count
    assert [path.suffix for path in folder.iterdir()] == [".json"]
    assert probe.cached(NativeLoops(ISA, 1)) is None  # other threads are another machine
    assert set(probe.ceilings(NativeLoops(ISA, 1)).read_bytes) == {1}
    assert len(measured) > count


def test_a_level_is_no_slower_than_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor are several threads slower than one: other programs ran while they were measured."""
    rates = {
        (1, "L1"): 9.0,
        (1, "L2"): 5.0,
        (1, "memory"): 3.0,
        (2, "L1"): 7.0,
        (2, "L2"): 1.0,
        (2, "memory"): 4.0,
    }
    sizes = {"L1": 1, "L2": 2, "memory": 3}
    monkeypatch.setattr(probe, "level_bytes", lambda: sizes)
    names = {size: level for level, size in sizes.items()}
    monkeypatch.setattr(_core, "peak_operations", lambda *_: 1.0)
    monkeypatch.setattr(_core, "read_bandwidth", lambda threads, isa, size, _: rates[threads, names[size]])
    assert probe.measure(LOOPS).read_bytes == {
        1: {"L1": 9.0, "L2": 5.0, "memory": 3.0},
        2: {"L1": 9.0, "L2": 5.0, "memory": 4.0},
    }


@pytest.mark.parametrize(
    "change",
    [
        {"cpu": "another"},
        {"isa": "another"},
        {"threads": 3},
        {"operations": {}},
        {"operations": dict.fromkeys(probe.KINDS, "fast")},
        {"read_bytes": {"1": {"memory": 1e9}}},
        {"read_bytes": {"2": {"memory": 0}}},
        {"read_bytes": {"2": [1, 2]}},
        {"read_bytes": {"two": {"memory": 1e9}}},
        {"read_bytes": None},
        {"measured_at": "today"},
    ],
    ids=str,
)
def test_a_file_that_says_something_else_is_not_used(
    change: dict[str, Any], measured: list[Any], folder: Path
) -> None:
    first = probe.ceilings(LOOPS)
    (file,) = folder.iterdir()
    file.write_text(json.dumps(first.as_dict() | change))
    assert probe.cached(LOOPS) is None
    assert probe.ceilings(LOOPS).read_bytes == first.read_bytes  # measured again, and kept
    assert probe.cached(LOOPS) is not None


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"\xff", b"{}"])
def test_a_damaged_file_is_not_used(text: bytes, measured: list[Any], folder: Path) -> None:
    probe.ceilings(LOOPS)
    (file,) = folder.iterdir()
    file.write_bytes(text)
    assert probe.cached(LOOPS) is None


def test_a_cache_that_cannot_be_written_is_done_without(measured: list[Any], folder: Path) -> None:
    folder.parent.write_text("a file where the folder should be")
    first = probe.ceilings(LOOPS)
    assert first.bandwidth == 2e9
    assert probe.cached(LOOPS) is None


def test_the_command(measured: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--num-threads", "2", "--json") == 0
    told = capsys.readouterr()
    assert told.err == ""
    facts = json.loads(told.out)
    assert (facts["threads"], facts["isa"], set(facts["operations"])) == (2, ISA, set(probe.KINDS))
    assert facts["read_bytes"]["2"]["memory"] == 2e9
    count = len(measured)
    assert call("--num-threads", "2", "--cached") == 0
    shown = capsys.readouterr().out
    for words in (ISA.replace("_", " "), "2 threads", "1 thread ", "memory", "2.0 GB/s", "int8", "2 G"):
        assert words in shown
    assert len(measured) == count
    assert call("--num-threads", "2") == 0
    assert len(measured) == 2 * count  # measured anew, though it was kept


def test_wrong_words_are_refused(measured: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--num-threads", "0"), ("--num-threads", "1,025"), ("--num-threads", "two"), ("demo",)):
        assert call(*words[:-1], words[-1].replace(",", "")) in (1, 2)
        assert words[-1] in capsys.readouterr().err
    assert measured == []
