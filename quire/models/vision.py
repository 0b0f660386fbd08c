"""Vision towers: transformers that give an embedding for each token of an image.

Their program has patches as tokens, an image a row, and the tokens of images as rows with logits: T = n L,
and one more with a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ConfigError, quoted
from quire.images.learned import Learned
from quire.images.patches import MergedPatches
from quire.images.vision import Vision
from quire.models.config import Fields, ModelConfig
from quire.models.pooling import attend_both
from quire.models.tower import (
    add_learned,
    clip_pixels,
    embed_patches,
    image_sizes,
    image_token,
    theta_of,
    tower_fields,
    unquantized,
)
from quire.program import Builder, Names, Value, ops
from quire.program.rope import Rope

_EPS = 1e-6
_QWEN3_VL = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (),
}
_AXES, _THETA = 2, 10_000.0


def qwen3_vl_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of Qwen3-VL (arXiv:2511.21631) and Qwen3.5."""
    cfg, token = tower_fields(raw, _QWEN3_VL), image_token(raw)
    hidden, heads, merge = cfg.size("hidden_size"), cfg.size("num_heads"), cfg.size("spatial_merge_size")
    patch, frames, channels = cfg.size("patch_size"), cfg.size("temporal_patch_size"), cfg.size("in_channels")
    side = int(cfg.size("num_position_embeddings") ** 0.5)
    if hidden % (4 * heads) or channels != 3 or side**2 != cfg.size("num_position_embeddings"):
        raise ConfigError(f"config.json: vision_config: {hidden} numbers in {heads} heads are not supported")
    act, theta, learned = str(cfg.get("hidden_act")), theta_of(cfg, _THETA), Learned(side, ends=True)
    w, b = Names("model.visual"), Builder()
    pixels, numbers = channels * frames * patch**2, 2 * learned.number
    given = b.record(ops.Patches(b.value((pixels + numbers + _AXES,)))).out
    x = embed_patches(b, given, w / "patch_embed.proj", (hidden, channels, frames, patch, patch))
    x = add_learned(b, x, b.slice(given, pixels, numbers), w / "pos_embed.weight", side**2)
    places = b.slice(given, pixels + numbers, _AXES)
    deep, found = cfg.integers("deepstack_visual_indexes"), list[Value]()
    for i in range(cfg.size("depth")):
        p = w / f"blocks.{i}"
        h = b.linear(b.layer_norm(x, p / "norm1", _EPS), p / "attn.qkv", 3 * hidden, bias=True)
        q, k, v = (b.slice(h, n * hidden, (heads, hidden // heads)) for n in range(3))
        q, k = (b.record(ops.RotaryAt(b.value(one.shape), one, places, theta)).out for one in (q, k))
        x = b.add(x, b.linear(attend_both(b, q, k, v), p / "attn.proj", hidden, bias=True))
        h = b.layer_norm(x, p / "norm2", _EPS)
        h = b.activation(b.linear(h, p / "mlp.linear_fc1", cfg.size("intermediate_size"), bias=True), act)
        x = b.add(x, b.linear(h, p / "mlp.linear_fc2", hidden, bias=True))
        if i in deep:
            found.append(_merged(b, cfg, x, w / f"deepstack_merger_list.{deep.index(i)}", after=True))
    out = _merged(b, cfg, x, w / "merger", after=False)
    for more in found:
        out = b.record(ops.Join(b.value((out.width + more.width,), "L"), out, more)).out
    patching = MergedPatches(patch, merge, frames, learned, *image_sizes(processor), *clip_pixels(processor))
    return Vision(unquantized(b.program(out)), patching, token, len(found))


def by_place(rope: Rope, cfg: ModelConfig, sections: tuple[int, ...], *, in_chunks: bool = False) -> Rope:
    """Return a rope by three positions, for as many pairs each as config.json says (mrope_section)."""
    stated = cfg.rope_parameters().get("mrope_section", sections)
    if not isinstance(stated, list | tuple) or len(stated) != 3 or not all(type(n) is int for n in stated):
        raise ConfigError(f"config.json: mrope_section = {quoted(stated)} is not a list of three sizes")
    if in_chunks and (min(stated) < 0 or sum(stated) != rope.dim // 2):
        raise ConfigError(f"config.json: mrope_section = {quoted(stated)} is not of {rope.dim // 2} pairs")
    return replace(rope, sections=tuple(stated), in_chunks=in_chunks)


def _merged(b: Builder, cfg: Fields, x: Value, w: Names, *, after: bool) -> Value:
    """Return one row for each square of patches, normalized before or `after` they are joined."""
    wide = cfg.size("hidden_size") * cfg.size("spatial_merge_size") ** 2
    x = x if after else b.layer_norm(x, w / "norm", _EPS)
    x = b.record(ops.JoinRows(b.value((wide,), "L"), x)).out
    x = b.layer_norm(x, w / "norm", _EPS) if after else x
    h = b.activation(b.linear(x, w / "linear_fc1", wide, bias=True), "gelu")
    return b.linear(h, w / "linear_fc2", cfg.size("out_hidden_size"), bias=True)
