"""Qwen3-Next and Qwen3.5, text: gated delta nets (arXiv:2412.06464) between layers of gated attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.images.vision import Vision
from quire.models.config import FULL, LINEAR, MAX_HEAD_DIM, MAX_KERNEL, ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, rotate
from quire.models.moe import expert_stack, fused_experts, gated_shared_expert, is_sparse
from quire.models.prediction import Has, joined, predicting
from quire.models.tower import place_images
from quire.models.vision import by_place
from quire.program import Builder, Names, Program, Rows, Value
from quire.program.ops.experts import Routing
from quire.program.rope import Rope

_SECTIONS = (11, 11, 10)  # of Qwen3.5


def qwen3_next(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, _packed_inputs)


def qwen3_5(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    return _decoder(b, cfg, w, _inputs, vision)


def _decoder(b: Builder, cfg: ModelConfig, w: Names, inputs: Inputs, vision: Vision | None = None) -> Value:
    kinds, rope = _kinds(cfg), cfg.rope()
    x = embed_tokens(b, cfg, w)
    if vision is not None:
        x, rope = place_images(b, x), by_place(rope, cfg, _SECTIONS)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        if kinds[i] == LINEAR:
            h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps, 1.0)
            x = _with_mlp(b, cfg, i, b.add(x, _delta_net(b, cfg, h, p / "linear_attn", inputs)), p)
        else:
            x = full_layer(b, cfg, i, x, p, rope)
    return head(b, cfg, x, w, norm_offset=1.0)


def qwen_prediction(b: Builder, cfg: ModelConfig, w: Names, has: Has) -> Program:
    """Record that of Qwen3-Next and Qwen3.5. It hands on hidden states after the norm, as the model does."""
    p, names = w / "mtp", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc")
    x = joined(b, cfg, w, p, names, 1.0)
    x = full_layer(
        b, cfg, 0, x, p / "layers.0", cfg.rope(), fused=has(p / "layers.0.mlp.experts.gate_up_proj")
    )
    x = b.rms_norm(b.sampled_rows(x), p / "norm", cfg.norm_eps, 1.0)
    return predicting(b, cfg, w, x, x)


def full_layer(
    b: Builder, cfg: ModelConfig, layer: int, x: Value, p: Names, rope: Rope, fused: bool | None = None
) -> Value:
    """Return the output of a layer with attention. `fused` experts are in one tensor, by default as the
    family has them.
    """
    h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps, 1.0)
    return _with_mlp(b, cfg, layer, b.add(x, _attention(b, cfg, h, p / "self_attn", rope)), p, fused)


def _with_mlp(
    b: Builder, cfg: ModelConfig, layer: int, x: Value, p: Names, fused: bool | None = None
) -> Value:
    h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps, 1.0)
    return b.add(x, _mlp(b, cfg, layer, h, p / "mlp", fused))


def _kinds(cfg: ModelConfig) -> tuple[str, ...]:
    """Return the type of each layer; without a list every full_attention_interval-th has attention."""
    if cfg.get("layer_types"):
        return cfg.layer_types
    every = cfg.size("full_attention_interval")
    return tuple(LINEAR if (i + 1) % every else FULL for i in range(cfg.num_hidden_layers))


def _attention(b: Builder, cfg: ModelConfig, h: Value, p: Names, rope: Rope) -> Value:
    """Return attention whose outputs are gated; queries and gates alternate by head in one matrix."""
    heads, groups, dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    bias = cfg.flag("attention_bias")
    q = b.linear(h, p / "q_proj", (heads, dim), bias=bias, rows=Rows(2 * dim, ((0, dim),)), part="query")
    gate = b.linear(h, p / "q_proj", heads * dim, bias=bias, rows=Rows(2 * dim, ((dim, dim),)), part="gate")
    k, v = (b.linear(h, p / name, (groups, dim), bias=bias) for name in ("k_proj", "v_proj"))
    q = b.rms_norm(q, p / "q_norm", cfg.norm_eps, 1.0)
    k = b.rms_norm(k, p / "k_norm", cfg.norm_eps, 1.0)
    q, k = rotate(b, q, k, rope)
    gated = b.gated_activation(gate, b.attention(q, k, v), "sigmoid")
    return b.linear(gated, p / "o_proj", cfg.hidden_size, bias=bias)


def _delta_net(b: Builder, cfg: ModelConfig, h: Value, p: Names, inputs: Inputs) -> Value:
    """Return the gated delta rule over a short convolution of its inputs, normalized and then gated."""
    sizes = NetSizes.of(cfg)
    x, z, beta, decay = inputs(b, h, p, sizes)
    kernel = cfg.size("linear_conv_kernel_dim", MAX_KERNEL)
    x = b.short_convolution(x, p / "conv1d", kernel, activation=cfg.hidden_act)
    out = b.delta_rule(x, decay, beta, p, sizes.key_heads, sizes.dk)
    return b.linear(b.gated_rms_norm(out, z, p / "norm", cfg.norm_eps), p / "out_proj", cfg.hidden_size)


@dataclass(frozen=True, slots=True)
class NetSizes:
    """The heads of a delta net; `heads` of values share the key heads evenly."""

    key_heads: int
    heads: int
    dk: int
    dv: int

    @classmethod
    def of(cls, cfg: ModelConfig) -> NetSizes:
        """Read them. Raises ConfigError if heads cannot be shared."""
        key_heads, heads = cfg.size("linear_num_key_heads"), cfg.size("linear_num_value_heads")
        if heads % key_heads:
            problem = f"{heads} linear_num_value_heads cannot share {key_heads} linear_num_key_heads evenly"
            raise ConfigError(f"config.json: {problem}")
        dims = (cfg.size(f"linear_{name}_head_dim", MAX_HEAD_DIM) for name in ("key", "value"))
        return cls(key_heads, heads, *dims)

    @property
    def width(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.key_heads * self.dk + self.heads * self.dv


# Records the values of queries, keys and values, of the gate, of beta and of the decay.
Inputs = Callable[[Builder, Value, Names, NetSizes], tuple[Value, Value, Value, Value]]


def _inputs(b: Builder, h: Value, p: Names, n: NetSizes) -> tuple[Value, Value, Value, Value]:
    """Qwen3.5: a matrix for each."""
    x, z = b.linear(h, p / "in_proj_qkv", n.width), b.linear(h, p / "in_proj_z", (n.heads, n.dv))
    return x, z, b.linear(h, p / "in_proj_b", n.heads), b.linear(h, p / "in_proj_a", n.heads)


def _packed_inputs(b: Builder, h: Value, p: Names, n: NetSizes) -> tuple[Value, Value, Value, Value]:
    """Qwen3-Next: two matrices, with what belongs to a key head side by side."""
    each = n.heads // n.key_heads
    keys, values = 2 * n.dk, each * n.dv
    period, qkv, gates = keys + 2 * values, ((0, n.dk), (n.dk, n.dk), (keys, values)), (keys + values, values)
    packed, both = p / "in_proj_qkvz", p / "in_proj_ba"
    x = b.linear(h, packed, n.width, rows=Rows(period, qkv), part="qkv")
    z = b.linear(h, packed, (n.heads, n.dv), rows=Rows(period, (gates,)), part="z")
    beta = b.linear(h, both, n.heads, rows=Rows(2 * each, ((0, each),)), part="b")
    return x, z, beta, b.linear(h, both, n.heads, rows=Rows(2 * each, ((each, each),)), part="a")


def _mlp(b: Builder, cfg: ModelConfig, layer: int, h: Value, p: Names, fused: bool | None = None) -> Value:
    """Return a gated MLP, or the mixture of experts and a shared one, which a sigmoid of each token gates."""
    packed = "decoder_sparse_step" not in cfg.values  # all layers of Qwen3.5 are alike
    if not (cfg.get("num_experts") if packed else is_sparse(cfg, layer)):
        return gated_mlp(b, cfg, h, p)
    inner = cfg.size("moe_intermediate_size")
    stored = fused_experts if (packed if fused is None else fused) else expert_stack
    experts = stored(cfg, p / "experts", inner)
    shared = gated_shared_expert(b, cfg, h, p)
    chosen = Routing(cfg.size("num_experts_per_tok"), normalized=packed or cfg.flag("norm_topk_prob"))
    scores = b.linear(h, p / "gate", cfg.num_experts)
    return b.add(b.experts(h, scores, experts, routing=chosen, activation=cfg.hidden_act), shared)
