"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm with bias, matrices stored [in, out]."""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import unpack_qkv
from quire.program import Builder, Names, Value


def gpt2(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    def conv1d(x: Value, name: Names, out: int) -> Value:
        return b.linear(x, name, out, bias=True, transposed=True)

    hidden = cfg.hidden_size
    x = placed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"transformer.h.{i}"
        h = b.layer_norm(x, p / "ln_1", cfg.norm_eps)
        q, k, v = unpack_qkv(b, cfg, conv1d(h, p / "attn.c_attn", 3 * hidden))
        a = b.attention(q, k, v, scale=score_scale(cfg, i))
        x = b.add(x, conv1d(a, p / "attn.c_proj", hidden))
        h = b.layer_norm(x, p / "ln_2", cfg.norm_eps)
        h = b.activation(conv1d(h, p / "mlp.c_fc", cfg.intermediate_size), cfg.hidden_act)
        x = b.add(x, conv1d(h, p / "mlp.c_proj", hidden))
    return gpt2_head(b, cfg, x, w)


def placed_tokens(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    """Return the embeddings of tokens and their positions."""
    hidden = cfg.hidden_size
    tokens = b.embed(w / "transformer.wte", cfg.vocab_size, hidden, cfg.tie_word_embeddings)
    return b.add(tokens, b.position_embed(w / "transformer.wpe", cfg.max_position_embeddings, hidden))


def gpt2_head(b: Builder, cfg: ModelConfig, x: Value, w: Names, bias: bool = False) -> Value:
    """Return the logits."""
    x = b.layer_norm(b.sampled_rows(x), w / "transformer.ln_f", cfg.norm_eps)
    matrix = "transformer.wte" if cfg.tie_word_embeddings else "lm_head"
    return b.linear(x, w / matrix, cfg.vocab_size, bias=bias)


def score_scale(cfg: ModelConfig, layer: int = 0) -> float:
    """Return the scale of scores; some relatives of GPT-2 do not scale, or scale down by layer."""
    scale = cfg.head_dim**-0.5 if cfg.flag("scale_attn_weights") else 1.0
    return scale / (layer + 1) if cfg.flag("scale_attn_by_inverse_layer_idx") else scale
