"""SigLIP (arXiv:2303.15343) and CLIP, which towers of several models are, or whose layers they have."""

from __future__ import annotations

from collections.abc import Callable

from quire.errors import ConfigError
from quire.models.config import Fields
from quire.models.tower import activate, add_learned, embed_beside_class, embed_patches
from quire.program import Builder, Names, Value, WeightSpec, ops

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


# CLIP (arXiv:2103.00020), whose layers are the same
CLIP = {**SIGLIP, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}


def siglip(b: Builder, cfg: Fields, w: Names, places: int) -> Value:
    """Record the tower for images of one size, which have `places` patches, each with a learned position."""
    return siglip_layers(b, cfg, siglip_patches(b, cfg, w, places), w)


def siglip_patches(b: Builder, cfg: Fields, w: Names, places: int) -> Value:
    """Record what is before the layers."""
    given = b.record(ops.Patches(b.value((3 * cfg.size("patch_size") ** 2 + 2,)))).out
    return _embedded(b, cfg, w, given, places, mixed=1)


def siglip_rotated(b: Builder, cfg: Fields, w: Names, learned: int, mixed: int, theta: float) -> Value:
    """Record the tower for images of any size: patches mix `mixed` of the `learned` positions, and rotate."""
    before = 3 * cfg.size("patch_size") ** 2 + 2 * mixed
    given = b.record(ops.Patches(b.value((before + _AXES,)))).out
    x, places = _embedded(b, cfg, w, given, learned, mixed), b.slice(given, before, _AXES)
    return siglip_layers(
        b, cfg, x, w, lambda q: b.record(ops.RotaryAt(b.value(q.shape), q, places, theta)).out
    )


def _embedded(b: Builder, cfg: Fields, w: Names, given: Value, learned: int, mixed: int) -> Value:
    """Return patches with a mix of learned positions, from their pixels and what they mix."""
    hidden, patch = cfg.size("hidden_size"), cfg.size("patch_size")
    x = embed_patches(b, given, w / "embeddings.patch_embedding", (hidden, 3, patch, patch))
    name = w / "embeddings.position_embedding.weight"
    return add_learned(b, x, b.slice(given, 3 * patch**2, 2 * mixed), name, learned)


def clip_patches(b: Builder, cfg: Fields, w: Names, places: int) -> Value:
    """Record what is before the layers of CLIP, for so many patches and the class token."""
    hidden, patch, own = cfg.size("hidden_size"), cfg.size("patch_size"), w / "embeddings"
    token = WeightSpec(own / "class_embedding", (1, hidden), (own / "class_embedding",), stored=(hidden,))
    name = own / "position_embedding.weight"
    table = WeightSpec(name, (places, hidden), (name,))
    x = embed_beside_class(b, (hidden, 3, patch, patch), own / "patch_embedding", token, table, bias=False)
    return b.layer_norm(x, w / "pre_layrnorm", cfg.positive("layer_norm_eps"))


def encoder_layers(
    b: Builder, cfg: Fields, x: Value, w: Names, count: int, rotated: Rotated | None = None
) -> Value:
    """Record the first layers of embedded patches, with queries and keys `rotated` if so."""
    for i in range(count):
        x = _layer(b, cfg, x, w / f"encoder.layers.{i}", rotated)
    return x


def siglip_layers(b: Builder, cfg: Fields, x: Value, w: Names, rotated: Rotated | None = None) -> Value:
    """Record the layers of embedded patches, with queries and keys `rotated` if so, and the norm after."""
    x = encoder_layers(b, cfg, x, w, cfg.size("num_hidden_layers"), rotated)
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
    return b.add(x, b.linear(activate(b, h, str(cfg.get("hidden_act"))), p / "mlp.fc2", hidden, bias=True))
