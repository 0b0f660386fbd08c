"""Damaged and hostile GGUF files: each gives one ConfigError, at once and without taking memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import F32, Q8_0, header, pair, text, typed, whole, write
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.models import read_model
from quire.text.tokenizer import find_tokenizer
from quire.weights.gguf import container
from quire.weights.gguf.container import GgufFile
from quire.weights.gguf.model import GgufModel
from quire.weights.hub import open_model
from quire.weights.plan import plan

SIZES = {"general.architecture": "llama", "llama.context_length": 64, "llama.embedding_length": 32}
SIZES |= {"llama.block_count": 1, "llama.feed_forward_length": 32, "llama.attention.head_count": 2}
SIZES |= {"llama.attention.layer_norm_rms_epsilon": 1e-5}
WORDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "</s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 4,
}
PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LIMIT_BYTES = 4 << 20


def small(path: Path, metadata: dict[str, Any] | None = None, **others: tuple[np.ndarray, int]) -> Path:
    """A whole tiny model; None as a value leaves a key out."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((32, 32)).astype(np.float32)
    tensors = {"token_embd.weight": (matrix[:5], F32), "output_norm.weight": (np.ones(32), F32)}
    tensors |= {f"blk.0.{name}.weight": (np.ones(32), F32) for name in ("attn_norm", "ffn_norm")}
    tensors |= {f"blk.0.{name}.weight": (matrix, Q8_0) for name in PARTS}
    tensors |= others
    every = {**SIZES, **WORDS, **(metadata or {})}
    return write(path, {key: value for key, value in every.items() if value is not None}, tensors)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=12).filter(lambda text: text.isprintable()),
            st.sampled_from(["", "\0", "a" * 255, "a" * 256, "é" * 127, "\0" * 7, "a" + "\0" * 9, "€" * 100]),
        ),
        min_size=1,
        max_size=40,
    ),
    st.integers(8, 400),
    st.integers(1, 8),
)
def test_texts_of_any_kind(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], window: int, unusual: int
) -> None:
    """Read together or one by one, wherever what is read together ends."""
    path = small(tmp_path_factory.getbasetemp() / "texts.gguf", {"some.texts": texts, "after.them": 7})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(container, "_WINDOW_BYTES", window)
        patch.setattr(container, "_UNUSUAL_AT_ONCE", unusual)
        found = GgufFile.open(path).metadata
    assert found.values["some.texts"] == texts
    assert found.size("after.them", 0) == 7


def read(path: Path) -> None:
    """Read all of a model except its numbers, as `quire inspect` does."""
    source = open_model(str(path))
    model = read_model(source.config())
    source.generation_config()
    source.chat_templates()
    find_tokenizer(source)
    tensors = source.tensors()
    planned = plan(model.program.weights(), tensors, ignored=model.program.ignored)
    for spec in planned.specs.values():
        for name in spec.sources:
            tensors.pull(name)


def refused(path: Path, data: bytes, words: str = "") -> str:
    """Check that a file is refused, with a message that has these words, and little memory."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert tracemalloc.get_traced_memory()[1] < LIMIT_BYTES
    finally:
        tracemalloc.stop()
    assert words in str(caught.value)
    return str(caught.value)


def test_the_whole_file_is_right(tmp_path: Path) -> None:
    read(small(tmp_path / "m.gguf"))


def test_cut_anywhere(tmp_path: Path) -> None:
    data = small(tmp_path / "m.gguf").read_bytes()
    rng = random.Random(0)
    places = {*range(80), *rng.sample(range(len(data)), 300), len(data) - 1}
    for end in sorted(places):
        message = refused(tmp_path / "cut.gguf", data[:end])
        assert "cut.gguf" in message


LIES: dict[str, tuple[bytes, str]] = {
    "no GGUF": (b"PK\3\4" + bytes(40), "does not begin with GGUF"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
    "version 4": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "GGUF version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors are claimed"),
    "pairs": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "pairs are claimed"),
    "negative": (b"GGUF" + struct.pack("<Iqq", 3, -1, -1), "tensors are claimed"),
    "length of a key": (whole([struct.pack("<Q", (1 << 64) - 1)], []), "ends before a key"),
    "length of a text": (whole([text("k") + struct.pack("<IQ", 8, 1 << 63)], []), "ends before the value"),
    "unknown type": (whole([text("k") + struct.pack("<II", 13, 0)], []), "unknown type 13"),
    "array of arrays": (whole([text("k") + struct.pack("<IIQIQ", 9, 9, 1, 9, 1)], []), "array of arrays"),
    "huge array": (whole([text("k") + struct.pack("<IIQ", 9, 5, 1 << 62)], []), "more than any model"),
    "long array": (whole([text("k") + struct.pack("<IIQ", 9, 5, 1 << 20)], []), "ends before the 1,048,576"),
    "texts": (whole([text("k") + struct.pack("<IIQ", 9, 8, 1 << 20)], []), "ends before the 1,048,576 texts"),
    "a text of an array": (
        whole([text("k") + struct.pack("<IIQQ", 9, 8, 2, 1 << 40) + bytes(64)], []),
        "ends before a text",
    ),
    "no boolean": (whole([text("k") + struct.pack("<IB", 7, 2)], []), "neither true nor false"),
    "a key twice": (whole([pair("k", 1), pair("k", 2)], []), "given twice"),
    "no UTF-8 key": (whole([pair(b"\xff\xfe", 1)], []), "not UTF-8"),
    "no UTF-8 value": (whole([pair("k", typed(b"\xc3("))], []), "not UTF-8"),
    "no UTF-8 text": (whole([pair("k", [b"a", b"\x80"])], []), "not UTF-8"),
    "alignment 0": (whole([pair("general.alignment", 0)], []), "general.alignment"),
    "alignment 24": (whole([pair("general.alignment", 24)], []), "no power of two"),
    "alignment of 4 GB": (whole([pair("general.alignment", (1 << 32) - 1)], []), "general.alignment"),
    "alignment of text": (whole([pair("general.alignment", "32")], []), "general.alignment"),
    "no dimensions": (whole([], [header("t", (), F32, 0)]), "0 dimensions"),
    "nine dimensions": (whole([], [header("t", (1,) * 9, F32, 0)], bytes(64)), "9 dimensions"),
    "dims": (whole([], [header("t", (1 << 40, 1 << 40), F32, 0)], bytes(64)), "more than the file holds"),
    "dims overflow": (whole([], [header("t", (1 << 32, 1 << 32), F32, 0)], bytes(64)), "more than the file"),
    "a dimension of 0": (whole([], [header("t", (32, 0), F32, 0)], bytes(64)), "more than the file holds"),
    "rows of part of a block": (whole([], [header("t", (33, 2), Q8_0, 0)], bytes(999)), "no multiple of 32"),
    "unknown tensor type": (whole([], [header("t", (32,), 4711, 0)], bytes(128)), "the type 4711"),
    "removed tensor type": (whole([], [header("t", (32,), 4, 0)], bytes(128)), "the type 4,"),
    "beyond the end": (whole([], [header("t", (32,), F32, 0)], bytes(96)), "ends at byte"),
    "offset": (whole([], [header("t", (8,), F32, 1 << 62)], bytes(128)), "gap"),
    "unaligned": (whole([], [header("t", (8,), F32, 4)], bytes(128)), "gap"),
    "overlapping": (
        whole([], [header("t", (32,), F32, 0), header("u", (8,), F32, 32)], bytes(256)),
        "overlaps",
    ),
    "the same place": (
        whole([], [header("t", (8,), F32, 0), header("u", (8,), F32, 0)], bytes(256)),
        "overlaps",
    ),
    "a tensor twice": (
        whole([], [header("t", (8,), F32, 0), header("t", (8,), F32, 32)], bytes(256)),
        "listed twice",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie(lie: str, tmp_path: Path) -> None:
    refused(tmp_path / "m.gguf", *LIES[lie])


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": None}, "names no architecture"),
        ({"general.architecture": "lama"}, "did you mean 'llama'?"),
        ({"general.architecture": "clip"}, "the vision tower for images"),
        ({"general.type": "adapter"}, "an adapter"),
        ({"general.architecture": 7}, "is not a text"),
        ({"llama.block_count": None}, "has no 'llama.block_count'"),
        ({"llama.block_count": 1.5}, "is not a size"),
        ({"llama.block_count": 0}, "is not a size"),
        ({"llama.block_count": 2}, "9 tensors missing"),
        ({"llama.block_count": 1 << 30}, "more than 1,024 layers"),
        ({"llama.attention.head_count": 5}, "which do not fit the heads"),
        ({"llama.attention.head_count": [2, 4]}, "differs between layers"),
        ({"llama.attention.key_length": 8}, "q_proj.weight [32, 32]"),
        ({"llama.attention.value_length": 8}, "values have another length"),
        ({"llama.rope.dimension_count": 4}, "rotates 4 of the 16"),
        ({"llama.embedding_length": 64}, "of another shape"),
        ({"llama.rope.scaling.type": "spiral", "llama.rope.scaling.factor": 2.0}, "unknown rope scaling"),
        ({"tokenizer.ggml.model": "rwkv"}, "a tokenizer of the kind 'rwkv'"),
        ({"tokenizer.ggml.pre": "lama-bpe"}, "did you mean 'llama-bpe'?"),
        ({"tokenizer.ggml.tokens": ["a", "a", "b", "c", "d"]}, "two tokens have one text"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "not a list of texts"),
        ({"tokenizer.ggml.tokens": None}, "without tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "5 tokens have 2 types"),
        ({"tokenizer.ggml.merges": ["x y"]}, "the tokenizer of"),
        ({"tokenizer.ggml.eos_token_id": 5}, "there are 5 tokens"),
        ({"tokenizer.ggml.model": "llama"}, "5 tokens have 0 scores"),
        ({"tokenizer.ggml.add_bos_token": 1}, "is not true or false"),
        ({"tokenizer.chat_template": 1}, "is not a text"),
        ({"tokenizer.chat_template": "x" * (1 << 20) + "x"}, "longer than 1 MiB"),
        ({"general.sampling.temp": "hot"}, "is not a number"),
        ({"split.count": 2}, "says that it is part 1 of 2"),
        ({"split.tensors.count": 12}, "have 11 tensors, not 12"),
    ],
)
def test_metadata_that_does_not_fit(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = small(tmp_path / "m.gguf", metadata)
    refused(path, path.read_bytes(), words)


def test_types_that_are_not_supported(tmp_path: Path) -> None:
    data = small(tmp_path / "m.gguf").read_bytes()
    at = data.index(text("output_norm.weight")) + len(text("output_norm.weight")) + 12
    message = refused(tmp_path / "m.gguf", data[:at] + struct.pack("<I", 26) + data[at + 4 :])
    assert "tensor 'output_norm.weight' has the type I32, which is not supported" in message
    assert "take the Q4_K_M file of the same model" in message


def test_split_files(tmp_path: Path) -> None:
    """Any part opens the model; a missing part, or one of another model, is named."""
    rng = np.random.default_rng(0)
    whole_file = GgufFile.open(small(tmp_path / "whole.gguf"))
    names = [*whole_file.tensors]
    parts = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    arrays = {n: (rng.standard_normal(t.shape), F32) for n, t in whole_file.tensors.items()}
    split = {"split.count": 2, "split.tensors.count": len(names)}
    write(parts[0], {**SIZES, **WORDS, **split, "split.no": 0}, {n: arrays[n] for n in names[:4]})
    write(parts[1], {**split, "split.no": 1}, {n: arrays[n] for n in names[4:]})
    for part in parts:
        read(part)
        assert len(GgufModel(part).tensors()) == len(names)
    write(parts[1], {**split, "split.no": 0}, {n: arrays[n] for n in names[4:]})
    with pytest.raises(ConfigError, match="says that it is part 1 of 2, unlike its name"):
        read(parts[0])
    write(parts[1], {**split, "split.no": 1}, {n: arrays[n] for n in names[3:]})
    with pytest.raises(ConfigError, match="is in another part as well"):
        read(parts[0])
    parts[1].unlink()
    with pytest.raises(ConfigError, match=r"m-00002-of-00002\.gguf: no such file"):
        read(parts[0])
    parts[0].rename(tmp_path / "m-00001-of-99999.gguf")
    with pytest.raises(ConfigError, match="says that it is part 1 of 2"):
        read(tmp_path / "m-00001-of-99999.gguf")


def test_folders_of_files(tmp_path: Path) -> None:
    path = small(tmp_path / "m.gguf")
    for other in ("mmproj-F16.gguf", "m.mmproj-F16.gguf", "m.imatrix.gguf"):
        (tmp_path / other).write_bytes(b"GGUF")
    assert open_model(str(tmp_path)).where == str(path)
    small(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=r"2 GGUF models\nhint: give the path of one: m.gguf, other.gguf"):
        open_model(str(tmp_path))


def test_files_with_other_names(tmp_path: Path) -> None:
    """A file is known by its beginning, as those in Ollama's store; a wrong ending is told as such."""
    path = small(tmp_path / "sha256-0123")
    source = open_model(str(path))
    assert isinstance(source, GgufModel)
    assert len(source.tensors()) > 0
    (tmp_path / "m.GGUF").write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(ConfigError, match=r"m\.GGUF: not a GGUF file: it does not begin with GGUF"):
        open_model(str(tmp_path / "m.GGUF")).config()


@settings(max_examples=200)
@given(data=st.data())
def test_random_bytes_changed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A change of the headers anywhere is refused in words, or changes nothing that is checked."""
    folder = tmp_path_factory.getbasetemp()
    path = folder / "changed.gguf"
    whole_file = bytearray(small(path).read_bytes())
    head = GgufFile.open(path).header_bytes
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, head - 1))
        whole_file[at] = data.draw(st.integers(0, 255))
    path.write_bytes(whole_file)
    try:
        read(path)
    except ConfigError as error:
        message = str(error)
        assert any(words in message for words in ("changed.gguf", "config.json", "rope"))
