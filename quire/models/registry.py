"""The model families, by the architecture name in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError, did_you_mean, quoted, shortened
from quire.models import defaults
from quire.models.cohere2 import cohere2
from quire.models.config import Fields, ModelConfig, Slides, read_config, read_fields
from quire.models.gemma import gemma2, gemma3
from quire.models.glm4 import glm4
from quire.models.gpt2 import gpt2
from quire.models.granite import granite
from quire.models.llama import llama, qwen2, rotates
from quire.models.model import Model
from quire.models.moe import gpt_oss, mixtral, olmoe
from quire.models.olmo2 import olmo2
from quire.models.phi3 import phi3
from quire.models.qwen3 import qwen3
from quire.program import Builder, Names, Value

Record = Callable[[Builder, ModelConfig, Names], Value]


@dataclass(frozen=True, slots=True)
class Family:
    """A recording function, and the rules for reading its config.json.

    `defaults` are all keys that are read, with their default values; `spelled` are the family's own names for
    common keys; `slides` tells which layers have the window if `layer_types` is missing; `only` are keys that
    would change the mathematics in unsupported ways, with the values that are accepted.
    """

    record: Record
    defaults: defaults.Defaults
    slides: Slides = lambda fields, layer: True
    spelled: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def _every_other(fields: Fields, layer: int) -> bool:
    return layer % 2 == 0


def _by_pattern(fields: Fields, layer: int) -> bool:
    """Return True for window layers: all but every sliding_window_pattern-th."""
    return (layer + 1) % fields.size("sliding_window_pattern") != 0


def _from_max_window_layers(fields: Fields, layer: int) -> bool:
    return fields.get("max_window_layers") == 0 or layer >= fields.size("max_window_layers")


_EXPERTS = {"num_experts": "num_local_experts"}
_GELU = {"hidden_act": "hidden_activation"}
_GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
_CAUSAL = {"use_bidirectional_attention": (False, None)}
_ONLY = {"is_causal": (True,), "per_layer_config": (None,)}  # of every family

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama, defaults.LLAMA),
    "MistralForCausalLM": Family(llama, defaults.MISTRAL),
    "Qwen2ForCausalLM": Family(qwen2, defaults.QWEN2, _from_max_window_layers),
    "Qwen3ForCausalLM": Family(qwen3, defaults.QWEN3, _from_max_window_layers),
    "Qwen3MoeForCausalLM": Family(qwen3, defaults.QWEN3_MOE),
    "Gemma2ForCausalLM": Family(gemma2, defaults.GEMMA2, _every_other, _GELU, _CAUSAL),
    "Gemma3ForCausalLM": Family(gemma3, defaults.GEMMA3, _by_pattern, _GELU, _CAUSAL),
    "Phi3ForCausalLM": Family(phi3, defaults.PHI3),
    "Olmo2ForCausalLM": Family(olmo2, defaults.OLMO2),
    "SmolLM3ForCausalLM": Family(llama, defaults.SMOLLM3, lambda fields, layer: not rotates(fields, layer)),
    "GraniteForCausalLM": Family(granite, defaults.GRANITE),
    "Cohere2ForCausalLM": Family(cohere2, defaults.COHERE2, _by_pattern, {"rms_norm_eps": "layer_norm_eps"}),
    "Glm4ForCausalLM": Family(glm4, defaults.GLM4),
    "GPT2LMHeadModel": Family(gpt2, defaults.GPT2, spelled=_GPT2, only={"add_cross_attention": (False,)}),
    "MixtralForCausalLM": Family(mixtral, defaults.MIXTRAL, spelled=_EXPERTS),
    "OlmoeForCausalLM": Family(olmoe, defaults.OLMOE, only={"clip_qkv": (None,)}),
    "GptOssForCausalLM": Family(
        gpt_oss, defaults.GPT_OSS, _every_other, spelled=_EXPERTS, only={"swiglu_alpha": (1.702,)}
    ),
}
IGNORED = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")


def read_model(raw: Mapping[str, Any]) -> Model:
    """Find the family of a config.json and record its program.

    Raises ConfigError for an unknown architecture (listing the known ones) or a quantized checkpoint.
    """
    name = _architecture(raw)
    family = FAMILIES[name]
    if stored := raw.get("quantization_config"):
        method = stored.get("quant_method", "unknown") if isinstance(stored, Mapping) else "unknown"
        raise ConfigError(
            f"the checkpoint is quantized ({shortened(str(method))}), which is not supported yet",
            "take the unquantized checkpoint; quantization='int8' or 'int4' quantizes it while loading",
        )
    for key, done in {**_ONLY, **family.only}.items():
        if key in raw and raw[key] not in done:
            raise ConfigError(f"config.json: {key} = {quoted(raw[key])} is not supported")
    cfg = read_config(read_fields(raw, family.defaults, family.spelled), family.slides)
    builder = Builder()
    output = family.record(builder, cfg, Names(""))
    ignored = (*IGNORED, "lm_head.weight") if cfg.tie_word_embeddings else IGNORED
    return Model(name, cfg, builder.program(output, ignored))


def _architecture(raw: Mapping[str, Any]) -> str:
    """Return the architecture of a config.json, one of FAMILIES."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    known = "known are " + ", ".join(sorted(FAMILIES))
    if not isinstance(name, str):
        raise ConfigError("config.json names no architecture", known)
    if name not in FAMILIES:
        near = did_you_mean(name, FAMILIES)
        raise ConfigError(f"unknown architecture {quoted(name)}", f"{near} {known}" if near else known)
    return name
