"""The vision tower of Gemma 4: positions of rows and columns, learned and rotary; patches are averaged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError
from quire.images.patches import BudgetedPatches
from quire.images.vision import Vision
from quire.models.config import MAX_HEAD_DIM, Fields
from quire.models.defaults_gemma4 import GEMMA4
from quire.models.pooling import attend_both
from quire.models.tower import (
    BICUBIC,
    doubled,
    image_token,
    normalization,
    require_same,
    theta_of,
    tower_fields,
    unquantized,
)
from quire.program import Builder, Names, Rows, Value, WeightSpec, ops

_TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": False,
}
_TOKEN = 258880  # that stands for an image
_MOST_TOKENS = 280  # of an image, where the processor does not say otherwise
_THETA = 100.0
_PLACES = 2  # row and column
# Of a processor that does not say otherwise: pixels are from 0 to 1
_PIXELS = {"do_normalize": False, "image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0)}
# The template writes the first for an image, the processor what is around its tokens
_WRITTEN = "<|image|>", "<|image><|image|><image|>"


def gemma4_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of Gemma 4, with its projection to the embeddings of the text model."""
    cfg, b, w = tower_fields(raw, _TOWER), Builder(), Names("model.vision_tower")
    patching, hidden = _patching(cfg, processor), cfg.size("hidden_size")
    pixels, side = 3 * patching.patch**2, cfg.size("position_embedding_size")
    given = b.record(ops.Patches(b.value((pixels + 3 * _PLACES,)))).out
    x = b.linear(b.slice(given, 0, pixels), w / "patch_embedder.input_proj", hidden)
    name = w / "patch_embedder.position_embedding_table"
    table = WeightSpec(name, (_PLACES * side, hidden), (name,), stored=(_PLACES, side, hidden))
    mixed = ops.MixedRows(b.value((hidden,)), b.slice(given, pixels, 2 * _PLACES), table)
    x = b.add(x, b.record(mixed).out)
    places = b.slice(given, pixels + 2 * _PLACES, _PLACES)
    for i in range(cfg.size("num_hidden_layers")):
        x = _layer(b, cfg, x, places, w / f"encoder.layers.{i}")
    x = b.record(ops.MeanOfRows(b.value((hidden,), "L"), x, patching.merge**2)).out
    x = b.scale(x, math.sqrt(hidden))
    if cfg.flag("standardize"):
        bias, factors = (WeightSpec(w / name, (hidden,), (w / name,)) for name in ("std_bias", "std_scale"))
        x = b.record(ops.Standardize(b.value((hidden,), "L"), x, bias, factors)).out
    return seen(b, b.rms_norm(x, None, cfg.positive("rms_norm_eps")), raw, patching)


def seen(b: Builder, x: Value, raw: Mapping[str, Any], patching: BudgetedPatches) -> Vision:
    """Project what a tower gives, normalized, to embeddings of the text model; return the vision."""
    text = {**GEMMA4, **raw["text_config"]}
    out = b.linear(x, Names("model.embed_vision.embedding_projection"), Fields(text).size("hidden_size"))
    token = image_token(raw, _TOKEN)
    whole = text.get("use_bidirectional_attention") == "vision"
    return Vision(unquantized(b.program(out)), patching, token, written=_WRITTEN, whole=whole)


def _patching(cfg: Fields, processor: Mapping[str, Any]) -> BudgetedPatches:
    """Return how images are resized and cut. Raises ConfigError for what is not supported."""
    patch, merge = cfg.size("patch_size"), cfg.size("pooling_kernel_size")
    require_same(processor, {"patch_size": patch, "pooling_kernel_size": merge})
    most = Fields({"max_soft_tokens": _MOST_TOKENS, **processor}).size("max_soft_tokens")
    side = cfg.size("position_embedding_size")
    if most * merge > side:
        problem = f"images of {most * merge} patches in a line, and {side} positions"
        raise ConfigError(f"config.json: vision_config: {problem} are not supported")
    scaled = doubled(normalization({**_PIXELS, **processor}))
    return BudgetedPatches(patch, merge, most, side, scaled, processor.get("resample", BICUBIC))


def _layer(b: Builder, cfg: Fields, x: Value, places: Value, p: Names) -> Value:
    def norm(x: Value, name: str) -> Value:
        return b.rms_norm(x, p / name, cfg.positive("rms_norm_eps"))

    h = _attention(b, cfg, norm(x, "input_layernorm"), places, p / "self_attn")
    x = b.add(x, norm(h, "post_attention_layernorm"))
    h, inner = norm(x, "pre_feedforward_layernorm"), cfg.size("intermediate_size")
    gate, up = (_linear(b, cfg, h, p / "mlp" / name, inner) for name in ("gate_proj", "up_proj"))
    h = b.gated_activation(gate, up, str(cfg.get("hidden_activation")))
    h = _linear(b, cfg, h, p / "mlp.down_proj", cfg.size("hidden_size"))
    return b.add(x, norm(h, "post_feedforward_layernorm"))


def _attention(b: Builder, cfg: Fields, h: Value, places: Value, p: Names) -> Value:
    heads, groups = cfg.size("num_attention_heads"), cfg.size("num_key_value_heads")
    dim, theta = cfg.size("head_dim", MAX_HEAD_DIM), theta_of(cfg, _THETA)
    if dim % (2 * _PLACES):
        raise ConfigError(f"config.json: vision_config: heads of {dim} numbers are not supported")

    def rotated(name: str, count: int) -> Value:
        x = _linear(b, cfg, h, p / f"{name}_proj", (count, dim), _by_pair(count, dim))
        w = p / f"{name}_norm"
        weight = WeightSpec(w / "by_pair.weight", (dim,), (w / "weight",), rows=_by_pair(1, dim))
        x = b.record(ops.RMSNorm(b.value(x.shape), x, weight, cfg.positive("rms_norm_eps"), 0.0)).out
        return b.record(ops.RotaryAt(b.value(x.shape), x, places, theta)).out

    q, k = rotated("q", heads), rotated("k", groups)
    v = _linear(b, cfg, h, p / "v_proj", (groups, dim))
    v = b.rms_norm(v, None, cfg.positive("rms_norm_eps"))
    return _linear(b, cfg, attend_both(b, q, k, v, scale=1.0), p / "o_proj", cfg.size("hidden_size"))


def _by_pair(heads: int, dim: int) -> Rows:
    """Return the order of the numbers of heads in which RotaryAt finds pairs half a head apart.

    Checkpoints have the pairs of columns in the first half of a head, those of rows in the second. Scores,
    sums over a head, are the same in any order that queries and keys share.
    """
    part = dim // (2 * _PLACES)
    firsts = (head * dim + at * part for head in range(heads) for at in (0, 2, 1, 3))
    return Rows(heads * dim, tuple((first, part) for first in firsts))


def _linear(
    b: Builder, cfg: Fields, x: Value, p: Names, out: int | tuple[int, ...], rows: Rows | None = None
) -> Value:
    """Multiply x, with inputs and outputs kept within the bounds of this matrix if the checkpoint has any."""
    clipped = cfg.flag("use_clipped_linears")
    x = _clip(b, x, p / "input") if clipped else x
    x = b.linear(x, p / "linear", out, rows=rows, part="by_pair" if rows else "")
    return _clip(b, x, p / "output") if clipped else x


def _clip(b: Builder, x: Value, p: Names) -> Value:
    low, high = (WeightSpec(f"{p}_{end}", (), (f"{p}_{end}",)) for end in ("min", "max"))
    return b.record(ops.Clip(b.value(x.shape, x.count), x, low, high)).out
