"""SigLIP (arXiv:2303.15343), which towers of several models are, or whose layers they have."""

from __future__ import annotations

from collections.abc import Callable

from quire.errors import ConfigError
from quire.models.config import Fields
from quire.models.tower import add_learned, embed_patches
from quire.program import Builder, Names, Value, ops

Rotated = Callable[[Value], Value]
_AXES = 2  # of places: rows and columns

SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def siglip(
    b: Builder, cfg: Fields, w: Names, learned: int, mixed: int = 1, theta: float | None = None
) -> Value:
    """Record the tower. Patches mix so many of the `learned` positions; with `theta` they rotate by place."""
    hidden, patch = cfg.size("hidden_size"), cfg.size("patch_size")
    pixels, numbers, axes = 3 * patch**2, 2 * mixed, 0 if theta is None else _AXES
    given = b.record(ops.Patches(b.value((pixels + numbers + axes,)))).out
    x = embed_patches(b, given, w / "embeddings.patch_embedding", (hidden, 3, patch, patch))
    name = w / "embeddings.position_embedding.weight"
    x = add_learned(b, x, b.slice(given, pixels, numbers), name, learned)
    if theta is None:
        return siglip_layers(b, cfg, x, w)
    places = b.slice(given, pixels + numbers, axes)
    return siglip_layers(
        b, cfg, x, w, lambda q: b.record(ops.RotaryAt(b.value(q.shape), q, places, theta)).out
    )


def siglip_layers(b: Builder, cfg: Fields, x: Value, w: Names, rotated: Rotated | None = None) -> Value:
    """Record the layers of embedded patches, with queries and keys `rotated` if so, and the norm after."""
    for i in range(cfg.size("num_hidden_layers")):
        x = _layer(b, cfg, x, w / f"encoder.layers.{i}", rotated)
    return b.layer_norm(x, w / "post_layernorm", cfg.positive("layer_norm_eps"))


def _layer(b: Builder, cfg: Fields, x: Value, p: Names, rotated: Rotated | None) -> Value:
    """Record a layer: attention and an MLP, each after a layer norm."""
    hidden, heads = cfg.size("hidden_size"), cfg.size("num_attention_heads")
    eps = cfg.positive("layer_norm_eps")
    if hidden % heads:
        raise ConfigError(f"config.json: vision_config: {hidden} numbers in {heads} heads are not supported")
    shape = heads, hidden // heads
    scale = shape[1] ** -0.5
    h = b.layer_norm(x, p / "layer_norm1", eps)
    q, k, v = (b.linear(h, p / f"self_attn.{name}_proj", shape, bias=True) for name in "qkv")
    if rotated is not None:
        q, k = rotated(q), rotated(k)
    attended = b.record(ops.RowAttention(b.value((hidden,)), q, k, v, scale)).out
    x = b.add(x, b.linear(attended, p / "self_attn.out_proj", hidden, bias=True))
    h = b.layer_norm(x, p / "layer_norm2", eps)
    h = b.linear(h, p / "mlp.fc1", cfg.size("intermediate_size"), bias=True)
    return b.add(x, b.linear(b.activation(h, str(cfg.get("hidden_act"))), p / "mlp.fc2", hidden, bias=True))
