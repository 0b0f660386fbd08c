"""BitNet's weights of -1, 0 and 1: packed, or to be rounded by the reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from written_formats import write

from quire.errors import ConfigError
from quire.program import WeightSpec
from quire.quantize.coded import CodedStorage
from quire.weights.formats.expected import expected_storage
from quire.weights.tensors import Tensors

RNG = np.random.default_rng(0)
OUT, IN = 32, 96
CODES = RNG.integers(-1, 2, (OUT, IN))
AUTO = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
ONLINE = {**AUTO, "quantization_mode": "online"}


def packed(codes: np.ndarray) -> np.ndarray:
    """Four outputs a byte: output j * rows + i in bits 2 j of row i."""
    rows = len(codes) // 4
    found = np.zeros((rows, codes.shape[1]), np.uint8)
    for output, code in enumerate((codes + 1).astype(np.uint8)):
        found[output % rows] |= code << (2 * (output // rows))
    return found


def number(value: float, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
    return np.array([value], dtype)


def dense(tensors: Tensors, name: str = "m.weight") -> np.ndarray:
    weight = tensors.pull(name)
    assert weight.storage == tensors[name].storage
    return np.asarray(weight.dense())


def test_packed_weights_are_codes_times_their_scale(tmp_path: Path) -> None:
    tensors = {"m.weight": packed(CODES), "m.weight_scale": number(1.21875)}
    found = write(tmp_path, AUTO, tensors)
    np.testing.assert_array_equal(dense(found), (CODES * 1.21875).astype(np.float32))
    storage = found["m.weight"].storage
    assert isinstance(storage, CodedStorage)
    assert (storage.bits, storage.group, storage.scales.values) == (2, None, "bf16")


@pytest.mark.parametrize("stated", [{"quant_method": "bitnet"}, {**ONLINE, "linear_class": "bitlinear"}])
def test_the_other_class_divides_by_the_scale(tmp_path: Path, stated: Any) -> None:
    tensors = {"m.weight": packed(CODES), "m.weight_scale": number(0.375)}
    expected = CODES.astype(np.float32) / np.float32(0.375)
    np.testing.assert_array_equal(dense(write(tmp_path, stated, tensors)), expected)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_floats_are_rounded_by_their_mean(tmp_path: Path, dtype: Any) -> None:
    weight = RNG.standard_normal((OUT, IN)).astype(dtype)
    names = ("layers.0.self_attn.q_proj", "layers.0.input_layernorm", "model.embed_tokens", "lm_head")
    tensors = {f"{name}.weight": weight for name in names} | {"layers.0.input_layernorm.weight": weight[0]}
    found = write(tmp_path, ONLINE, tensors)
    scale = np.float32(1) / np.abs(weight.astype(np.float32)).mean()
    codes = np.clip(np.round(weight.astype(np.float32) * scale), -1, 1)
    assert {-1, 0, 1} == set(codes.ravel())
    expected = (codes / scale).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(dense(found, f"{names[0]}.weight"), expected)
    for name in names[1:]:
        np.testing.assert_array_equal(dense(found, f"{name}.weight"), tensors[f"{name}.weight"])


def test_a_matrix_of_zeros_stays_one(tmp_path: Path) -> None:
    found = write(tmp_path, ONLINE, {"m.weight": np.zeros((OUT, IN), np.float32)})
    np.testing.assert_array_equal(dense(found), np.zeros((OUT, IN), np.float32))


def test_modules_that_are_not_rounded(tmp_path: Path) -> None:
    weight = RNG.standard_normal((OUT, IN)).astype(np.float32)
    tensors = {f"{name}.weight": weight for name in ("a.q_proj", "b.q_proj", "b.k_proj", "lm_head")}
    found = write(tmp_path, {**ONLINE, "modules_to_not_convert": ["a", "k_proj"]}, tensors)
    kept = [name for name in tensors if (dense(found, name) == weight).all()]
    assert kept == ["a.q_proj.weight", "b.k_proj.weight"]


def test_config_alone_tells_the_kind_of_matrices() -> None:
    """As `quire inspect` and `quire plan` estimate the size of a model without its weights."""
    expect = expected_storage({"quantization_config": AUTO}, "bf16")
    found = {
        name: str(expect(WeightSpec(f"{name}.weight", (OUT, IN), (f"{name}.weight",), quantizable=True)))
        for name in ("layers.0.q_proj", "lm_head")
    }
    assert found == {
        "layers.0.q_proj": "bitnet (2 bits, a scale for each output, bf16 scales)",
        "lm_head": "bf16",
    }


@pytest.mark.parametrize(
    ("stated", "tensors", "problem"),
    [
        ({"use_rms_norm": True}, {}, "use_rms_norm = True is not supported"),
        ({"linear_class": "other"}, {}, "linear_class = 'other'"),
        ({"quantization_mode": "sometimes"}, {}, "quantization_mode = 'sometimes'"),
        ({}, {"m.weight_scale": np.ones(2, np.float32)}, r"m\.weight_scale.*expected \[1\]"),
        ({}, {"m.weight": np.ones((8, IN), np.float32)}, r"m\.weight.*stored as F32, not as U8"),
        ({}, {"m.weight": np.full((8, IN), 0b11, np.uint8)}, r"m\.weight.*none of -1, 0 and 1"),
        ({}, {"m.weight_scale": np.ones(1, np.int8)}, r"m\.weight_scale.*stored as I8"),
    ],
    ids=str,
)
def test_what_contradicts_itself(tmp_path: Path, stated: Any, tensors: Any, problem: str) -> None:
    held = {"m.weight": packed(CODES), "m.weight_scale": number(1.0)} | tensors
    with pytest.raises(ConfigError, match=problem):
        dense(write(tmp_path, AUTO | stated, held))
