"""The vision tower of Llama 4 (Meta, 2025), which takes tiles of an image and a small one of all of it:
patches with learned positions, rotated by column and row, and a class beside them that becomes no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError, quoted
from quire.images.marks import Marks
from quire.images.patches import ClassedPatches
from quire.images.sizes import CanvasTiles
from quire.images.vision import Vision
from quire.models.config import Fields
from quire.models.defaults import LLAMA4
from quire.models.pooling import attend_both
from quire.models.tower import (
    add_learned,
    image_token,
    normalization,
    theta_of,
    tower_fields,
    unquantized,
)
from quire.program import Builder, Names, Rows, Value, WeightSpec, ops

_TOWER = {
    "hidden_size": 768,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "num_channels": 3,
    "intermediate_size": 5632,
    "image_size": 448,
    "patch_size": 14,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "rope_theta": 10_000.0,
}
MARKS = Marks(
    alone="<|image_start|><|image|>",
    begin="<|image_start|>",
    tile="",
    between="<|tile_x_separator|>",
    row_end="<|tile_y_separator|>",
    overview="<|image|>",
    end="<|image_end|>",
)
_WRITTEN = ("<|image|>", "<|patch|>")  # by templates, and what tokens of images are
_TOKEN, _TILES, _MOST_TILES = 200092, 16, 64
_EPS, _AXES, _BILINEAR = 1e-5, 2, 2  # the last by its number in Pillow


def llama4_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of Llama 4, with its projection to the embeddings of the text model."""
    cfg, b, w = tower_fields(raw, _TOWER), Builder(), Names("vision_model")
    width, heads = cfg.size("hidden_size"), cfg.size("num_attention_heads")
    patching = _patching(cfg, processor)
    if width % (2 * _AXES * heads) or cfg.size("num_channels") != 3:
        raise ConfigError(f"config.json: vision_config: {width} numbers in {heads} heads are not supported")
    theta = theta_of(cfg, cfg.positive("rope_theta"))
    pixels, number = 3 * patching.patch**2, patching.most[0]
    given = b.record(ops.Patches(b.value((pixels + 6,)))).out
    x = b.linear(b.slice(given, 0, pixels), w / "patch_embedding.linear", width)
    named = WeightSpec(w / "class_embedding", (1, width), (w / "class_embedding",), stored=(width,))
    x = b.add(x, b.record(ops.MixedRows(b.value((width,)), b.slice(given, pixels + 2, 2), named)).out)
    x = add_learned(b, x, b.slice(given, pixels, 2), w / "positional_embedding_vlm", number)
    x, places = b.layer_norm(x, w / "layernorm_pre", _EPS), b.slice(given, pixels + 4, _AXES)
    for i in range(cfg.size("num_hidden_layers")):
        x = _layer(b, cfg, x, places, theta, w / f"model.layers.{i}")
    x = b.layer_norm(x, w / "layernorm_post", _EPS)
    x = b.record(ops.JoinRows(b.value((patching.merge**2 * width,), "L"), x)).out
    for name, size in (("fc1", cfg.size("projector_input_dim")), ("fc2", cfg.size("projector_output_dim"))):
        x = b.activation(b.linear(x, w / f"vision_adapter.mlp.{name}", size), "gelu")
    text = Fields({**LLAMA4, **raw["text_config"]})
    out = b.linear(x, Names("model.multi_modal_projector.linear_1"), text.size("hidden_size"))
    program, token = unquantized(b.program(out)), image_token(raw, _TOKEN)
    return Vision(program, patching, token, written=_WRITTEN, marks=MARKS)


def _layer(b: Builder, cfg: Fields, x: Value, places: Value, theta: float, p: Names) -> Value:
    heads = cfg.size("num_attention_heads")
    width, shape = x.width, (heads, x.width // heads)
    h, order = b.layer_norm(x, p / "input_layernorm", _EPS), _halves(*shape)

    def rotated(name: Names) -> Value:
        q = b.linear(h, name, shape, bias=True, rows=order, part="halves")
        return b.record(ops.RotaryAt(b.value(shape), q, places, theta)).out

    q, k = rotated(p / "self_attn.q_proj"), rotated(p / "self_attn.k_proj")
    v = b.linear(h, p / "self_attn.v_proj", shape, bias=True)
    x = b.add(x, b.linear(attend_both(b, q, k, v), p / "self_attn.o_proj", width, bias=True))
    h = b.layer_norm(x, p / "post_attention_layernorm", _EPS)
    h = b.activation(b.linear(h, p / "mlp.fc1", cfg.size("intermediate_size"), bias=True), "gelu")
    return b.add(x, b.linear(h, p / "mlp.fc2", width, bias=True))


def _halves(heads: int, dim: int) -> Rows:
    """Return the order of the numbers of heads in which pairs are half a head apart, not neighbours."""
    order = (*range(0, dim, 2), *range(1, dim, 2))
    return Rows(heads * dim, tuple((head * dim + at, 1) for head in range(heads) for at in order))


def _patching(cfg: Fields, processor: Mapping[str, Any]) -> ClassedPatches:
    """Return how images are resized and cut. Raises ConfigError for what is not supported."""
    side, patch = cfg.size("image_size"), cfg.size("patch_size")
    ratio = cfg.positive("pixel_shuffle_ratio")
    merge = round(1 / ratio)
    if merge * ratio != 1 or side % (patch * merge):
        problem = f"{side} pixels a side, {patch} of a patch, pixel_shuffle_ratio = {ratio}"
        raise ConfigError(f"config.json: vision_config: {problem} are not supported")
    size = processor.get("size", {"height": side, "width": side})
    if size != {"height": side, "width": side}:
        problem = f"preprocessor_config.json: size = {quoted(size)}, but the vision tower takes {side}"
        raise ConfigError(problem, f'give {{"height": {side}, "width": {side}}}')
    if processor.get("resize_to_max_canvas", False) is not False:
        stated = quoted(processor["resize_to_max_canvas"])
        raise ConfigError(f"preprocessor_config.json: resize_to_max_canvas = {stated} is not supported")
    tiles = Fields({"max_patches": _TILES, **processor}).size("max_patches", _MOST_TILES)
    halves = processor.get("do_rescale") is not False and processor.get("do_normalize") is not False
    pixels = normalization(processor, halves=halves)
    rule = CanvasTiles(side, tiles)
    return ClassedPatches(patch, merge, rule, pixels, processor.get("resample", _BILINEAR))
