"""The vision tower of Pixtral (arXiv:2410.07073), which Mistral Small 3.1, Ministral 3 and later ones have:
squares of its patches are merged, and the rows of an image end with tokens of text; and LightOnOCR has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ConfigError, quoted
from quire.images.patches import BoundedPatches
from quire.images.vision import Vision
from quire.models.config import Fields
from quire.models.pooling import attend_both
from quire.models.tower import (
    clip_pixels,
    embed_patches,
    image_token,
    project,
    require_last_layer,
    text_width,
    theta_of,
    tower_fields,
    unquantized,
)
from quire.program import Builder, Names, Value, WeightSpec, ops

_PIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
    "rope_theta": 10_000.0,
}
_WHOLE = {
    "spatial_merge_size": 2,
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": False,
    "vision_feature_layer": -1,
}
_LIGHTON = {"projector_hidden_act": "gelu", "multimodal_projector_bias": False}
_LIGHTON_TOKEN = 151655
TOKEN, ROW_ENDS = 10, ("[IMG_BREAK]", "[IMG_END]")
_EPS, _PLACES = 1e-5, 2


def pixtral_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of Pixtral, with the projection to the embeddings of the text model."""
    whole, b = Fields({**_WHOLE, **raw}), Builder()
    require_last_layer(whole)
    merge = whole.size("spatial_merge_size")
    x, patching = pixtral(b, Names("model.vision_tower"), raw, processor, merge)
    out = _projected(b, whole, x, Names("model.multi_modal_projector"), merge**2)
    return Vision(unquantized(b.program(out)), patching, image_token(raw, TOKEN), row_ends=ROW_ENDS)


def lighton_ocr_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of LightOnOCR (arXiv:2601.14251), whose rows have no tokens between them."""
    whole, b = Fields({**_WHOLE, **raw, **_LIGHTON}), Builder()
    merge = whole.size("spatial_merge_size")
    x, patching = pixtral(b, Names("model.vision_encoder"), raw, processor, merge)
    patching = replace(patching, loose=_loose(processor, patching))
    out = _projected(b, whole, x, Names("model.vision_projection"), merge**2)
    return Vision(unquantized(b.program(out)), patching, image_token(raw, _LIGHTON_TOKEN))


def _loose(processor: Mapping[str, Any], patching: BoundedPatches) -> bool:
    """Return whether images are rounded to patches instead of squares of them. Raises ConfigError for others.

    Other processors of this tower round to squares, whatever their files say.
    """
    size = processor.get("patch_size", patching.unit)
    for unit in (patching.unit, patching.patch):
        if size in (unit, {"height": unit, "width": unit}):
            return unit != patching.unit
    problem = f"patch_size = {quoted(size)} is not supported"
    raise ConfigError(f"preprocessor_config.json: {problem}", f"give {patching.unit} or {patching.patch}")


def pixtral(
    b: Builder, w: Names, raw: Mapping[str, Any], processor: Mapping[str, Any], merge: int
) -> tuple[Value, BoundedPatches]:
    """Record the layers, and return also how images become patches, in squares of `merge` x `merge`."""
    cfg = tower_fields(raw, _PIXTRAL)
    hidden, heads, patch = cfg.size("hidden_size"), cfg.size("num_attention_heads"), cfg.size("patch_size")
    if hidden % (4 * heads) or cfg.size("num_channels") != 3:
        raise ConfigError(f"config.json: vision_config: {hidden} numbers in {heads} heads are not supported")
    theta = theta_of(cfg, cfg.positive("rope_theta"))
    pixels, pairs = 3 * patch**2, hidden // heads // 2 // _PLACES
    given = b.record(ops.Patches(b.value((pixels + _PLACES,)))).out
    x = embed_patches(b, given, w / "patch_conv", (hidden, 3, patch, patch), bias=False)
    x = b.rms_norm(x, w / "ln_pre", _EPS)
    places = b.slice(given, pixels, _PLACES)
    for i in range(cfg.size("num_hidden_layers")):
        x = _layer(b, cfg, x, places, theta, w / f"transformer.layers.{i}")
    longest = _longest(processor, cfg.get("image_size"))
    # Frequencies of rows and columns alternate: theta^(-0/n), theta^(-1/n), ... of n pairs
    patching = BoundedPatches(
        patch,
        merge,
        longest,
        (-(-longest // (patch * merge))) ** 2,
        theta ** (-1 / (_PLACES * pairs)),
        *clip_pixels(processor),
    )
    return x, patching


def _layer(b: Builder, cfg: Fields, x: Value, places: Value, theta: float, p: Names) -> Value:
    hidden, heads = cfg.size("hidden_size"), cfg.size("num_attention_heads")
    h = b.rms_norm(x, p / "attention_norm", _EPS)
    q, k, v = (b.linear(h, p / f"attention.{name}_proj", (heads, hidden // heads)) for name in "qkv")
    q, k = (b.record(ops.RotaryAt(b.value(one.shape), one, places, theta)).out for one in (q, k))
    x = b.add(x, b.linear(attend_both(b, q, k, v), p / "attention.o_proj", hidden))
    h, inner = b.rms_norm(x, p / "ffn_norm", _EPS), cfg.size("intermediate_size")
    gate, up = (b.linear(h, p / f"feed_forward.{name}_proj", inner) for name in ("gate", "up"))
    h = b.gated_activation(gate, up, str(cfg.get("hidden_act")))
    return b.add(x, b.linear(h, p / "feed_forward.down_proj", hidden))


def _projected(b: Builder, whole: Fields, x: Value, w: Names, number: int) -> Value:
    """Return squares of `number` patches as embeddings of the text model."""
    text, hidden = Fields(whole.get("text_config")), x.width
    x = b.rms_norm(x, w / "norm", text.positive("rms_norm_eps"))
    x = b.record(ops.JoinRows(b.value((number * hidden,), "L"), x)).out
    name = w / "patch_merger.merging_layer.weight"
    weight = WeightSpec(name, (hidden, number * hidden), (name,), turns=number)
    x = b.record(ops.Linear(b.value((hidden,), "L"), x, weight)).out
    return project(b, whole, x, w, text_width(whole.values), bias=whole.flag("multimodal_projector_bias"))


def _longest(processor: Mapping[str, Any], stated: Any) -> int:
    """Return the most pixels of a side, by default the `stated` ones. Raises ConfigError for other sizes."""
    size = processor.get("size", stated)
    sides = list(size.values()) if isinstance(size, Mapping) else [size]
    longest = sides[0] if sides else None
    if type(longest) is not int or longest < 1 or sides.count(longest) < len(sides):
        problem = f"preprocessor_config.json: size = {quoted(size)} is not supported"
        raise ConfigError(problem, 'give {"longest_edge": 1540}')
    return longest
