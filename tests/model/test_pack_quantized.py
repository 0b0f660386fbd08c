"""Quantized matrices as compressed-tensors stores them: the layout, and what reads it back."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from quire.quantize.grid import Grid, Rounded
from quire.weights.folder import ModelFolder
from quire.weights.pack_quantized import entries_of, pack, quantization_config, tensors_of
from quire.weights.safetensors_writer import SafetensorsWriter, data_bytes

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


def test_the_layout_of_four_and_eight_bits() -> None:
    """Code + 8 of input k is at bits 4k of a row's words; code + 128 at bits 8k."""
    codes = np.array([[-8, -7, 0, 7, 1, -1, 2, -2, 3]], np.int8)
    words = pack(codes, 4).view(np.uint32)
    assert [f"{word:08x}" for word in words[0]] == ["6a79f810", "0000000b"]
    assert [f"{word:08x}" for word in pack(codes, 8).view(np.uint32)[0]] == [
        "87807978",
        "7e827f81",
        "00000083",
    ]


def rounded(seed: int, rows: int, width: int, grid: Grid) -> Rounded:
    rng = np.random.default_rng(seed)
    codes = rng.integers(grid.low, grid.high, (rows, width), np.int8, endpoint=True)
    return Rounded(
        grid, codes, grid.scales(rng.standard_normal((rows, width // grid.group)).astype(np.float32))
    )


def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    """Through the reader of checkpoints, for groups of all kinds; odd widths leave bits unused."""
    made = {
        "a": rounded(0, 6, 64, Grid(4, 32, BF16)),
        "b": rounded(1, 5, 86, Grid(4, 43, F16)),
        "c": rounded(2, 4, 128, Grid(8, 128, BF16)),
        "d": rounded(3, 3, 30, Grid(4, 30, F16)),
    }
    entries = {
        n: e for module, r in made.items() for n, e in entries_of(module, r.codes.shape, r.grid).items()
    }
    entries["plain.weight"] = ("F32", (3,))
    file = SafetensorsWriter(tmp_path / "model.safetensors", entries, {"format": "pt"})
    for module in reversed(made):
        for name, array in tensors_of(module, made[module]).items():
            file.write(name, array)
    file.write("plain.weight", np.arange(3, dtype=np.float32))
    file.close()
    size = (tmp_path / "model.safetensors").stat().st_size
    assert data_bytes(entries) < size < data_bytes(entries) + 4000
    settings = quantization_config({m: (r.grid, r.codes.shape[1]) for m, r in made.items()}, ["plain"])
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    tensors = ModelFolder.at(tmp_path).tensors()
    for module, expected in made.items():
        weight = tensors.pull(f"{module}.weight")
        assert np.array_equal(weight.dense(), expected.dense()), module
        assert weight.nbytes == expected.grid.nbytes(*expected.codes.shape)
    with safe_open(tmp_path / "model.safetensors", framework="np") as opened:  # the format's own reader
        assert opened.metadata() == {"format": "pt"}
        assert opened.get_tensor("d.weight_shape").tolist() == [3, 30]
        assert opened.get_tensor("plain.weight").tolist() == [0, 1, 2]


def test_settings_of_one_scheme_and_of_several() -> None:
    four, eight = Grid(4, 32, BF16), Grid(8, 128, BF16)
    one = quantization_config({"a": (four, 64), "b": (four, 128)}, ["lm_head"])
    assert one["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert one["ignore"] == ["lm_head"]
    several = quantization_config({"a": (four, 64), "b": (eight, 128), "c": (four, 64)}, [])
    groups = several["config_groups"].values()
    found = [(g["targets"], g["weights"]["num_bits"], g["weights"]["strategy"]) for g in groups]
    assert found == [(["a", "c"], 4, "group"), (["b"], 8, "channel")]
    assert {g["weights"]["group_size"] for g in groups} == {32, None}


def test_a_file_is_written_once_and_whole(tmp_path: Path) -> None:
    file = SafetensorsWriter(tmp_path / "x", {"a": ("F16", (2,)), "b": ("F32", (1,))}, {})
    file.write("a", np.zeros(2, np.float16))
    with pytest.raises(ValueError, match="announced"):
        file.write("b", np.zeros(1, np.float16))
    with pytest.raises(KeyError):
        file.write("a", np.zeros(2, np.float16))
    with pytest.raises(ValueError, match="not written: b"):
        file.close()
    with pytest.raises(FileExistsError):
        SafetensorsWriter(tmp_path / "x", {}, {})
