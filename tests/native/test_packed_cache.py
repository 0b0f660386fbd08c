"""Loading into packed memory, and the cache of what was packed: found, refused, shared, and never fatal."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowered import planned
from safetensors.numpy import save_file
from tiny import tiny

from quire.backends import packed_cache
from quire.backends.native import _core
from quire.backends.native.layout import matrix_names
from quire.backends.native.weights import Packed, load_packed, packing_key
from quire.backends.packed_cache import PackedCache
from quire.cli.main import main
from quire.errors import ConfigError
from quire.program.passes import fuse
from quire.quantize.kinds import DTYPES
from quire.weights.load import load
from quire.weights.safetensors import Checkpoint

ISA = _core.isas()[0]


def write(folder: Path, name: str = "llama", kind: str = "bf16", seed: int = 0) -> Any:
    """A checkpoint with all tensors that a tiny model wants; returns its program."""
    program, rng = fuse(tiny(name).program), np.random.default_rng(seed)
    arrays = {}
    for spec in program.weights().values():
        shape = list(spec.shape[1:] if len(spec.sources) > 1 else spec.shape)
        if spec.rows:
            axis = -2 if spec.quantizable else -1
            shape[axis] = shape[axis] // spec.rows.taken * spec.rows.period
        if spec.transposed:
            shape[-2:] = shape[:-3:-1]
        for source in spec.sources:
            arrays[source] = rng.standard_normal(shape).astype(DTYPES[kind])
    folder.mkdir(exist_ok=True)
    save_file(arrays, folder / "model.safetensors")
    return program


def read(
    folder: Path,
    program: Any,
    quantization: str | None = "int4",
    cache: PackedCache | None = None,
    **how: Any,
) -> Packed:
    options = {"isa": ISA, "nodes": _core.Nodes(2), "model": str(folder), **how}
    return load_packed(planned(program, Checkpoint.open(folder), quantization), cache=cache, **options)


def contents(packed: Packed) -> dict[str, bytes]:
    matrices = {name: np.asarray(matrix.data).tobytes() for name, matrix in packed.matrices.items()}
    return matrices | {name: vector.tobytes() for name, vector in packed.vectors.items()}


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(tmp_path / "cache" / "packed", least_bytes=0)


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, Any]:
    folder = tmp_path / "model"
    return folder, write(folder)


def files(cache: PackedCache) -> list[Path]:
    return sorted(cache.folder.iterdir())


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "qwen3_moe"])
def test_weights_are_those_of_the_reference(tmp_path: Path, name: str, quantization: str | None) -> None:
    program = write(tmp_path / name, name)
    checkpoint = Checkpoint.open(tmp_path / name)
    expected = load(planned(program, checkpoint, quantization))
    heard: list[tuple[int, int]] = []
    packed = read(tmp_path / name, program, quantization, progress=lambda *now: heard.append(now))
    assert set(packed.matrices) == matrix_names(program)
    assert set(packed.matrices) | set(packed.vectors) == set(expected)
    for weight, vector in packed.vectors.items():
        np.testing.assert_array_equal(vector, expected[weight].dense())
    for weight, matrix in packed.matrices.items():
        spec = program.weights()[weight]
        assert matrix.format == expected[weight].storage.kind
        assert tuple(matrix.shape[1:]) == spec.shape[-2:]
    layout = planned(program, checkpoint, quantization).layout
    assert [part.nbytes for part in layout.parts if part.format != "vector"] == [
        matrix.nbytes for matrix in packed.matrices.values()
    ]
    total = sum(entry.nbytes for name, entry in checkpoint.items())
    assert heard[-1][0] == heard[-1][1] >= total
    assert contents(read(tmp_path / name, program, quantization, nodes=_core.Nodes(1))) == contents(packed)


def test_a_table_read_in_place(tmp_path: Path, cache: PackedCache) -> None:
    """It is the mapped file: no part of what is packed, and still there when the file has gone."""
    program = write(tmp_path / "m", "gemma4")
    name = "model.embed_tokens_per_layer.weight"
    spec = program.weights()[name]
    for found in (
        read(tmp_path / "m", program, "int8", cache) for _ in range(2)
    ):  # packed, then from the cache
        table = found.vectors[name]
        assert (table.shape, table.dtype) == (spec.shape, DTYPES["bf16"])
        assert not table.flags.owndata
        assert not table.flags.writeable
        assert name not in found.matrices
    plan = planned(program, Checkpoint.open(tmp_path / "m"), "int8")
    assert plan.layout.in_place == {name}
    (tmp_path / "m" / "model.safetensors").unlink()
    assert np.isfinite(table.astype(np.float32)).all()


def test_bits_do_not_depend_on_the_instruction_set(model: tuple[Path, Any]) -> None:
    found = [contents(read(*model, isa=isa)) for isa in _core.isas()]
    assert all(other == found[0] for other in found)


def test_a_tensor_that_cannot_be_rounded_is_named(tmp_path: Path, cache: PackedCache) -> None:
    program = write(tmp_path / "m", kind="f32")
    spec = next(s for s in program.weights().values() if s.quantizable)
    path = tmp_path / "m" / "model.safetensors"
    entry = Checkpoint.open(path)[spec.sources[0]]
    with path.open("r+b") as file:
        file.seek(entry.offset)
        file.write(np.float32(np.nan).tobytes())
    with pytest.raises(ConfigError, match="not finite") as raised:
        read(tmp_path / "m", program, "int4", cache)
    assert repr(spec.sources[0]) in raised.value.message
    assert files(cache) == []  # nothing half done is left


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_was_packed_is_found_again(
    model: tuple[Path, Any], cache: PackedCache, quantization: str
) -> None:
    plain = contents(read(*model, quantization))
    first = read(*model, quantization, cache)
    second = read(*model, quantization, cache)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert contents(first) == contents(second) == plain
    assert len(files(cache)) == 1
    entry = cache.entries()[0]
    assert (entry.model, entry.quantization) == (str(model[0].resolve()), quantization)
    heard: list[tuple[int, int]] = []
    read(*model, quantization, cache, progress=lambda *now: heard.append(now))
    assert heard[-1] == (entry.nbytes, entry.nbytes)


def test_floats_and_small_models_are_not_kept(model: tuple[Path, Any], cache: PackedCache) -> None:
    read(*model, None, cache)
    read(*model, "int8", PackedCache(cache.folder))  # of ordinary limits: less is packed in no time
    assert not cache.folder.exists()


def test_each_thing_that_matters_changes_the_key(
    model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, program = model

    def key(quantization: str = "int8") -> str:
        return packing_key(planned(program, Checkpoint.open(folder), quantization))

    same = key()
    assert key() == same
    seen = {same, key("int4")}
    status = (folder / "model.safetensors").stat()
    os.utime(folder / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    seen.add(key())
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    seen.add(key())
    monkeypatch.setattr(_core, "PACKING_VERSION", -1)
    seen.add(key())
    assert len(seen) == 5


def test_another_checkpoint_at_the_same_place_is_packed_anew(
    model: tuple[Path, Any], cache: PackedCache
) -> None:
    folder, program = model
    before = contents(read(folder, program, "int4", cache))
    write(folder, seed=1)
    after = read(folder, program, "int4", cache)
    assert not after.from_cache
    assert contents(after) != before


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, 0 if at >= 0 else 2)
        byte = file.read(1)
        file.seek(at, 0 if at >= 0 else 2)
        file.write(bytes([byte[0] ^ 1]))


DAMAGE = {
    "one bit of the weights": lambda path: _flip(path, 2345),
    "one bit of the model's name": lambda path: _flip(path, path.read_bytes().index(b'"model": "') + 12),
    "one bit of the mark": lambda path: _flip(path, -1),
    "cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "nearly nothing": lambda path: os.truncate(path, 5),
    "nothing": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "another file": lambda path: path.write_bytes(os.urandom(5000)),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_made_again(
    model: tuple[Path, Any], cache: PackedCache, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = contents(read(*model, "int4", cache))
    (path,) = files(cache)
    whole = path.read_bytes()
    DAMAGE[what](path)
    again = read(*model, "int4", cache)
    assert not again.from_cache
    assert contents(again) == good
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "is damaged" in caplog.text
    assert path.read_bytes() == whole
    assert read(*model, "int4", cache).from_cache


def test_a_file_of_another_model_is_refused(model: tuple[Path, Any], cache: PackedCache) -> None:
    read(*model, "int4", cache)
    (path,) = files(cache)
    other = path.with_stem("0" * 40)
    path.rename(other)
    with ThreadPoolExecutor(1) as pool:
        assert cache.read("0" * 40, 1, pool.map) is None
    assert not other.exists()


def test_what_is_no_file_is_not_waited_for(model: tuple[Path, Any], cache: PackedCache) -> None:
    """A pipe under the name of a packed model would wait for whoever writes into it."""
    first = read(*model, cache=cache)
    (path,) = files(cache)
    path.unlink()
    os.mkfifo(path)
    assert cache.entries() == []
    assert cache.unreadable() == [path]
    again = read(*model, cache=cache)
    assert (again.from_cache, contents(again)) == (False, contents(first))
    assert path.is_file()


def test_many_may_read_and_write_at_once(model: tuple[Path, Any], cache: PackedCache) -> None:
    found: list[dict[str, bytes]] = []
    start = threading.Barrier(6)

    def work() -> None:
        start.wait()
        for _ in range(3):
            found.append(contents(read(*model, "int4", cache)))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 18
    assert all(other == found[0] for other in found)
    assert len(files(cache)) == 1


def mapped_files(folder: Path) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if f"{folder}/" in line}


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_engines_share_one_mapped_file(
    model: tuple[Path, Any], tmp_path: Path, quantization: str | None
) -> None:
    alone = read(*model, quantization)
    shared = PackedCache(tmp_path / "cache" / "packed", least_bytes=0, shared=True)
    start, loaded = threading.Barrier(4), []

    def work() -> None:
        start.wait()
        loaded.append(read(*model, quantization, shared))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.from_cache for one in loaded) == [False, True, True, True]  # packed once, for all
    assert all(contents(one) == contents(alone) for one in loaded)
    (path,) = shared.folder.glob("*.packed")
    assert mapped_files(shared.folder) == {str(path)}
    assert not loaded[0].vectors or not any(vector.flags.writeable for vector in loaded[0].vectors.values())


def test_a_damaged_file_is_not_shared(model: tuple[Path, Any], tmp_path: Path) -> None:
    shared = PackedCache(tmp_path / "cache" / "packed", least_bytes=0, shared=True)
    first = contents(read(*model, "int4", shared))
    (path,) = shared.folder.glob("*.packed")
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    path.unlink()
    path.write_bytes(damaged)
    again = read(*model, "int4", shared)
    assert (again.from_cache, contents(again)) == (False, first)


def put(cache: PackedCache, key: str, used: float, size: int = 1000) -> None:
    writer = cache.create(key, size)
    assert writer is not None
    writer.put(np.full(size, len(key), np.uint8), 0)
    writer.finish(key, "int8", map)
    writer.close()
    os.utime(cache.folder / f"{key}.packed", (used, used))


def test_a_turn_that_is_taken_is_not_removed_as_a_file_that_nobody_finished(tmp_path: Path) -> None:
    """Its file is there since the first start. Without it two processes would write the same weights."""
    cache = PackedCache(tmp_path, least_bytes=0, shared=True)
    with cache.turn("key"):
        pass
    [turn] = tmp_path.iterdir()
    os.utime(turn, (0, 0))
    with cache.turn("key"):
        writer = cache.create("key", 100)
        assert writer is not None
        writer.close()
        assert [*tmp_path.iterdir()] == [turn]


def test_the_least_recently_used_makes_room(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path, limit_bytes=4000, least_bytes=0)
    for number, key in enumerate(("a", "b", "c")):
        put(cache, key, 1000.0 + number)
    assert cache.read("a", 1000, map) is not None  # now the most recently used
    put(cache, "d", 2000.0)
    assert [entry.key for entry in cache.entries()] == ["a", "d", "c"]
    assert cache.create("e", 4001) is None  # more than there may ever be: nothing makes room for it
    assert len(cache.entries()) == 3


def test_what_was_never_finished_is_removed_in_time(tmp_path: Path) -> None:
    old, new = tmp_path / ".old.tmp", tmp_path / ".new.tmp"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1.0, 1.0))
    put(PackedCache(tmp_path), "a", 1.0)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [".new.tmp", "a.packed"]


@pytest.mark.parametrize("broken", ["mkdir", "mkstemp", "posix_fallocate", "pwrite", "replace"])
def test_a_disk_that_refuses_costs_a_warning(
    model: tuple[Path, Any],
    cache: PackedCache,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = contents(read(*model, "int8"))

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    owner = {"mkdir": Path, "mkstemp": packed_cache.tempfile}.get(broken, packed_cache.os)
    with monkeypatch.context() as patch:
        patch.setattr(owner, broken, refuse)
        assert contents(read(*model, "int8", cache)) == good
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert not cache.folder.exists() or files(cache) == []


def test_where_the_files_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QUIRE_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert packed_cache.packed_folder() == tmp_path / ".cache" / "quire" / "packed"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert packed_cache.packed_folder() == tmp_path / "xdg" / "quire" / "packed"
    monkeypatch.setenv("QUIRE_CACHE_DIR", "~/own")
    assert packed_cache.packed_folder() == tmp_path / "own" / "packed"


def test_the_command_lists_checks_and_clears(
    model: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    cache = PackedCache(packed_cache.packed_folder(), least_bytes=0)
    assert cache.folder == tmp_path / "cache" / "packed"

    def command(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["cache", *words])
        return (int(ended.value.code or 0), *capsys.readouterr())

    assert command()[:2] == (0, f"0 models, 0 B in {cache.folder}\n")
    read(*model, "int8", cache)
    read(*model, "int4", cache)
    put(cache, "demo", 1.0)
    status, out, _ = command("ls")
    assert status == 0
    assert out.splitlines()[0].split() == ["model", "weights", "size", "last", "used"]
    assert "just now" in out
    assert out.splitlines()[-1].startswith("3 models, ")
    assert command("verify")[:2] == (0, "3 models intact, 0 damaged\n")
    _flip(cache.folder / "demo.packed", 3)
    status, out, err = command("verify")
    assert (status, out) == (1, "2 models intact, 1 damaged\n")
    assert "demo.packed was damaged" in err
    status, out, err = command("clear", "another")
    assert status == 1
    assert "the cache has no entry for 'another'" in err
    monkeypatch.chdir(model[0].parent)
    assert command("clear", model[0].name)[1].startswith("removed 2 models")
    put(cache, "demo", 1.0)
    assert command("clear")[1].startswith("removed 1 model,")
    assert command("list")[0] == command("ls", "more")[0] == 2
