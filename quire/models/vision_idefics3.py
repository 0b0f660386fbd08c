"""The vision tower of Idefics3 (arXiv:2408.12637), SmolVLM and SmolVLM2 (2504.05299): SigLIP, whose patches
become tokens by one matrix. Images are cut into tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError, quoted
from quire.images.marks import Marks
from quire.images.patches import TiledPatches
from quire.images.sizes import SquareTiles
from quire.images.vision import Vision
from quire.models.config import Fields
from quire.models.siglip import SIGLIP, siglip
from quire.models.tower import (
    image_token,
    normalization,
    require_squares,
    text_width,
    tower_fields,
    unquantized,
)
from quire.program import Builder, Names, ops

_TOWER = {**SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_AROUND, _OVERVIEW = "<fake_token_around_image>", "<global-img>"
MARKS = Marks(
    alone=_AROUND + _OVERVIEW,
    tile=_AROUND + "<row_{row}_col_{column}>",
    row_end="\n",
    overview="\n" + _AROUND + _OVERVIEW,
    end=_AROUND,
)
_TOKEN, _LONGEST, _SIDE, _MOST = 128257, 1456, 364, 4096
_LANCZOS = 1  # of Pillow


def idefics3_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of Idefics3, with its projection to the embeddings of the text model."""
    cfg, b = tower_fields(raw, _TOWER), Builder()
    patching = _patching(cfg, Fields({"scale_factor": 2, **raw}), processor)
    x = siglip(b, cfg, Names("model.vision_model"), patching.most[0])
    x = b.record(ops.JoinRows(b.value((patching.merge**2 * x.width,), "L"), x)).out
    out = b.linear(x, Names("model.connector.modality_projection.proj"), text_width(raw))
    return Vision(unquantized(b.program(out)), patching, image_token(raw, _TOKEN), marks=MARKS)


def _patching(cfg: Fields, whole: Fields, processor: Mapping[str, Any]) -> TiledPatches:
    """Return how images are resized and cut. Raises ConfigError for what is not supported."""
    patch, merge, side = cfg.size("patch_size"), whole.size("scale_factor"), cfg.size("image_size")
    require_squares(side, patch, merge, cfg.size("num_channels"))
    if (tile := _edge(processor, "max_image_size", _SIDE)) != side:
        problem = f"tiles of {tile} pixels, but the vision tower takes {side}"
        raise ConfigError(f"preprocessor_config.json: {problem}")
    longest, cut = _edge(processor, "size", _LONGEST), {"do_image_splitting": True, **processor}
    parts = (-(-longest // side)) ** 2 + 1 if Fields(cut).flag("do_image_splitting") else 1
    rule = SquareTiles(longest, side, parts if longest > side else 1)
    return TiledPatches(patch, merge, rule, normalization(processor), processor.get("resample", _LANCZOS))


def _edge(processor: Mapping[str, Any], name: str, default: int) -> int:
    """Return the number of pixels of a longer side. Raises ConfigError for other sizes."""
    size = processor.get(name, {"longest_edge": default})
    edge = size.get("longest_edge") if isinstance(size, Mapping) else None
    if type(edge) is not int or not 0 < edge <= _MOST:
        problem = f"preprocessor_config.json: {name} = {quoted(size)} is not supported"
        raise ConfigError(problem, f'give {{"longest_edge": {default}}}')
    return edge
