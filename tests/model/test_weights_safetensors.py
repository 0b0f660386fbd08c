"""Reading checkpoints: what is good is read bit for bit, all else is one clear error."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from quire.errors import ConfigError
from quire.program.program import MAX_TENSORS
from quire.weights.folder import ModelFolder
from quire.weights.safetensors import INDEX_NAME, Checkpoint

DATA = bytes(range(64))


def info(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw_file(path: Path, header: object, data: bytes = DATA, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


GOOD = {"a": info([4], 0, 16), "b": info([2, 6], 16, 64)}

# label -> (header, bytes of data, claimed length of the header, what the error says)
BROKEN: dict[str, tuple[object, bytes, int | None, str]] = {
    "header length 0": (GOOD, DATA, 0, "header: not valid JSON"),
    "header length 2^63": (GOOD, DATA, 1 << 63, "header of 9,223,372,036,854,775,808 bytes"),
    "header length 2^64 - 1": (GOOD, DATA, (1 << 64) - 1, "header of"),
    "header one byte short": (GOOD, DATA, len(json.dumps(GOOD)) - 1, "not valid JSON"),
    "header one byte long": (GOOD, DATA, len(json.dumps(GOOD)) + 1, "not valid JSON"),
    "no JSON": (b"PK\x03\x04\xff\xff", DATA, None, "not valid JSON"),
    "a list": (b"[]", DATA, None, "expected a JSON object"),
    "nested deep": (b'{"a":' * 50_000, DATA, None, "not valid JSON"),
    "a number of many digits": (b'{"a":' + b"9" * 5000 + b"}", DATA, None, "not valid JSON"),
    "duplicate key": (
        b'{"a":{"dtype":"F32","shape":[16],"data_offsets":[0,64]},'
        b'"a":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}',
        DATA,
        None,
        "'a' is given twice",
    ),
    "entry no object": ({"a": 7}, DATA, None, "tensor 'a' has an unknown number format"),
    "no dtype": ({"a": {"shape": [16], "data_offsets": [0, 64]}}, DATA, None, "tensor 'a' has an unknown"),
    "unknown dtype": ({"a": info([16], 0, 64, "F33")}, DATA, None, "tensor 'a' .*'F33'"),
    "dtype a list": ({"a": info([16], 0, 64, ["F32"])}, DATA, None, "tensor 'a' has an unknown"),
    "dtype mismatch": (
        {"a": info([16], 0, 64, "BF16")},
        DATA,
        None,
        r"'a' claims BF16 \[16\] but has 64 bytes",
    ),
    "shape product overflow": ({"a": info([1 << 32, 1 << 32], 0, 64)}, DATA, None, "tensor 'a' claims"),
    "dimension 2^63": ({"a": info([1 << 63, 0], 0, 0)}, b"", None, "tensor 'a' has an impossible shape"),
    "negative dimensions": ({"a": info([-4, -4], 0, 64)}, DATA, None, "tensor 'a' has an impossible shape"),
    "dimension true": ({"a": info([True, 16], 0, 64)}, DATA, None, "tensor 'a' has an impossible shape"),
    "dimension 16.0": ({"a": info([16.0], 0, 64)}, DATA, None, "tensor 'a' has an impossible shape"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 64]}}, DATA, None, "impossible shape"),
    "nine dimensions": ({"a": info([1] * 8 + [16], 0, 64)}, DATA, None, "impossible shape"),
    "offsets reversed": ({"a": info([16], 64, 0)}, DATA, None, "tensor 'a' has impossible data offsets"),
    "offsets negative": ({"a": info([16], -64, 0)}, DATA, None, "tensor 'a' has impossible data offsets"),
    "one offset": ({"a": info([16], 0, 64) | {"data_offsets": [64]}}, DATA, None, "impossible data offsets"),
    "overlap": ({"a": info([16], 0, 64), "b": info([4], 32, 48)}, DATA, None, "tensor 'b' overlaps"),
    "same place twice": ({"a": info([16], 0, 64), "b": info([16], 0, 64)}, DATA, None, "'b' overlaps"),
    "gap": ({"a": info([4], 0, 16), "b": info([4], 48, 64)}, DATA, None, "tensor 'b' follows a gap"),
    "gap at the start": ({"a": info([4], 48, 64)}, DATA, None, "tensor 'a' follows a gap"),
    "beyond the end": ({"a": info([32], 0, 128)}, DATA, None, "tensor 'a' ends at byte"),
    "far beyond the end": ({"a": info([1 << 40], 0, 1 << 42)}, DATA, None, "tensor 'a' ends at byte"),
    "bytes left over": (GOOD, DATA + b"x", None, "1 bytes after the last tensor"),
    "data and no tensors": ({}, DATA, None, "64 bytes after the last tensor"),
}


EMPTY = b'"%d":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}'
# What is made for reading it to take long, or for an error to be long or to steer a terminal.
HOSTILE: dict[str, tuple[object, bytes, int | None, str]] = {
    "more tensors than any model": (
        b"{%s}" % b",".join(EMPTY % number for number in range(MAX_TENSORS + 1)),
        b"",
        None,
        "131,073 tensors are more than any model has",
    ),
    "600,000 tensors": (
        b"{%s}" % b",".join(EMPTY % number for number in range(600_000)),
        b"",
        None,
        "header: too many values",
    ),
    "lists": (b'{"a":[%s[]]}' % (b"[]," * 2_000_000), DATA, None, "too many values"),
    "digits": ({"a": info([16], 10**4000, 10**4000 + 64)}, DATA, None, "impossible data offsets"),
    "long name": ({"a" * 10**6: info([16], 0, 63)}, DATA, None, "tensor 'aaa.* but has 63 bytes"),
    "long dtype": ({"a": info([16], 0, 64, "F" * 10**6)}, DATA, None, "unknown number format: 'FFF"),
    "steering name": ({"\x1b[2J\n": info([16], 0, 63)}, DATA, None, r"tensor '\\x1b\[2J\\n' claims"),
    "steering name twice": (b'{"\\u001b":1,"\\u001b":2}', b"", None, r"'\\x1b' is given twice"),
}


@pytest.mark.parametrize("label", [*BROKEN, *HOSTILE])
def test_broken_headers_are_one_clear_error(tmp_path: Path, label: str) -> None:
    header, data, length, message = {**BROKEN, **HOSTILE}[label]
    path = raw_file(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(ConfigError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert caught.value.message.startswith(str(path))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < len(str(path)) + 250


def test_truncation_anywhere_is_noticed_at_open(tmp_path: Path) -> None:
    whole = raw_file(tmp_path / "whole.safetensors", GOOD).read_bytes()
    path = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        part = "too few" if size < 8 else "header of" if size < len(whole) - len(DATA) else "tensor"
        with pytest.raises(ConfigError, match=rf"cut\.safetensors: .*{part}"):
            Checkpoint.open(path)
    path.write_bytes(whole)
    assert list(Checkpoint.open(path)) == ["a", "b"]


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_byte_is_an_error_or_a_file_the_library_reads_too(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = raw_file(tmp_path / "flip.safetensors", GOOD)
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 65))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        ours = Checkpoint.open(path)
    except ConfigError:
        return
    with safe_open(path, framework="np") as theirs:  # raises if it refuses what we took
        assert set(ours) == set(theirs.keys())
        for name, entry in ours.items():
            assert list(entry.shape) == theirs.get_slice(name).get_shape()
            assert entry.dtype == theirs.get_slice(name).get_dtype()


def test_what_the_library_refuses_is_refused(tmp_path: Path) -> None:
    for header, data, length, _ in BROKEN.values():
        path = raw_file(tmp_path / "model.safetensors", header, data, length)
        try:
            with safe_open(path, framework="np"):
                taken = True
        except SafetensorError:
            taken = False
        if not taken:
            with pytest.raises(ConfigError):
                Checkpoint.open(path)


ARRAYS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(
        st.lists(st.integers(0, 5), max_size=4).map(tuple),
        st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    ),
    max_size=6,
)


@given(ARRAYS, st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_the_library_writes_is_read_bit_for_bit(
    tmp_path: Path, wanted: dict[str, tuple[tuple[int, ...], Any]], metadata: bool
) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, (shape, dtype) in wanted.items()}
    path = tmp_path / "any.safetensors"
    save_file(arrays, path, metadata={"format": "np"} if metadata else None)
    checkpoint = Checkpoint.open(path)
    assert set(checkpoint) == set(arrays)
    for name, array in arrays.items():
        read = checkpoint.read(name)
        assert read.dtype == array.dtype
        assert read.shape == array.shape
        assert read.tobytes() == array.tobytes()
        assert read.flags.aligned


def test_data_is_a_read_only_view_of_the_mapped_file(tmp_path: Path) -> None:
    save_file({"a": np.arange(8, dtype=np.float32)}, tmp_path / "model.safetensors")
    array = Checkpoint.open(tmp_path).read("a")
    assert not array.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_unaligned_data_is_read_aligned(tmp_path: Path) -> None:
    header = json.dumps({"a": info([16], 0, 64)}).encode()
    raw_file(tmp_path / "model.safetensors", header + b" " * (-len(header) % 4 + 1))
    array = Checkpoint.open(tmp_path).read("a")
    assert array.flags.aligned
    assert array.tobytes() == DATA


def test_a_file_shortened_after_opening_is_noticed(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "model.safetensors", GOOD)
    checkpoint = Checkpoint.open(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="shorter"):
        checkpoint.read("a")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "I64", "F64", "U8"])
def test_number_formats_that_are_not_read_harm_only_those_who_ask(tmp_path: Path, dtype: str) -> None:
    size = {"F64": 8, "I64": 8}.get(dtype, 1)
    header = {"a": info([8], 0, 8 * size, dtype), "b": info([2], 8 * size, 8 * size + 8)}
    raw_file(tmp_path / "model.safetensors", header, bytes(8 * size + 8))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read("b").tolist() == [0, 0]
    with pytest.raises(ConfigError, match=rf"model\.safetensors: tensor 'a' is stored as {dtype}"):
        checkpoint.read("a")


def shards(folder: Path, weight_map: object = None) -> Path:
    """Two shards {a} and {b} with their index."""
    save_file({"a": np.ones(4, np.float32)}, folder / "model-1.safetensors")
    save_file({"b": np.ones(2, np.float32)}, folder / "model-2.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"} if weight_map is None else weight_map
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": names}))
    return folder


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(shards(tmp_path))
    assert {name: e.file.name for name, e in checkpoint.items()} == {
        "a": "model-1.safetensors",
        "b": "model-2.safetensors",
    }
    assert checkpoint.read("b").tolist() == [1, 1]


@pytest.mark.parametrize(
    "name",
    [
        "../model-1.safetensors",
        "/etc/model-1.safetensors",
        "sub/model-1.safetensors",
        "..\\model-1.safetensors",
        "C:model-1.safetensors",
        "model-1.safetensors\0",
        "\0.safetensors",
        "..",
        "",
        "pytorch_model.bin",
        7,
        None,
        ["model-1.safetensors"],
    ],
)
def test_an_index_stays_in_its_folder(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    shards(tmp_path)  # what a path upwards would find
    shards(folder, {"a": name, "b": "model-2.safetensors"})
    with pytest.raises(ConfigError, match=r"index\.json: tensor 'a' is placed in"):
        Checkpoint.open(folder)


def test_links_out_of_the_folder_are_followed(tmp_path: Path) -> None:
    """The hub's cache keeps its files elsewhere and links to them."""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots"
    snapshot.mkdir()
    for file in list(shards(tmp_path / "blobs").iterdir()):
        (snapshot / file.name).symlink_to(Path("../blobs") / file.name)
    assert sorted(Checkpoint.open(snapshot)) == ["a", "b"]


BROKEN_INDEXES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (lambda f: (f / "model-2.safetensors").unlink(), r"model-2\.safetensors: no such file"),
    "shard cut": (
        lambda f: (f / "model-2.safetensors").write_bytes((f / "model-2.safetensors").read_bytes()[:-1]),
        r"model-2\.safetensors: tensor 'b' ends at byte",
    ),
    "shard a folder": (
        lambda f: ((f / "model-2.safetensors").unlink(), (f / "model-2.safetensors").mkdir()),
        r"model-2\.safetensors: cannot be read",
    ),
    "tensor absent": (
        lambda f: save_file({"c": np.ones(1, np.float32)}, f / "model-2.safetensors"),
        r"model-2\.safetensors: tensor 'b' is not in it",
    ),
    "tensor in the other shard": (
        lambda f: shards(f, {"a": "model-2.safetensors", "b": "model-1.safetensors"}),
        r"model-2\.safetensors: tensor 'a' is not in it",
    ),
    "tensor in both shards": (
        lambda f: save_file(
            {"a": np.ones(4, np.float32), "b": np.ones(2, np.float32)}, f / "model-2.safetensors"
        ),
        r"model-2\.safetensors: tensor 'a' is also in model-1",
    ),
    "not JSON": (lambda f: (f / INDEX_NAME).write_text("{"), r"index\.json: not valid JSON"),
    "not UTF-8": (lambda f: (f / INDEX_NAME).write_bytes(b'{"\xff": 1}'), r"index\.json: not valid JSON"),
    "a list": (lambda f: (f / INDEX_NAME).write_text("[1]"), r"index\.json: expected a JSON object"),
    "no weight_map": (lambda f: (f / INDEX_NAME).write_text("{}"), r"index\.json: has no 'weight_map'"),
    "weight_map a list": (lambda f: shards(f, ["a"]), r"index\.json: has no 'weight_map'"),
    "duplicate tensor": (
        lambda f: (f / INDEX_NAME).write_text('{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}'),
        r"index\.json: 'a' is given twice",
    ),
}


@pytest.mark.parametrize("label", BROKEN_INDEXES)
def test_broken_indexes_are_one_clear_error(tmp_path: Path, label: str) -> None:
    harm, message = BROKEN_INDEXES[label]
    harm(shards(tmp_path))
    with pytest.raises(ConfigError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert "\n" not in caught.value.message


def test_tensors_of_a_shard_that_the_index_forgets_are_seen(tmp_path: Path) -> None:
    shards(tmp_path, {"a": "model-1.safetensors"})
    save_file({"a": np.ones(4, np.float32), "z": np.ones(1, np.float32)}, tmp_path / "model-1.safetensors")
    assert sorted(Checkpoint.open(tmp_path)) == ["a", "z"]


def test_which_file_of_a_folder(tmp_path: Path) -> None:
    save_file({"only": np.ones(1, np.float32)}, tmp_path / "weights.safetensors")
    assert list(Checkpoint.open(tmp_path)) == ["only"]
    save_file({"other": np.ones(1, np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"2 safetensors files") as caught:
        Checkpoint.open(tmp_path)
    assert "one file" in str(caught.value)
    assert list(Checkpoint.open(tmp_path / "other.safetensors")) == ["other"]
    save_file({"single": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    assert list(Checkpoint.open(tmp_path)) == ["single"]
    shards(tmp_path)
    assert list(Checkpoint.open(tmp_path)) == ["single"]
    (tmp_path / "model.safetensors").unlink()
    assert sorted(Checkpoint.open(tmp_path)) == ["a", "b"]
    with pytest.raises(ConfigError, match="absent"):
        Checkpoint.open(tmp_path / "absent.safetensors")


class Canary:
    """Unpickling this writes a file: what a malicious checkpoint would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "sung")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "weights.pkl"])
def test_pickles_are_refused_and_never_opened(tmp_path: Path, name: str) -> None:
    import pickle

    canary = tmp_path / "canary"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    auto_map = {"AutoConfig": "configuration_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    config = {"model_type": "evil", "auto_map": auto_map, "custom_pipelines": {"x": {"impl": "pipe.Evil"}}}
    (folder / "config.json").write_text(json.dumps(config))
    for code in ("configuration_evil.py", "modeling_evil.py", "pipe.py", "__init__.py"):
        (folder / code).write_text(f"open({str(canary)!r}, 'w').write('sung')\n")
    model = ModelFolder.at(folder)
    assert model.config()["auto_map"] == auto_map
    for path in (folder, folder / name):
        with pytest.raises(ConfigError, match=r"safetensors") as caught:
            Checkpoint.open(path)
        assert name in str(caught.value)
        assert "never read" in str(caught.value)
        assert "save_pretrained" in str(caught.value)
    assert not canary.exists()
    # The trap itself works: the test would notice.
    pickle.loads((folder / name).read_bytes())
    assert canary.exists()


def test_what_was_given_back_can_be_read_again(tmp_path: Path) -> None:
    arrays = {"a": np.arange(5000, dtype=np.float32), "none": np.zeros((0, 3), np.float32)}
    arrays["b"] = arrays["a"] + 1
    save_file(arrays, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    views = {name: checkpoint.read(name) for name in arrays}
    for name in arrays:
        checkpoint.prefetch(name)
        checkpoint.release(name)
        np.testing.assert_array_equal(views[name], arrays[name])


def test_a_pickle_beside_safetensors_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80never")
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    assert list(Checkpoint.open(tmp_path)) == ["a"]


def test_a_pickle_named_safetensors_is_an_error(tmp_path: Path) -> None:
    import pickle

    canary = tmp_path / "canary"
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(ConfigError, match=r"model\.safetensors: header of"):
        Checkpoint.open(tmp_path)
    assert not canary.exists()


def test_empty_and_other_folders_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no safetensors weights") as caught:
        Checkpoint.open(tmp_path)
    assert "expected model.safetensors" in str(caught.value)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="no safetensors weights") as caught:
        Checkpoint.open(tmp_path)
    assert "x.gguf" in str(caught.value)
