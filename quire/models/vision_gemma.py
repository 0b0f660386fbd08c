"""The vision tower of Gemma 3 (arXiv:2503.19786): SigLIP (arXiv:2303.15343), whose patches are averaged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError, quoted
from quire.images.patches import TiledPatches
from quire.images.sizes import OneSquare
from quire.images.vision import Vision
from quire.models.config import Fields
from quire.models.siglip import SIGLIP, siglip
from quire.models.tower import image_token, normalization, text_width, unquantized
from quire.program import Builder, Names, Value, WeightSpec, ops

_TOKENS = 256  # of an image
_BEGIN, _TOKEN, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
_BILINEAR = 2  # of Pillow


def gemma3_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of Gemma 3, with its projection to the embeddings of the text model."""
    stated = {key: value for key, value in raw["vision_config"].items() if value is not None}
    cfg, patching = Fields({**SIGLIP, **stated}), _patching(raw, stated, processor)
    b = Builder()
    x = siglip(b, cfg, Names("model.vision_tower"), patching.most[0])
    out = _projected(b, cfg, x, raw, patching.merge**2)
    written = _BEGIN, f"\n\n{_BEGIN}{_TOKEN}{_END}\n\n"
    return Vision(unquantized(b.program(out)), patching, image_token(raw), written=written, whole=True)


def _patching(
    raw: Mapping[str, Any], stated: Mapping[str, Any], processor: Mapping[str, Any]
) -> TiledPatches:
    """Return how images are resized and cut. Raises ConfigError for what is not supported."""
    cfg = Fields({"mm_tokens_per_image": _TOKENS, **SIGLIP, **raw, **stated})
    size, patch, tokens = cfg.size("image_size"), cfg.size("patch_size"), cfg.size("mm_tokens_per_image")
    side, of_tokens = size // patch, math.isqrt(tokens)
    if size % patch or cfg.size("num_channels") != 3 or of_tokens**2 != tokens or side % of_tokens:
        problem = f"{tokens} tokens of {side} x {side} patches of {patch} x {patch} pixels"
        raise ConfigError(f"config.json: vision_config: {problem} are not supported")
    if (other := processor.get("size", {"height": size, "width": size})) != {"height": size, "width": size}:
        problem = f"images of {quoted(other)}, but the vision tower takes {size} x {size} pixels"
        raise ConfigError(f"preprocessor_config.json: {problem}")
    resample = processor.get("resample", _BILINEAR)
    return TiledPatches(patch, side // of_tokens, OneSquare(size), normalization(processor), resample)


def _projected(b: Builder, cfg: Fields, x: Value, raw: Mapping[str, Any], number: int) -> Value:
    """Return the means of squares of `number` patches as embeddings of the text model."""
    w, hidden = Names("model.multi_modal_projector"), cfg.size("hidden_size")
    out = text_width(raw)
    x = b.record(ops.MeanOfRows(b.value((hidden,), "L"), x, number)).out
    x = b.rms_norm(x, w / "mm_soft_emb_norm", cfg.positive("layer_norm_eps"), offset=1.0)
    name = w / "mm_input_projection_weight"
    weight = WeightSpec(name, (out, hidden), (name,), transposed=True)
    return b.record(ops.Linear(b.value((out,), "L"), x, weight)).out
