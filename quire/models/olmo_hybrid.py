"""OLMo Hybrid (Ai2, 2026): gated delta nets (arXiv:2412.06464), whose states may have negative eigenvalues
(2411.12537) and which have their norms before each part, between OLMo 3's layers without windows.
"""

from __future__ import annotations

from quire.models.config import FULL, LINEAR, MAX_HEAD_DIM, MAX_KERNEL, MAX_LAYERS, Fields, ModelConfig
from quire.models.layers import convolved_qkv, embed_tokens, gated_mlp, head
from quire.models.olmo2 import full_layer
from quire.program import Builder, Names, Value
from quire.program.rope import Rope

_EPS = 1e-5  # of the gated norms, whatever rms_norm_eps is


def layers_of(fields: Fields) -> tuple[str, ...]:
    """Return the type of each layer where none is stated: every fourth has attention, at least the last."""
    if fields.get("layer_types"):
        return ()
    layers = fields.size("num_hidden_layers", MAX_LAYERS)
    return tuple(FULL if i % 4 == 3 or (layers < 4 and i == layers - 1) else LINEAR for i in range(layers))


def olmo_hybrid(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x, rope = embed_tokens(b, cfg, w), _rope(cfg)
    for i, kind in enumerate(cfg.layer_types):
        p = w / f"model.layers.{i}"
        if kind == LINEAR:
            h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
            x = b.add(x, _delta_net(b, cfg, h, p / "linear_attn"))
            h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
            x = b.add(x, gated_mlp(b, cfg, h, p / "mlp"))
        else:
            x = full_layer(b, cfg, x, p, rope)
    return head(b, cfg, x, w)


def _rope(cfg: ModelConfig) -> Rope | None:
    """Return the rope of layers with attention; a base of null, as published, says that they have none."""
    base = {"rope_theta": cfg.get("rope_theta"), **cfg.rope_parameters()}["rope_theta"]
    return None if base is None else cfg.rope()


def _delta_net(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    """Return the gated delta rule over short convolutions, normalized and then gated."""
    attending, hidden = cfg.num_attention_heads, cfg.hidden_size
    key_heads = cfg.optional_size("linear_num_key_heads") or attending
    heads = cfg.optional_size("linear_num_value_heads") or attending
    dk = _head_dim(cfg, "key", int(0.75 * hidden / key_heads))
    dv = _head_dim(cfg, "value", 2 * dk)
    kernel = cfg.size("linear_conv_kernel_dim", MAX_KERNEL)
    qkv = convolved_qkv(b, cfg, h, p, key_heads * dk, heads * dv, kernel)
    decay, beta = b.linear(h, p / "a_proj", heads), b.linear(h, p / "b_proj", heads)
    factor = 2.0 if cfg.flag("linear_allow_neg_eigval") else 1.0
    out = b.delta_rule(qkv, decay, beta, p, key_heads, dk, beta_factor=factor)
    gate = b.linear(h, p / "g_proj", (heads, dv))
    return b.linear(b.gated_rms_norm(out, gate, p / "o_norm", _EPS), p / "o_proj", hidden)


def _head_dim(cfg: ModelConfig, part: str, unstated: int) -> int:
    """Return the numbers of a key or a value. Raises ConfigError for too many, stated or not."""
    name = f"linear_{part}_head_dim"
    stated = cfg.get(name)
    return Fields({name: unstated if stated is None else stated}).size(name, MAX_HEAD_DIM)
