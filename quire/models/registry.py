"""The families by the architecture name that a checkpoint's config.json gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError, did_you_mean
from quire.models.cohere2 import cohere2
from quire.models.config import ModelConfig, Slides, read_config, read_size
from quire.models.gemma import gemma
from quire.models.glm4 import glm4
from quire.models.gpt2 import gpt2
from quire.models.granite import granite
from quire.models.llama import llama, qwen2
from quire.models.moe import gpt_oss, mixtral, olmoe
from quire.models.olmo2 import olmo2
from quire.models.phi3 import phi3
from quire.models.qwen3 import qwen3
from quire.program import Builder, Names, Program, Value
from quire.program.ops import Rotary
from quire.program.rope import Rope

Record = Callable[[Builder, ModelConfig, Names], Value]


@dataclass(frozen=True, slots=True)
class Family:
    """A recording function and what its config.json leaves out when it equals the family's default."""

    record: Record
    defaults: Mapping[str, Any] = field(default_factory=dict)
    slides: Slides = lambda values, layer: True


def _all_but_every(period: int) -> Slides:
    """Every period-th layer sees all, the others a window."""

    def slides(values: Mapping[str, Any], layer: int) -> bool:
        default = read_size(values, "_sliding_window_pattern", period)
        return (layer + 1) % read_size(values, "sliding_window_pattern", default) != 0

    return slides


def _from_max_window_layers(values: Mapping[str, Any], layer: int) -> bool:
    return values["max_window_layers"] == 0 or layer >= read_size(values, "max_window_layers")


_TIED = {"tie_word_embeddings": True}
_QWEN = {"use_sliding_window": False, "max_position_embeddings": 32768, "max_window_layers": 28}
_GEMMA2 = {
    **_TIED,
    "model_type": "gemma2",
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
}
_GEMMA3 = {
    **_GEMMA2,
    "model_type": "gemma3_text",
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "max_position_embeddings": 131072,
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama),
    "MistralForCausalLM": Family(llama, {"max_position_embeddings": 131072}),
    "Qwen2ForCausalLM": Family(qwen2, _QWEN, _from_max_window_layers),
    "Qwen3ForCausalLM": Family(qwen3, {**_QWEN, "head_dim": 128}, _from_max_window_layers),
    "Qwen3MoeForCausalLM": Family(qwen3, {**_QWEN, "decoder_sparse_step": 1}),
    "Gemma2ForCausalLM": Family(gemma, _GEMMA2, _all_but_every(2)),
    "Gemma3ForCausalLM": Family(gemma, _GEMMA3, _all_but_every(6)),
    "Phi3ForCausalLM": Family(phi3),
    "Olmo2ForCausalLM": Family(olmo2, {"rms_norm_eps": 1e-5}),
    "SmolLM3ForCausalLM": Family(
        llama, {**_TIED, "no_rope_layer_interval": 4, "use_sliding_window": False, "rope_theta": 2_000_000.0}
    ),
    "GraniteForCausalLM": Family(granite),
    "Cohere2ForCausalLM": Family(cohere2, {**_TIED, "logit_scale": 0.0625}, _all_but_every(4)),
    "Glm4ForCausalLM": Family(glm4, {"partial_rotary_factor": 0.5, "head_dim": 128}),
    "GPT2LMHeadModel": Family(gpt2, {**_TIED, "hidden_act": "gelu_new", "rms_norm_eps": 1e-5}),
    "MixtralForCausalLM": Family(mixtral, {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}),
    "OlmoeForCausalLM": Family(olmoe, {"rms_norm_eps": 1e-5}),
    "GptOssForCausalLM": Family(gpt_oss, {"head_dim": 64}, _all_but_every(2)),
}
IGNORED = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint's architecture, its config and the program recorded from it. No weights yet."""

    architecture: str
    config: ModelConfig
    program: Program

    def context_variant(self, limit: int) -> int:
        """Which rope frequencies a request that can reach `limit` tokens takes (see quire.program.rope)."""
        return max((rope.variant(limit) for rope in self._ropes()), default=0)

    @property
    def max_context(self) -> int:
        """The most tokens of one sequence: what the model was made for, or its rope is scaled to."""
        most = self.config.max_position_embeddings
        return min((rope.longest(most) for rope in self._ropes()), default=most)

    def _ropes(self) -> set[Rope]:
        return {op.rope for op in self.program if isinstance(op, Rotary)}


def read_model(raw: Mapping[str, Any]) -> Model:
    """Find the family of a config.json and record its program.

    Raises ConfigError for an unknown architecture (listing the known ones) or a quantized checkpoint.
    """
    name = _architecture(raw)
    family = FAMILIES[name]
    if stored := raw.get("quantization_config"):
        method = stored.get("quant_method", "unknown") if isinstance(stored, Mapping) else "unknown"
        raise ConfigError(
            f"the checkpoint is quantized ({method}), which cannot be read yet",
            "take the unquantized checkpoint; quantization='int8' or 'int4' quantizes it while loading",
        )
    cfg = read_config(raw, family.defaults, family.slides)
    builder = Builder()
    output = family.record(builder, cfg, Names(""))
    ignored = (*IGNORED, "lm_head.weight") if cfg.tie_word_embeddings else IGNORED
    return Model(name, cfg, builder.program(output, ignored))


def _architecture(raw: Mapping[str, Any]) -> str:
    """The architecture that a config.json names, one of FAMILIES."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    known = "known are " + ", ".join(sorted(FAMILIES))
    if not isinstance(name, str):
        raise ConfigError("config.json names no architecture", known)
    if name not in FAMILIES:
        near = did_you_mean(name, FAMILIES)
        raise ConfigError(f"the architecture {name!r} is not known", f"{near} {known}" if near else known)
    return name
