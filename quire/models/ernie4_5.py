"""Ernie 4.5 (Baidu, 2025), text: Llama's block with neighbours rotated in pairs; some have experts. Those
that see have further experts for images, which are not computed.
"""

from __future__ import annotations

from dataclasses import replace

from quire.errors import ConfigError
from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, project_qkv, rotate
from quire.models.moe import expert_stack, listed_sparse
from quire.program import Builder, LeftOut, Names, Rows, Value, WeightSpec
from quire.program.ops.experts import Routing
from quire.program.rope import Rope

_WIDTHS = (1536, 512)  # of experts for text and images, where none are stated
_FLOOR = 1e-12  # of the sum of shares, where theirs is the least value of it


def ernie4_5(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _layers(b, cfg, w, cfg.rope(interleaved=True))


def ernie4_5_vl(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    """Record the same of a model that sees, with its experts for text alone."""
    given = cfg.rope_parameters()
    if (given.get("rope_type") or given.get("type") or "default") != "default":
        raise ConfigError("config.json: a scaled rope is not supported for this architecture")
    return _layers(b, _for_text(cfg), w, cfg.rope(given, interleaved=True))


def for_images(cfg: ModelConfig) -> tuple[LeftOut, ...]:
    """Return the experts for images, which come after as many for text."""
    count, p = _for_text(cfg).num_experts, "model.layers.*.mlp"
    experts = (f"{p}.experts.{expert}.*" for expert in range(count, 2 * count))
    return (LeftOut("the experts for images", (f"{p}.gate.weight_1", *experts)),)


def _for_text(cfg: ModelConfig) -> ModelConfig:
    """Return the config with the numbers of the experts for text, of which config.json has both kinds."""
    count, widths = cfg.get("num_experts"), cfg.integers("moe_intermediate_size") or _WIDTHS
    if isinstance(count, list) and len(count) == 2 and count[0] == count[1]:  # older files
        count = count[0]
    own = {"num_experts": count, "moe_intermediate_size": widths[0]}
    return replace(cfg, values={**cfg.values, **own})


def _layers(b: Builder, cfg: ModelConfig, w: Names, rope: Rope) -> Value:
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn")
        q, k = rotate(b, q, k, rope)
        x = b.add(x, b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        mlp = _experts if _is_sparse(cfg, i) else gated_mlp
        x = b.add(x, mlp(b, cfg, h, p / "mlp"))
    return head(b, cfg, x, w)


def _is_sparse(cfg: ModelConfig, layer: int) -> bool:
    """Return True for every moe_layer_interval-th layer, from the first to the last that are stated."""
    if "num_experts" not in cfg.values:
        return False
    if _sees(cfg):
        return listed_sparse(cfg, layer, otherwise=layer > 0)
    first, last = cfg.number("moe_layer_start_index"), cfg.number("moe_layer_end_index")
    within = first <= layer and (last == -1 or layer <= last)
    return within and (layer + 1) % cfg.size("moe_layer_interval") == 0


def _sees(cfg: ModelConfig) -> bool:
    return "mlp_layer_types" in cfg.values


def _experts(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    inner, name = cfg.size("moe_intermediate_size"), p / "moe_statics.e_score_correction_bias"
    rows = Rows(2, ((0, 1),)) if _sees(cfg) else None  # of both kinds of experts
    bias = WeightSpec(name, (1, cfg.num_experts), (name,), rows=rows)
    chosen = Routing(cfg.size("num_experts_per_tok"), normalized=True, bias=bias, floor=_FLOOR)
    scores = b.linear(h, p / "gate", cfg.num_experts, transposed=_sees(cfg))
    experts = expert_stack(cfg, p / "experts", inner)
    mixed = b.experts(h, scores, experts, routing=chosen, activation=cfg.hidden_act)
    if not cfg.get("moe_num_shared_experts"):
        return mixed
    width = inner * cfg.size("moe_num_shared_experts")
    return b.add(mixed, gated_mlp(b, cfg, h, p / "shared_experts", width=width))
