"""Apertus (arXiv:2509.14233): a norm of each query and key head, an MLP without gate whose activation is
learned (xIELU).
"""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, head, project_qkv, rotate
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops import Xielu

# Default rope parameters.
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def apertus(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias = cfg.flag("attention_bias")
    unstated = not cfg.get("rope_scaling") and cfg.get("rope_parameters") is None
    rope = cfg.rope(_LLAMA3 if unstated else None)
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "attention_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q = b.rms_norm(q, p / "self_attn.q_norm", cfg.norm_eps)
        k = b.rms_norm(k, p / "self_attn.k_norm", cfg.norm_eps)
        q, k = rotate(b, q, k, rope)
        x = b.add(x, b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size, bias=bias))
        h = b.rms_norm(x, p / "feedforward_layernorm", cfg.norm_eps)
        h = b.linear(h, p / "mlp.up_proj", cfg.intermediate_size)
        h = xielu(b, h, p / "mlp.act_fn") if cfg.hidden_act == "xielu" else b.activation(h, cfg.hidden_act)
        x = b.add(x, b.linear(h, p / "mlp.down_proj", cfg.hidden_size))
    return head(b, cfg, x, w)


def xielu(b: Builder, x: Value, w: Names) -> Value:
    """Return the activation with two numbers of the checkpoint."""
    rise, fall = (WeightSpec(w / name, (1,), (w / name,)) for name in ("alpha_p", "alpha_n"))
    return b.record(Xielu(b.value(x.shape, x.count), x, rise, fall, beta=0.5)).out


def unused(cfg: ModelConfig) -> tuple[str, ...]:
    """Return the patterns of two constants: a beta of 0.5, and -1e-6 as a bound that is 0 here."""
    return tuple(f"model.layers.*.mlp.act_fn.{name}" for name in ("beta", "eps"))
