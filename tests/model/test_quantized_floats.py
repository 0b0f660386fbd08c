"""Readers of 4-bit and 8-bit floats, and of tables: files that no folder of shared/data has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from written_formats import by_input, stream, write

from quire.config import EngineConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.weights.formats.names import compiled
from quire.weights.formats.registry import quantization_of

RNG = np.random.default_rng(0)
OUT, IN = 160, 192
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FP8 = {"quant_method": "fp8"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    },
}


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (RNG.standard_normal(shape) * 4).astype(dtype)


def power(*shape: int) -> np.ndarray:
    """e8m0 scales."""
    return RNG.integers(100, 140, shape).astype(np.uint8)


def of_power(codes: np.ndarray) -> np.ndarray:
    return np.ldexp(np.float32(1), codes.astype(int) - 127)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("config", "scale", "shape"),
    [
        (FP8, "weight_scale", ()),
        (FP8, "weight_scale", (1,)),
        (FP8, "weight_scale", (OUT,)),
        (FP8, "weight_scale", (OUT, 1)),
        (BLOCKS, "weight_scale_inv", (2, 2)),
        ({**FP8, "weight_block_size": [64, 96]}, "weight_scale_inv", (3, 2)),
        ({"quant_method": "fbgemm_fp8"}, "weight_scale", (OUT, 1)),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "weight_scale", (2, 1, 2, 1)),
    ],
)
def test_scales_of_8_bit_floats(
    tmp_path: Path, dtype: Any, config: Any, scale: str, shape: tuple[int, ...]
) -> None:
    weight, scales = numbers(OUT, IN, dtype=dtype), abs(numbers(*shape)) + np.float32(0.1)
    found = write(tmp_path, config, {"m.weight": weight, f"m.{scale}": np.asarray(scales, np.float32)})
    wide = np.asarray(scales, np.float32).reshape(
        shape if len(shape) == 2 else (shape[0], -1) if shape else (1, 1)
    )
    height, width = config.get("weight_block_size") or (128, 128)
    if wide.shape[1] > 1:
        wide = np.repeat(wide, height, axis=0)[:OUT]
        wide = np.repeat(wide, width, axis=1)[:, :IN]
    np.testing.assert_array_equal(found.pull("m.weight").dense(), wide * weight.astype(np.float32))
    assert list(found) == ["m.weight"]


def test_deepseek_v4_has_4_bit_experts_beside_8_bit_matrices(tmp_path: Path) -> None:
    """Scales are powers of two beside the weights; NVIDIA's experts are NVFP4."""
    wide, packed = numbers(OUT, IN, dtype=E4M3), RNG.integers(0, 256, (OUT, 48), np.uint8)
    scales, of_experts, sixteenths = power(2, 2), power(OUT, 3), abs(numbers(OUT, 6, dtype=E4M3))
    e8m0 = ml_dtypes.float8_e8m0fnu
    tensors = {
        "layers.0.attn.wq_a.weight": wide,
        "layers.0.attn.wq_a.scale": scales.view(e8m0),
        "layers.0.ffn.experts.0.w1.weight": packed.view(np.int8),
        "layers.0.ffn.experts.0.w1.scale": of_experts.view(e8m0),
        "layers.0.hc_attn_scale": numbers(3),
        "layers.0.ffn.experts.0.w2.weight": packed,
        "layers.0.ffn.experts.0.w2.weight_scale": sixteenths,
        "layers.0.ffn.experts.0.w2.weight_scale_2": np.array(0.5, np.float32),
        "layers.0.ffn.experts.0.w2.input_scale": np.array(0.5, np.float32),
    }
    found = write(tmp_path, {**BLOCKS, "scale_fmt": "ue8m0"}, tensors)
    assert sorted(found) == sorted(n for n in tensors if n.endswith((".weight", "hc_attn_scale")))
    blocks = np.repeat(np.repeat(of_power(scales), 128, axis=0)[:OUT], 128, axis=1)[:, :IN]
    dense = found.pull("layers.0.attn.wq_a.weight").dense()
    np.testing.assert_array_equal(dense, blocks * wide.astype(np.float32))
    values = np.stack([FP4[packed & 15], FP4[packed >> 4]], axis=-1).reshape(OUT, 96)
    dense = found.pull("layers.0.ffn.experts.0.w1.weight").dense()
    np.testing.assert_array_equal(dense, np.repeat(of_power(of_experts), 32, axis=1) * values)
    dense = found.pull("layers.0.ffn.experts.0.w2.weight").dense()
    by_group = np.repeat(sixteenths.astype(np.float32) * np.float32(0.5), 16, axis=1)
    np.testing.assert_array_equal(dense, by_group * values)


def test_scales_of_joined_matrices_and_of_experts(tmp_path: Path) -> None:
    qkv, gate_up, experts = (numbers(*shape, dtype=E4M3) for shape in ((OUT, 32), (OUT, 32), (3, OUT, 32)))
    tensors = {
        "qkv_proj.weight": qkv,
        "qkv_proj.weight_scale": np.array([1, 2, 3], np.float32),
        "gate_up_proj.weight": gate_up,
        "gate_up_proj.weight_scale": np.array([1, 2], np.float32),
        "experts.down_proj": experts,
        "experts.down_proj_scale_inv": numbers(3, 2, 1, dtype=ml_dtypes.bfloat16),
    }
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    found = write(tmp_path, BLOCKS, tensors, **heads)
    rows = np.repeat([1, 2, 3], [96, 32, 32]).astype(np.float32)[:, None]
    np.testing.assert_array_equal(found.pull("qkv_proj.weight").dense(), rows * qkv.astype(np.float32))
    rows = np.repeat([1, 2], OUT // 2).astype(np.float32)[:, None]
    np.testing.assert_array_equal(
        found.pull("gate_up_proj.weight").dense(), rows * gate_up.astype(np.float32)
    )
    scales = np.repeat(tensors["experts.down_proj_scale_inv"].astype(np.float32), [128, 32], axis=1)
    np.testing.assert_array_equal(
        found.pull("experts.down_proj").dense(), scales * experts.astype(np.float32)
    )


@pytest.mark.parametrize(
    ("config", "scale", "problem"),
    [
        (FP8, None, "8-bit floats, but no scale"),
        (BLOCKS, (3, 2), r"shape \[3, 2\], no scales for blocks of 128 x 128"),
        (FP8, (3,), "no scales for the tensor, each output or groups"),
        (BLOCKS, (1,), r"shape \[1\], no scales for blocks of 128 x 128"),
        ({"quant_method": "fbgemm_fp8"}, (), "no scales for each output or groups"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, (1,), "no scales for each"),
        (CHANNELS, (1,), "no scales for each output"),
        ({**FP8, "weight_block_size": [0, 128]}, (1,), "weight_block_size"),
        ({**FP8, "activation_scheme": "?"}, (1,), "activation_scheme"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, (1,), "'W4A8_AWQ' is not supported"),
    ],
)
def test_8_bit_floats_that_cannot_be_read(tmp_path: Path, config: Any, scale: Any, problem: str) -> None:
    tensors = {"m.weight": numbers(OUT, IN, dtype=E4M3)}
    if scale is not None:
        tensors["m.weight_scale"] = numbers(*scale)
    with pytest.raises(ConfigError, match=problem):
        write(tmp_path, config, tensors)


def test_scales_of_activations_are_refused_where_they_change_them(tmp_path: Path) -> None:
    tensors = {
        "m.weight": numbers(OUT, IN, dtype=E4M3),
        "m.weight_scale": np.ones((), np.float32),
        "m.k_scale": np.ones((), np.float32),
    }
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    found = write(tmp_path, config, tensors)
    assert list(found) == ["m.weight"]
    assert "KV cache" in found.notes[0]
    with pytest.raises(ConfigError, match=r"m\.pre_quant_scale' scales activations"):
        write(tmp_path, config, tensors | {"m.pre_quant_scale": np.ones(IN, np.float32)})


def test_weights_beside_their_scales_that_are_still_floats(tmp_path: Path) -> None:
    groups = {"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    tensors = {"m.weight": numbers(4, 8), "m.weight_scale": np.ones((4, 1), np.float32)}
    with pytest.raises(ConfigError, match="still to be rounded"):
        write(tmp_path, config, tensors)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_floats_of_mlx(tmp_path: Path, mode: str) -> None:
    bits, group = (8, 32) if mode == "mxfp8" else (4, 16 if mode == "nvfp4" else 32)
    q = RNG.integers(0, 100 if bits == 8 else 16, (OUT, IN))
    if mode == "nvfp4":
        own = RNG.integers(1, 126, (OUT, IN // group)).astype(np.uint8)
        scales = own.view(E4M3).astype(np.float32)
    else:
        own = power(OUT, IN // group)
        scales = of_power(own)
    values = q.astype(np.uint8).view(E4M3).astype(np.float32) if bits == 8 else FP4[q]
    config = {"group_size": group, "bits": bits, "mode": mode}
    found = write(
        tmp_path, None, {"m.weight": stream(q, bits, np.uint32), "m.scales": own}, quantization=config
    )
    np.testing.assert_array_equal(found.pull("m.weight").dense(), by_input(scales, group, IN) * values)


def state(shape: list[int], block: int, **more: Any) -> np.ndarray:
    text = json.dumps({"quant_type": "nf4", "blocksize": block, "shape": shape, **more})
    return np.frombuffer(text.encode(), np.uint8)


@pytest.mark.parametrize(("kind", "width"), [("nf4", 64), ("fp4", 96), ("nf4", 100), ("nf4", 33)])
def test_blocks_of_bitsandbytes_need_not_end_where_rows_do(tmp_path: Path, kind: str, width: int) -> None:
    q = RNG.integers(0, 16, (32, width))
    table, absmax = numbers(16), abs(numbers(-(-32 * width // 64)))
    flat = q.reshape(-1, 2)
    tensors = {
        "m.weight": (flat[:, 0] << 4 | flat[:, 1]).astype(np.uint8)[:, None],
        "m.weight.absmax": absmax,
        "m.weight.quant_map": table,
        f"m.weight.quant_state.bitsandbytes__{kind}": state([32, width], 64),
    }
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    if width == 33:
        with pytest.raises(ConfigError, match="blocks of 64 in rows of 33") as caught:
            write(tmp_path, config, tensors)
        assert "another version" in (caught.value.hint or "")
        return
    expected = (np.repeat(absmax, 64) * table[q.reshape(-1)]).reshape(32, width)
    np.testing.assert_array_equal(write(tmp_path, config, tensors).pull("m.weight").dense(), expected)
    for changed in ("{", "[]", '{"blocksize": 64}', '{"blocksize": 64, "shape": [32, -1]}'):
        broken = {
            **tensors,
            f"m.weight.quant_state.bitsandbytes__{kind}": np.frombuffer(changed.encode(), np.uint8),
        }
        with pytest.raises(ConfigError, match="quant_state"):
            write(tmp_path, config, broken)


def test_bytes_of_bitsandbytes(tmp_path: Path) -> None:
    q, scales = RNG.integers(-127, 128, (8, 32)).astype(np.int8), abs(numbers(8))
    tensors = {"m.weight": q, "m.SCB": scales, "m.weight_format": np.zeros((), np.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    expected = (scales / np.float32(127))[:, None] * q.astype(np.float32)
    np.testing.assert_array_equal(write(tmp_path, config, tensors).pull("m.weight").dense(), expected)
    with pytest.raises(ConfigError, match="layout of GPUs"):
        write(tmp_path, config, tensors | {"m.weight_format": np.ones((), np.uint8)})


@pytest.mark.parametrize("pattern", ["(a+)+", "(a|a)*", "a" * 2000, "[", "a*a*a*a*a*", "(?:ab){9}"])
def test_patterns_that_could_take_long_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="pattern"):
        compiled(pattern)


def test_published_configs_state_formats_that_are_read(shared_data: Path) -> None:
    """Their sizes are those of the published files, whether or not their architecture is known."""
    methods = {}
    for path in (shared_data / "configs").glob("*/config.json"):
        if (stated := quantization_of(json.loads(path.read_text()))) is not None:
            methods[path.parent.name] = stated[0]
    assert set(methods.values()) == {"fp8", "modelopt", "mxfp4"}
    for name, gigabytes in (("openai--gpt-oss-20b", 13.8), ("Qwen--Qwen3-30B-A3B-FP8", 32.1)):
        config = EngineConfig.from_keywords(model=str(shared_data / "configs" / name), device="null")
        facts = describe(config, weights=False)
        size = sum(map(facts.weights.stored_bytes, facts.weights.specs.values()))
        assert size / 1e9 == pytest.approx(gigabytes, abs=0.05)
