"""The vision tower of LFM2-VL (Liquid AI, arXiv:2511.23404): SigLIP 2 (arXiv:2502.14786) for images of any
shape, of which large ones are cut into tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError
from quire.images.marks import Marks
from quire.images.patches import NaflexPatches
from quire.images.sizes import Tiles
from quire.images.vision import Vision
from quire.models.config import Fields
from quire.models.siglip import SIGLIP, siglip_layers
from quire.models.tower import (
    image_token,
    normalization,
    project,
    require_last_layer,
    require_same,
    text_width,
    tower_fields,
    unquantized,
)
from quire.program import Builder, Names, Value, ops

_TOWER = {**{key: value for key, value in SIGLIP.items() if key != "image_size"}, "num_patches": 256}
_WHOLE = {
    "downsample_factor": 2,
    "projector_hidden_size": 2560,
    "projector_hidden_act": "gelu",
    "projector_bias": True,
    "projector_use_layernorm": True,
    "vision_feature_layer": -1,
}
_PROCESSOR = {
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": 10,
    "use_thumbnail": True,
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "tile_size": 512,
    "max_pixels_tolerance": 2.0,
}
MARKS = Marks(
    alone="<|image_start|>",
    begin="<|image_start|>",
    tile="<|img_row_{row}_col_{column}|>",
    overview="<|img_thumbnail|>",
    end="<|image_end|>",
)
_TOKEN, _MOST_TILES = 396, 100
_EPS = 1e-5  # of the projector's norm
_BILINEAR = 2  # of Pillow


def lfm2_vl_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of LFM2-VL, with its projection to the embeddings of the text model."""
    cfg, whole, b, w = tower_fields(raw, _TOWER), Fields({**_WHOLE, **raw}), Builder(), Names("model")
    require_last_layer(whole)
    patching, hidden = _patching(cfg, whole, processor), cfg.size("hidden_size")
    pixels, places, tower = 3 * patching.patch**2, patching.side**2, w / "vision_tower"
    given = b.record(ops.Patches(b.value((pixels + places,)))).out
    x = b.linear(b.slice(given, 0, pixels), tower / "embeddings.patch_embedding", hidden, bias=True)
    table = tower / "embeddings.position_embedding"
    x = b.add(x, b.linear(b.slice(given, pixels, places), table, hidden, transposed=True))
    x = siglip_layers(b, cfg, x, tower)
    out = _projected(b, whole, x, w / "multi_modal_projector", patching.merge**2)
    program = unquantized(b.program(out, (tower / "head.*",)))  # its vector of a whole image is not used
    return Vision(program, patching, image_token(raw, _TOKEN), marks=MARKS)


def _projected(b: Builder, whole: Fields, x: Value, w: Names, number: int) -> Value:
    """Return squares of `number` patches as embeddings of the text model."""
    out, bias = text_width(whole.values), whole.flag("projector_bias")
    x = b.record(ops.JoinRows(b.value((number * x.width,), "L"), x)).out
    if whole.flag("projector_use_layernorm"):
        x = b.layer_norm(x, w / "layer_norm", _EPS)
    return project(b, whole, x, w, out, inner=whole.size("projector_hidden_size"), bias=bias)


def _patching(cfg: Fields, whole: Fields, processor: Mapping[str, Any]) -> NaflexPatches:
    """Return how images are resized and cut. Raises ConfigError for what is not supported."""
    patch, merge = cfg.size("patch_size"), whole.size("downsample_factor")
    places = cfg.size("num_patches")
    side = math.isqrt(places)
    if side**2 != places or cfg.size("num_channels") != 3:
        raise ConfigError(f"config.json: vision_config: {places} positions of patches are not supported")
    require_same(processor, {"encoder_patch_size": patch, "downsample_factor": merge})
    rule = _tiles(Fields({**_PROCESSOR, **processor}), patch, merge)
    pixels = normalization(processor)
    return NaflexPatches(patch, merge, side, rule, pixels, processor.get("resample", _BILINEAR))


def _tiles(cfg: Fields, patch: int, merge: int) -> Tiles:
    unit, side = patch * merge, cfg.size("tile_size")
    least, most = cfg.size("min_image_tokens"), cfg.size("max_image_tokens")
    fewest, tiles = cfg.size("min_tiles"), cfg.size("max_tiles", _MOST_TILES)
    if not cfg.flag("do_image_splitting") or fewest == tiles == 1:
        fewest, tiles = 2, 0
    if side % unit or least > most or (tiles and not 1 < fewest <= tiles):
        problem = f"{fewest} to {tiles} tiles of {side} pixels, images of {least} to {most} tokens"
        raise ConfigError(f"preprocessor_config.json: {problem} are not supported")
    tolerance, overview = cfg.positive("max_pixels_tolerance"), cfg.flag("use_thumbnail")
    return Tiles(patch, unit, least, most, side, fewest, tiles, tolerance, overview)
