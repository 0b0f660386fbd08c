"""SigLIP (arXiv:2303.15343), which towers of several models are, or whose layers they have."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.models.config import Fields
from quire.models.tower import add_learned, embed_patches
from quire.program import Builder, Names, Value, ops

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


def siglip(b: Builder, cfg: Fields, w: Names, places: int) -> Value:
    """Record the tower for images of one size, which have `places` patches, each with a learned position."""
    hidden, patch = cfg.size("hidden_size"), cfg.size("patch_size")
    pixels = 3 * patch**2
    given = b.record(ops.Patches(b.value((pixels + 2,)))).out
    x = embed_patches(b, given, w / "embeddings.patch_embedding", (hidden, 3, patch, patch))
    x = add_learned(b, x, b.slice(given, pixels, 2), w / "embeddings.position_embedding.weight", places)
    return siglip_layers(b, cfg, x, w)


def siglip_layers(b: Builder, cfg: Fields, x: Value, w: Names) -> Value:
    """Record the layers of embedded patches, and the norm after them."""
    for i in range(cfg.size("num_hidden_layers")):
        x = _layer(b, cfg, x, w / f"encoder.layers.{i}")
    return b.layer_norm(x, w / "post_layernorm", cfg.positive("layer_norm_eps"))


def _layer(b: Builder, cfg: Fields, x: Value, p: Names) -> Value:
    """Record a layer: attention and an MLP, each after a layer norm."""
    hidden, heads = cfg.size("hidden_size"), cfg.size("num_attention_heads")
    eps = cfg.positive("layer_norm_eps")
    if hidden % heads:
        raise ConfigError(f"config.json: vision_config: {hidden} numbers in {heads} heads are not supported")
    shape = heads, hidden // heads
    scale = shape[1] ** -0.5
    h = b.layer_norm(x, p / "layer_norm1", eps)
    q, k, v = (b.linear(h, p / f"self_attn.{name}_proj", shape, bias=True) for name in "qkv")
    attended = b.record(ops.RowAttention(b.value((hidden,)), q, k, v, scale)).out
    x = b.add(x, b.linear(attended, p / "self_attn.out_proj", hidden, bias=True))
    h = b.layer_norm(x, p / "layer_norm2", eps)
    h = b.linear(h, p / "mlp.fc1", cfg.size("intermediate_size"), bias=True)
    return b.add(x, b.linear(b.activation(h, str(cfg.get("hidden_act"))), p / "mlp.fc2", hidden, bias=True))
