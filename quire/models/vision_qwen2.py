"""The vision towers of Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (2502.13923): patches of two frames without
learned positions, rotated by row and column. Most layers of the second see only a window of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import ConfigError
from quire.images.patches import MergedPatches
from quire.images.vision import Vision
from quire.images.windows import Windows
from quire.models.config import Fields
from quire.models.pooling import attend_both
from quire.models.tower import (
    activate,
    clip_pixels,
    embed_patches,
    image_sizes,
    image_token,
    require_same,
    theta_of,
    tower_fields,
    unquantized,
)
from quire.program import Builder, Names, Value, ops

_EPS = 1e-6
_SIZES = {
    "depth": 32,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2_VL = {**_SIZES, "embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu", "mlp_ratio": 4}
_QWEN2_5_VL = {
    **_SIZES,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
_TOKEN = 151655  # that stands for an image
_AXES, _THETA = 2, 10_000.0
Layer = Callable[[Builder, Value, Names], Value]


def qwen2_vl_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of Qwen2-VL: blocks with layer norms and an MLP without a gate."""
    cfg = tower_fields(raw, _QWEN2_VL)
    width, act = cfg.size("embed_dim"), str(cfg.get("hidden_act"))
    inner = round(width * cfg.positive("mlp_ratio"))

    def mlp(b: Builder, h: Value, p: Names) -> Value:
        h = b.linear(h, p / "fc1", inner, bias=True)
        return b.linear(activate(b, h, act), p / "fc2", width, bias=True)

    def norm(b: Builder, x: Value, p: Names) -> Value:
        return b.layer_norm(x, p, _EPS)

    return _tower(raw, processor, cfg, (width, cfg.size("hidden_size")), norm, mlp)


def qwen2_5_vl_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of Qwen2.5-VL: blocks with RMS norms and a gated MLP, and windows."""
    cfg = tower_fields(raw, _QWEN2_5_VL)
    width, inner, act = cfg.size("hidden_size"), cfg.size("intermediate_size"), str(cfg.get("hidden_act"))
    merge, patch = cfg.size("spatial_merge_size"), cfg.size("patch_size")
    side = cfg.size("window_size") // merge // patch
    if not side:
        problem = f"windows of {cfg.size('window_size')} pixels, less than a token has, are not supported"
        raise ConfigError(f"config.json: vision_config: {problem}")

    def mlp(b: Builder, h: Value, p: Names) -> Value:
        gate, up = (b.linear(h, p / name, inner, bias=True) for name in ("gate_proj", "up_proj"))
        return b.linear(b.gated_activation(gate, up, act), p / "down_proj", width, bias=True)

    def norm(b: Builder, x: Value, p: Names) -> Value:
        return b.rms_norm(x, p, _EPS)

    sizes = width, cfg.size("out_hidden_size")
    return _tower(raw, processor, cfg, sizes, norm, mlp, Windows(side, merge**2))


def _tower(
    raw: Mapping[str, Any],
    processor: Mapping[str, Any],
    cfg: Fields,
    sizes: tuple[int, int],
    norm: Layer,
    mlp: Layer,
    windows: Windows | None = None,
) -> Vision:
    """Record a tower of such layers; `sizes` are those of its hidden states and of its embeddings."""
    width, out_width = sizes
    heads, merge = cfg.size("num_heads"), cfg.size("spatial_merge_size")
    patch, frames, channels = cfg.size("patch_size"), cfg.size("temporal_patch_size"), cfg.size("in_channels")
    if width % (2 * _AXES * heads) or channels != 3:
        raise ConfigError(f"config.json: vision_config: {width} numbers in {heads} heads are not supported")
    require_same(processor, {"patch_size": patch, "merge_size": merge, "temporal_patch_size": frames})
    whole, theta = cfg.integers("fullatt_block_indexes"), theta_of(cfg, _THETA)
    w, b, pixels = Names("model.visual"), Builder(), channels * frames * patch**2
    given = b.record(ops.Patches(b.value((pixels + _AXES,)))).out
    shape = (width, channels, frames, patch, patch)
    x = embed_patches(b, given, w / "patch_embed.proj", shape, bias=False)
    places = b.slice(given, pixels, _AXES)
    for i in range(cfg.size("depth")):
        p = w / f"blocks.{i}"
        h = b.linear(norm(b, x, p / "norm1"), p / "attn.qkv", 3 * width, bias=True)
        q, k, v = (b.slice(h, n * width, (heads, width // heads)) for n in range(3))
        q, k = (b.record(ops.RotaryAt(b.value(one.shape), one, places, theta)).out for one in (q, k))
        h = attend_both(b, q, k, v, window=None if windows is None or i in whole else windows.most)
        x = b.add(x, b.linear(h, p / "attn.proj", width, bias=True))
        x = b.add(x, mlp(b, norm(b, x, p / "norm2"), p / "mlp"))
    x = norm(b, x, w / "merger.ln_q")
    x = b.record(ops.JoinRows(b.value((width * merge**2,), "L"), x)).out
    x = b.activation(b.linear(x, w / "merger.mlp.0", x.width, bias=True), "gelu")
    out = b.linear(x, w / "merger.mlp.2", out_width, bias=True)
    patching = MergedPatches(patch, merge, frames, None, *image_sizes(processor), *clip_pixels(processor))
    return Vision(unquantized(b.program(out)), patching, image_token(raw, _TOKEN), windows=windows)
