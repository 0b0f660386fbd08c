"""Readers of integers: files that no folder of shared/data has, and files that contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from written_formats import by_input, gptq, padded, stream, write

from quire.errors import ConfigError
from quire.quantize.coded import CodedStorage
from quire.weights.folder import ModelFolder
from quire.weights.tensors import Tensors

RNG = np.random.default_rng(0)
OUT, IN = 32, 96


def drawn(bits: int, group: int, width: int = IN) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers [out, in], zero points and scales [out, groups] (exact in bfloat16)."""
    groups = -(-width // group)
    scales = RNG.integers(1, 100, (OUT, groups)) / np.float32(64)
    return (
        RNG.integers(0, 1 << bits, (OUT, width)),
        RNG.integers(0, 1 << bits, (OUT, groups)),
        scales.astype(np.float32),
    )


def meaning(q: np.ndarray, zeros: Any, scales: np.ndarray, group: int) -> np.ndarray:
    wide = [by_input(np.broadcast_to(a, scales.shape), group, q.shape[1]) for a in (zeros, scales)]
    return np.asarray(wide[1] * (q - wide[0]).astype(np.float32), np.float32)


def value(tensors: Tensors, name: str = "m.weight") -> np.ndarray:
    weight = tensors.pull(name)
    assert weight.storage == tensors[name].storage
    assert list(tensors) == [name]
    return np.asarray(weight.dense())


def storage_of(tensors: Tensors) -> CodedStorage:
    found = tensors["m.weight"].storage
    assert isinstance(found, CodedStorage)
    return found


# GPTQ


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 40, -1])
def test_gptq_of_every_width(tmp_path: Path, bits: int, group: int) -> None:
    size = IN if group < 0 else group
    q, zeros, scales = drawn(bits, size)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False}
    for version, less in (("gptq", 1), ("gptq_v2", 0)):
        tensors = gptq(q, zeros, scales, bits, less)
        found = write(tmp_path, {**config, "checkpoint_format": version}, tensors)
        np.testing.assert_array_equal(value(found), meaning(q, zeros, scales, size))


@pytest.mark.parametrize("less", [0, 1])
def test_symmetric_gptq_does_not_depend_on_the_version_named(tmp_path: Path, less: int) -> None:
    q, _, scales = drawn(4, 32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    middle = np.full(scales.shape, 8)
    found = write(tmp_path, config, gptq(q, middle, scales, 4, less))
    np.testing.assert_array_equal(value(found), meaning(q, 8, scales, 32))
    assert storage_of(found).table == "offset"
    varied = gptq(q, np.arange(middle.size).reshape(middle.shape) % 16, scales, 4, less)
    with pytest.raises(ConfigError, match="sym is true"):
        write(tmp_path, config, varied).pull("m.weight")


def test_gptq_with_inputs_in_another_order(tmp_path: Path) -> None:
    q, zeros, scales = drawn(4, 32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    tensors = gptq(q, zeros, scales, 4)
    found = write(tmp_path, config, tensors | {"m.g_idx": (np.arange(IN) // 32).astype(np.int32)})
    assert not storage_of(found).ordered  # stated, and not so
    index = RNG.permutation(np.arange(IN) // 32).astype(np.int32)
    found = write(tmp_path, config, tensors | {"m.g_idx": index})
    assert storage_of(found).ordered
    expected = scales[:, index] * (q - zeros[:, index]).astype(np.float32)
    np.testing.assert_array_equal(value(found), expected)
    for damaged in (np.zeros(IN, np.int32), np.full(IN, 7, np.int32), -index):
        with pytest.raises(ConfigError, match=r"m\.g_idx.*does not give each group 32 inputs"):
            write(tmp_path, config, tensors | {"m.g_idx": damaged.astype(np.int32)})
    with pytest.raises(ConfigError, match=r"m\.g_idx' is missing, though desc_act"):
        write(tmp_path, config, tensors)
    whole = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False, "desc_act": True}
    write(tmp_path, whole, gptq(*drawn(4, IN), bits=4))  # one group has no order


def test_settings_of_single_modules(tmp_path: Path) -> None:
    q, zeros, scales = drawn(8, 32)
    rules: dict[str, Any] = {"dynamic": {"+:.*other": {"bits": 2}, r"m$": {"bits": 8, "group_size": 32}}}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
    found = write(tmp_path, config | rules, gptq(q, zeros, scales, 8))
    np.testing.assert_array_equal(value(found), meaning(q, zeros, scales, 32))
    with pytest.raises(ConfigError, match="leaves its module out"):
        write(tmp_path, config | {"dynamic": {"-:m": {}}}, gptq(q, zeros, scales, 8))
    auto = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    changes = {"extra_config": {"m": {"bits": 8, "group_size": 32}}}
    found = write(tmp_path, config | auto | changes, gptq(q, zeros, scales, 8))
    np.testing.assert_array_equal(value(found), meaning(q, zeros, scales, 32))


def test_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    q, zeros, scales = drawn(4, 32)
    tensors = gptq(q, zeros, scales, 4)
    with pytest.raises(ConfigError, match=r"config\.json has no quantization_config") as caught:
        write(tmp_path, None, tensors)
    assert "fetch all JSON files" in (caught.value.hint or "")
    settings = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    np.testing.assert_array_equal(value(ModelFolder.at(tmp_path).tensors()), meaning(q, zeros, scales, 32))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"bits": 5}, r"bits = 5 is not supported"),
        ({"bits": 8}, r"m\.qweight.* has shape \[12, 32\]|m\.(scales|qzeros).*expected"),
        ({"group_size": 64}, r"m\.scales.*has shape \[3, 32\], expected \[2, 32\]"),
        ({"group_size": 0}, r"group_size = 0"),
        ({"sym": "yes"}, r"sym = 'yes'"),
        ({"checkpoint_format": "marlin"}, r"checkpoint_format = 'marlin'"),
        ({"quant_method": "awq"}, r"m\.qweight.* has 12 inputs, which are no groups of 32"),
        ({"quant_method": "bitsandbytes"}, "but no tensor is"),
        ({"quant_method": "exl3"}, r"quantized \(exl3\), which is not supported"),
        ({"quant_method": None, "bits": None}, "names no quant_method"),
    ],
)
def test_what_contradicts_itself_is_one_error(tmp_path: Path, changes: Any, problem: str) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    tensors = gptq(*drawn(4, 32), bits=4)
    write(tmp_path, config, tensors)
    with pytest.raises(ConfigError, match=problem):
        write(tmp_path, config | changes, tensors)


@pytest.mark.parametrize("width", [96, 33])
def test_awq_of_any_width(tmp_path: Path, width: int) -> None:
    group = width // 3
    q, zeros, scales = drawn(4, group, width)

    def laid(values: np.ndarray) -> np.ndarray:  # [n, out]: eight outputs in a word
        turned = values.reshape(len(values), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return stream(turned.reshape(len(values), -1), 4)

    tensors = {"m.qweight": laid(q.T), "m.qzeros": laid(zeros.T), "m.scales": scales.T.astype(np.float16)}
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": group, "version": "GEMM"}
    np.testing.assert_array_equal(value(write(tmp_path, config, tensors)), meaning(q, zeros, scales, group))


def test_awq_layouts_of_other_kernels_are_refused(tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}
    with pytest.raises(ConfigError, match="'gemv' is not supported") as caught:
        write(tmp_path, config, gptq(*drawn(4, 32), bits=4))
    assert "unquantized" in (caught.value.hint or "")


# compressed-tensors


def packed(bits: int, group: int, older: bool = False, width: int = IN) -> tuple[Any, dict[str, np.ndarray]]:
    """Integers, zero points and scales, and the tensors of module "m" that have them."""
    q, zeros, scales = drawn(bits, group, width)
    pack = padded if older else stream
    return (q, zeros, scales), {
        "m.weight_packed": pack(q, bits),
        "m.weight_zero_point": np.ascontiguousarray(pack(np.ascontiguousarray(zeros.T), bits).T),
        "m.weight_scale": scales.astype(ml_dtypes.bfloat16),
        "m.weight_shape": np.array([OUT, width]),
    }


def scheme(bits: int, group: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "group_size": group, "symmetric": symmetric, **more}
    groups = {"a": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("older", [False, True])
def test_packed_integers_of_every_width(tmp_path: Path, bits: int, older: bool) -> None:
    """Also as older releases packed them; 96 values are told apart by their number of words."""
    (q, zeros, scales), tensors = packed(bits, 48, older)
    found = write(tmp_path, scheme(bits, 48, False), tensors)
    np.testing.assert_array_equal(value(found), meaning(q, zeros, scales, 48))
    del tensors["m.weight_zero_point"]
    found = write(tmp_path, scheme(bits, 48, True), tensors)
    np.testing.assert_array_equal(value(found), meaning(q, 1 << (bits - 1), scales, 48))


def test_groups_of_modules_by_name_pattern_and_class(tmp_path: Path) -> None:
    (q, _, scales), tensors = packed(4, 32)
    del tensors["m.weight_zero_point"]
    groups = {
        "0": {"targets": ["Linear"], "weights": {"num_bits": 8, "group_size": 32}},
        "1": {"targets": [r"re:.*(m|n)$"], "weights": {"num_bits": 4, "group_size": 32}},
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    np.testing.assert_array_equal(value(write(tmp_path, config, tensors)), meaning(q, 8, scales, 32))
    groups["1"]["targets"] = ["m"]
    np.testing.assert_array_equal(value(write(tmp_path, config, tensors)), meaning(q, 8, scales, 32))
    groups["1"]["targets"] = ["re:other"]
    with pytest.raises(ConfigError, match="words a row, not those of 96 integers of 8 bits"):
        write(tmp_path, config, tensors)
    groups["0"]["targets"] = ["re:(a+)+"]
    with pytest.raises(ConfigError, match="too complex"):
        write(tmp_path, config, tensors)
    del groups["0"]
    with pytest.raises(ConfigError, match="no group of quantization_config targets its module"):
        write(tmp_path, config, tensors)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config rotates"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ({"format": "marlin-24"}, "'marlin-24' is not supported"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": None}}}, "weights is missing"),
    ],
)
def test_what_would_change_weights_is_refused(tmp_path: Path, changes: Any, problem: str) -> None:
    _, tensors = packed(4, 32)
    with pytest.raises(ConfigError, match=problem):
        write(tmp_path, scheme(4, 32, False) | changes, tensors)


def test_integers_in_bytes(tmp_path: Path) -> None:
    """Symmetric with rounded activations, and with zero points, where activations are not."""
    q, zeros, scales = drawn(8, IN)
    config = scheme(8, -1, True, strategy="channel") | {"format": "int-quantized"}
    group = config["config_groups"]["a"]
    group["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": False}
    tensors = {
        "m.weight": (q - 128).astype(np.int8),
        "m.weight_scale": scales,
        "m.input_scale": np.ones(1, np.float32),
    }
    found = write(tmp_path, config, tensors)
    np.testing.assert_array_equal(value(found), meaning(q, 128, scales, IN))
    assert storage_of(found).by_row
    assert found.notes == ("static scales of activations are not used: each row gets scales of its own",)
    group["weights"]["symmetric"] = False
    with pytest.raises(ConfigError, match="weight_zero_point' is missing"):
        write(tmp_path, config, tensors)
    tensors["m.weight_zero_point"] = (zeros - 128).astype(np.int8)
    found = write(tmp_path, config, tensors)
    np.testing.assert_array_equal(value(found), meaning(q, zeros, scales, IN))
    assert not storage_of(found).by_row
    one = tensors | {"m.weight_scale": scales[:1, :1], "m.weight_zero_point": np.zeros((1, 1), np.int8)}
    with pytest.raises(ConfigError, match=r"m\.weight_scale' has shape \[1, 1\], expected \[32, 1\]"):
        write(tmp_path, config, one)
    group["weights"]["strategy"] = "tensor"
    np.testing.assert_array_equal(value(write(tmp_path, config, one)), meaning(q, 128, scales[:1, :1], IN))
    with pytest.raises(ConfigError, match=r"m\.weight_zero_point' has shape \[1\]"):
        write(tmp_path, config, tensors | {"m.weight_zero_point": np.zeros(1, np.int8)})


# MLX


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_of_every_width(tmp_path: Path, bits: int) -> None:
    q, zeros, scales = drawn(bits, 32)
    biases = zeros.astype(np.float32)
    stacked = {
        "m.switch_mlp.up.weight": np.stack([stream(q, bits, np.uint32)] * 2),
        "m.switch_mlp.up.scales": np.stack([scales, scales + 1]).astype(np.float16),
        "m.switch_mlp.up.biases": np.stack([biases] * 2).astype(np.float16),
    }
    config = {"group_size": 64, "bits": 4, "m.switch_mlp.up": {"group_size": 32, "bits": bits}}
    found = write(tmp_path, None, stacked, quantization=config)
    assert set(found) == {"m.experts.0.up.weight", "m.experts.1.up.weight"}
    for expert in range(2):
        expected = by_input(scales + expert, 32, IN) * q.astype(np.float32) + by_input(biases, 32, IN)
        weight = found.pull(f"m.experts.{expert}.up.weight")
        np.testing.assert_array_equal(weight.dense(), expected)
    with pytest.raises(ConfigError, match="leaves its module out"):
        write(tmp_path, None, stacked, quantization=config | {"m.switch_mlp.up": False})
