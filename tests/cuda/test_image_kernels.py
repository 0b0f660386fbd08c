"""Ops of images on the interpreted accelerator, each against its NumPy reference; and what is compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lowered import OneOp
from on_accelerator import interpreted
from test_native_images import by_tokens
from tiny import Paged, same_bits

from quire.backends.backend import Capacity
from quire.backends.cuda import interpreter
from quire.backends.cuda.asked import launches_of
from quire.backends.cuda.kernels import images
from quire.backends.cuda.kernels.variants import variants
from quire.backends.cuda.manifest import launch_key
from quire.backends.cuda.refused import require_kernels
from quire.backends.cuda.weights import plan_layout
from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Builder, Names, Value, WeightSpec, ops
from quire.program.ops import RotaryAt
from quire.quantize.groups import GroupStorage
from quire.quantize.kinds import DTYPES, Dense, FloatStorage

W = Names("w")


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def on_gpu(op: OneOp, **weights: Any) -> np.ndarray:
    return op.run(Paged(op.program, op.weights | weights, make=interpreted))


@pytest.mark.parametrize("format", ["f32", "bf16"])
def test_mixed_rows(format: str) -> None:
    """Wider than a program, with factors of 0 as corners at the edge have."""
    rng = np.random.default_rng(0)
    places = np.concatenate([rng.integers(0, 9, (5, 4)), rng.random((5, 4))], axis=1).astype(np.float32)
    places[0, 5:] = 0

    def record(b: Builder, x: Value) -> Value:
        table = WeightSpec("w.weight", (9, 150), ("w.weight",))
        return b.record(ops.MixedRows(b.value((150,)), x, table)).out

    op = OneOp([places], record)
    table = op.weights["w.weight"].array.astype(DTYPES[format])
    op.weights["w.weight"] = replace(op.weights["w.weight"], array=table.astype(np.float32))
    assert same_bits(on_gpu(op, **{"w.weight": Dense(table)}), op.reference())


@pytest.mark.parametrize("size", [4, 72])
def test_rotary_by_places(size: int) -> None:
    places = np.random.default_rng(0).integers(0, 120, (5, 2)).astype(np.float32)

    def record(b: Builder, x: Value, places: Value) -> Value:
        return b.record(RotaryAt(b.value(x.shape), x, places, 10000.0)).out

    op = OneOp([draw(5, 3, size), places], record)
    assert same_bits(on_gpu(op), op.reference())


@pytest.mark.parametrize(("dim", "value_dim"), [(8, 24), (72, 72)])
def test_attention_of_heads_of_any_size(dim: int, value_dim: int) -> None:
    """Padded with zeros, also where query heads share key heads."""

    def record(b: Builder, q: Value, k: Value, v: Value) -> Value:
        return b.record(ops.RowAttention(b.value((4 * value_dim,)), q, k, v, 0.3)).out

    op = OneOp([draw(9, 4, dim), draw(9, 2, dim), draw(9, 2, value_dim)], record, (7, 2))
    assert np.abs(on_gpu(op) - op.reference()).max() < 2e-6


def test_numbers_and_weights() -> None:
    """Bounds let NaN pass; a token has the row of another one."""
    x = 3 * draw(4, 130)
    x[0, :3] = np.nan, np.inf, -np.inf

    def clipped(b: Builder, x: Value) -> Value:
        low, high = (WeightSpec(f"w_{end}", (), (f"w_{end}",)) for end in ("min", "max"))
        return b.record(ops.Clip(b.value(x.shape), x, low, high)).out

    def standardized(b: Builder, x: Value) -> Value:
        bias, factors = (WeightSpec(name, (130,), (name,)) for name in ("bias", "factors"))
        return b.record(ops.Standardize(b.value(x.shape), x, bias, factors)).out

    def replaced(b: Builder, x: Value) -> Value:
        table = WeightSpec("w.weight", (4, 130), ("w.weight",))
        return b.record(ops.Embed(b.value(x.shape), table, replaced=(2, 1))).out

    for record in (clipped, standardized, replaced):
        op = OneOp([x], record)
        assert same_bits(on_gpu(op), op.reference())


def test_rows_are_joined_and_averaged() -> None:
    """Three rows of patches become one row of a token."""

    def joined(b: Builder, x: Value) -> Value:
        return b.record(ops.JoinRows(b.value((3 * x.width,), "L"), b.add(x, x))).out

    def averaged(b: Builder, x: Value) -> Value:
        return b.record(ops.MeanOfRows(b.value(x.shape, "L"), b.add(x, x), 3)).out

    for record in (joined, averaged):
        op = OneOp([draw(6, 130)], record)
        found = by_tokens(op, Paged(op.program, op.weights, make=interpreted), 6, 2)
        assert same_bits(found, by_tokens(op, Paged(op.program, op.weights), 6, 2))


@pytest.mark.parametrize("added", [False, True])
def test_embeddings_are_placed(added: bool) -> None:
    """Of two images, and from a later column on."""
    x, first, second = draw(5, 130), draw(3, 260), draw(2, 260)
    addresses = np.array([0, first[1].ctypes.data, first[2].ctypes.data, 0, second[0].ctypes.data])
    out = np.full_like(x, np.nan)
    args = (out, x, addresses, 130, 130, int(added))
    interpreter.run(images.place_images, (5, 2), args, {"BLOCK": 128})
    wanted = x.copy()
    own = np.stack([first[1, 130:], first[2, 130:], second[0, 130:]])
    wanted[[1, 2, 4]] = wanted[[1, 2, 4]] + own if added else own
    assert same_bits(out, wanted)


# As published: heads of 72 numbers, patches of 588, heads that rotate by place.
_CLIP = {"hidden_size": 1152, "intermediate_size": 4304}
TOWERS: dict[str, dict[str, Any]] = {
    "Gemma3": _CLIP | {"num_attention_heads": 16, "image_size": 896, "patch_size": 14},
    "Glm4v": {"depth": 1},
    "GlmOcr": {"depth": 1},
    "Idefics3": _CLIP | {"num_attention_heads": 16, "image_size": 364, "patch_size": 14},
    "AyaVision": _CLIP | {"num_attention_heads": 16, "image_size": 364, "patch_size": 14},
    "Cohere2Vision": _CLIP | {"num_attention_heads": 12, "image_size": 512, "patch_size": 16},
    "InternVL": {},
    "Llava": {"hidden_size": 1024, "num_attention_heads": 16, "image_size": 336, "patch_size": 14},
    "Lfm2Vl": _CLIP | {"num_attention_heads": 16},
    "Llama4": {"hidden_size": 1408, "image_size": 336},
    "PaddleOCRVL": {},
    "Qwen3VL": _CLIP | {"num_heads": 16, "deepstack_visual_indexes": [0], "depth": 1},
    "Qwen2VL": {"depth": 1},
    "Qwen2_5_VL": {"hidden_size": 1280, "depth": 2, "fullatt_block_indexes": [1]},
    "Gemma4": {"num_hidden_layers": 1, "use_clipped_linears": True, "standardize": True},
}


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("halves", [True, False])
def test_every_launch_of_a_published_tower_was_compiled(name: str, halves: bool) -> None:
    heads = {"num_attention_heads": 20, "num_key_value_heads": 4, "partial_rotary_factor": 0.5}
    text = {"hidden_size": 2560, "num_hidden_layers": 1, "vocab_size": 99} | heads
    config: dict[str, Any] = {"architectures": [f"{name}ForConditionalGeneration"], "image_token_id": 9}
    config |= {"text_config": text, "vision_config": {"num_hidden_layers": 1} | TOWERS[name]}
    vision = read_model(config, {"image_mean": [0.5] * 3}).vision
    assert vision is not None
    storage = {weight: FloatStorage("bf16") for weight in vision.program.weights()}
    require_kernels(vision.program, storage)
    layout = plan_layout(vision.program, storage)
    capacity = Capacity([8], 16, "bfloat16", 4)
    asked = {launch_key(one) for one in launches_of(vision.program, layout, capacity, halves)}
    assert len(asked) > 10
    assert asked <= {variant.key for variant in variants()}
    for table in (op.table.name for op in vision.program if isinstance(op, ops.MixedRows)):
        with pytest.raises(ConfigError, match="learned positions of patches in int8"):
            require_kernels(vision.program, storage | {table: GroupStorage("int8", 8)})
