"""Phi-3.5-MoE (arXiv:2404.14219): LayerNorm, biases in attention, experts weighed apart (SparseMixer)."""

from __future__ import annotations

from quire.errors import ConfigError, quoted
from quire.models.config import Fields, ModelConfig
from quire.models.layers import embed_tokens, project_qkv, rotate
from quire.models.moe import expert_stack
from quire.program import Builder, Names, Value
from quire.program.ops.experts import Routing
from quire.program.rope import Rope

PUBLISHED = "PhiMoEForCausalLM"


def phimoe(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias, rope, of_head = cfg.flag("attention_bias"), _rope(cfg), cfg.flag("lm_head_bias")
    if of_head and cfg.tie_word_embeddings:
        raise ConfigError("config.json: lm_head_bias is not supported with tie_word_embeddings")
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.layer_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q, k = rotate(b, q, k, rope)
        h = b.attention(q, k, v, window=cfg.window(i))
        x = b.add(x, b.linear(h, p / "self_attn.o_proj", cfg.hidden_size, bias=bias))
        h = b.layer_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, _experts(b, cfg, h, p / "block_sparse_moe"))
    x = b.layer_norm(b.sampled_rows(x), w / "model.norm", cfg.norm_eps)
    return b.linear(x, w / cfg.lm_head, cfg.vocab_size, bias=of_head)


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    if cfg.size("num_experts_per_tok") != 2:
        raise ConfigError("config.json: num_experts_per_tok is not 2, as the family's router has it")
    margin = 2 * cfg.number("router_jitter_noise", 0, 1)
    scores = b.linear(h, p / "gate", cfg.num_experts)
    experts = expert_stack(cfg, p / "experts", cfg.intermediate_size, ("w1", "w3", "w2"))
    return b.experts(h, scores, experts, routing=Routing(2, margin=margin), activation=cfg.hidden_act)


def _rope(cfg: ModelConfig) -> Rope:
    """Return the rope; a scaled one states the factor of cosine and sine, here one for all lengths.

    Longer contexts have frequencies of their own where config.json has the name of the published code. The
    class of transformers (5.23) takes the same for all.
    """
    given = cfg.rope_parameters()
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ("default", "longrope"):
        raise ConfigError(f"config.json: rope scaling {quoted(kind)} is not that of the family: longrope")
    if kind == "default":
        return cfg.rope(given)
    fields = Fields(given)
    short, long = fields.number("short_mscale", 1e-2, 100), fields.number("long_mscale", 1e-2, 100)
    if short != long:
        raise ConfigError("config.json: short_mscale and long_mscale differ, which is not supported")
    if cfg.get("architectures") != [PUBLISHED] and given.get("short_factor"):
        given = {**given, "long_factor": given["short_factor"]}
    return cfg.rope({**given, "attention_factor": short})
