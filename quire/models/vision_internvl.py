"""The vision tower of InternVL 2.5 to 3.5 (arXiv:2412.05271, 2504.10479, 2508.18265): InternViT (2312.14238),
whose layers scale what they add, and whose patches become tokens by squares. Images are cut into tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError, quoted
from quire.images.marks import Marks
from quire.images.vision import Vision
from quire.models.config import Fields
from quire.models.pooling import attend_both
from quire.models.tower import (
    activate,
    embed_beside_class,
    grid_tiles,
    image_token,
    project,
    require_last_layer,
    square_size,
    text_width,
    tower_fields,
    unquantized,
)
from quire.program import Builder, Names, Value, WeightSpec, ops

_TOWER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "norm_type": "layer_norm",
    "attention_bias": False,
    "use_qk_norm": False,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}
_WHOLE = {
    "downsample_ratio": 0.5,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
MARKS = Marks(alone="<img>", begin="<img>", tile="", overview="", end="</img>")
_TOKEN = 151667
_EPS, _QK_EPS = 1e-5, 1e-6  # of the projector's norm, and of those of queries and keys
_NORMS = ("layer_norm", "rms_norm")


def internvl_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of InternVL, with its projection to the embeddings of the text model."""
    cfg, whole, b, w = tower_fields(raw, _TOWER), Fields({**_WHOLE, **raw}), Builder(), Names("model")
    _check(cfg, whole)
    hidden, tower, merge = cfg.size("hidden_size"), w / "vision_tower", _merge(cfg, whole)
    patching = grid_tiles(cfg, processor, merge, classed=True)  # they are cut, whatever a file says
    own = tower / "embeddings"
    rows, shape = patching.most[0], (hidden, 3, patching.patch, patching.patch)
    token = WeightSpec(own / "cls_token", (1, hidden), (own / "cls_token",), stored=(1, 1, hidden))
    name = own / "position_embeddings"
    places = WeightSpec(name, (rows, hidden), (name,), stored=(1, rows, hidden))
    x = embed_beside_class(b, shape, own / "patch_embeddings.projection", token, places, bias=True)
    for i in range(cfg.size("num_hidden_layers")):
        x = _layer(b, cfg, x, tower / f"encoder.layer.{i}")
    if not cfg.flag("use_mean_pooling"):
        x = b.layer_norm(x, tower / "layernorm", cfg.positive("layer_norm_eps"))
    out = _projected(b, whole, x, w / "multi_modal_projector", merge**2)
    program = unquantized(b.program(out, (own / "mask_token",)))  # of training
    return Vision(program, patching, image_token(raw, _TOKEN), marks=MARKS)


def _check(cfg: Fields, whole: Fields) -> None:
    """Raise ConfigError for a tower that is not supported."""
    require_last_layer(whole)
    hidden, heads = cfg.size("hidden_size"), cfg.size("num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"config.json: vision_config: {hidden} numbers in {heads} heads are not supported")
    known: tuple[tuple[Fields, str, tuple[Any, ...]], ...] = (
        (whole, "vision_feature_select_strategy", ("default",)),
        (cfg, "norm_type", _NORMS),
        (cfg, "use_absolute_position_embeddings", (True,)),
    )
    for fields, name, values in known:
        if (other := fields.get(name)) not in values:
            raise ConfigError(f"config.json: {name} = {quoted(other)} is not supported")


def _layer(b: Builder, cfg: Fields, x: Value, p: Names) -> Value:
    hidden, heads, bias = cfg.size("hidden_size"), cfg.size("num_attention_heads"), cfg.flag("attention_bias")
    a, shape = p / "attention", (heads, hidden // heads)
    h = _norm(b, cfg, x, p / "layernorm_before")
    q, k, v = (b.linear(h, a / f"{name}_proj", shape, bias=bias) for name in "qkv")
    if cfg.flag("use_qk_norm"):  # over all heads together
        flat = {"q_norm": b.slice(q, 0, hidden), "k_norm": b.slice(k, 0, hidden)}
        q, k = (b.slice(b.rms_norm(one, a / name, _QK_EPS), 0, shape) for name, one in flat.items())
    h = b.linear(attend_both(b, q, k, v), a / "projection_layer", hidden, bias=True)
    x = b.add(x, b.scale_by_weight(h, p / "lambda_1", hidden))
    h = _norm(b, cfg, x, p / "layernorm_after")
    h = b.linear(h, p / "mlp.fc1", cfg.size("intermediate_size"), bias=True)
    h = b.linear(activate(b, h, str(cfg.get("hidden_act"))), p / "mlp.fc2", hidden, bias=True)
    return b.add(x, b.scale_by_weight(h, p / "lambda_2", hidden))


def _norm(b: Builder, cfg: Fields, x: Value, w: Names) -> Value:
    norm = b.layer_norm if cfg.get("norm_type") == "layer_norm" else b.rms_norm
    return norm(x, w, cfg.positive("layer_norm_eps"))


def _projected(b: Builder, whole: Fields, x: Value, w: Names, number: int) -> Value:
    """Return squares of `number` patches as embeddings of the text model."""
    x = b.record(ops.JoinRows(b.value((number * x.width,), "L"), x)).out
    return project(b, whole, b.layer_norm(x, w / "layer_norm", _EPS), w, text_width(whole.values))


def _merge(cfg: Fields, whole: Fields) -> int:
    """Return the patches of a side of a token."""
    return int(1 / whole.number("downsample_ratio", 1 / square_size(cfg, "image_size"), 1))
