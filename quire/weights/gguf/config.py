"""The configuration of a model from the metadata of its GGUF file, under the names of config.json."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from quire.errors import ConfigError, did_you_mean, quoted
from quire.weights.gguf import (
    config_encoders,
    config_experts,
    config_gemma,
    config_latent,
    config_layer_norm,
    config_states,
)
from quire.weights.gguf.architectures import (
    ARCHITECTURES,
    DEEPSEEK_V2,
    DISTILBERT,
    MISTRAL,
    MIXTRAL,
    OLMO3,
    Architecture,
)
from quire.weights.gguf.config_deci import deci
from quire.weights.gguf.config_gemma import window
from quire.weights.gguf.config_latent import scores_are_sigmoids
from quire.weights.gguf.container import GgufFile
from quire.weights.gguf.keys import Keys, experts, partial
from quire.weights.gguf.pooling import scoring

_DENSE = re.compile(r"blk\.(\d{1,4})\.ffn_gate\.weight", re.ASCII)  # of a layer without experts
_NO_MODELS = {
    "mmproj": "the vision tower for images of another file",
    "adapter": "an adapter for another model",
    "imatrix": "statistics for quantization",
    "clip": "the vision tower for images of another file",
}
# Architectures whose layers differ in what they have, those whose layers all have experts, and those whose
# families check heads themselves
_NEMOTRON = ("nemotron_h", "nemotron_h_moe")
_BY_LAYER = ("deci", "gemma3n", "gemma4", "kimi-linear", "lfm2", "lfm2moe", "granitehybrid", *_NEMOTRON)
_ONLY_EXPERTS = ("qwen35moe",)
_OWN_HEADS = ("gemma4", "deepseek2", "deepseek32", "glm-dsa", "kimi-linear", "minicpm3", *_NEMOTRON)
_ROTATE_PART = (
    "phi2",
    "phi3",
    "nemotron",
    "stablelm",
    "minimax-m2",
    "glm4",
    "glm4moe",
    "bailingmoe2",
    "qwen3next",
    "qwen35",
    "qwen35moe",
)
_NULL = ("q_lora_rank", "sliding_window")  # whose absence means something else than null


def keys_of(files: tuple[GgufFile, ...]) -> tuple[Keys, Architecture]:
    """Return the metadata of the model in these files, which the first has, and its architecture.

    Raises ConfigError for an unknown one, naming the nearest, and for files that are no language model.
    """
    metadata = files[0].metadata
    name = metadata.text("general.architecture")
    kind = _NO_MODELS.get(metadata.text("general.type") or "") or _NO_MODELS.get(name or "")
    if kind:
        hint = "give the model's own file: the tower is found beside it" if "images" in kind else None
        raise ConfigError(f"{metadata.where}: the file is {kind}, not a language model", hint)
    if name is None:
        raise ConfigError(f"{metadata.where}: the metadata names no architecture", "is the file complete?")
    if name not in ARCHITECTURES:
        known = "known are " + ", ".join(sorted(ARCHITECTURES))
        near = did_you_mean(name, ARCHITECTURES)
        problem = f"the architecture {quoted(name)} is not supported"
        raise ConfigError(f"{metadata.where}: {problem}", f"{near} {known}" if near else known)
    keys = Keys(metadata, name, {name: tensor for file in files for name, tensor in file.tensors.items()})
    return keys, _variant(keys)


def _variant(keys: Keys) -> Architecture:
    """Return the architecture, where its name stands for several."""
    if keys.prefix == "llama" and keys.optional_size("expert_count"):
        return MIXTRAL
    if keys.prefix == "llama" and keys.optional_size("attention.sliding_window"):
        return MISTRAL
    if keys.prefix == "mistral3" and not keys.number("attention.temperature_scale"):
        return MISTRAL
    if keys.prefix == "olmo2" and keys.optional_size("attention.sliding_window"):
        return OLMO3
    if keys.prefix == "bert" and "token_types.weight" not in keys.tensors:
        return DISTILBERT
    if keys.prefix == "deepseek2" and not scores_are_sigmoids(keys):
        return DEEPSEEK_V2
    return ARCHITECTURES[keys.prefix]


def config_of(files: tuple[GgufFile, ...], end_tokens: list[int]) -> dict[str, Any]:
    """Return the configuration of the model in these files."""
    keys, architecture = keys_of(files)
    layered = keys.prefix in _BY_LAYER
    config = {
        "architectures": [architecture.name],
        "vocab_size": _vocab_size(keys),
        "hidden_size": keys.size("embedding_length"),
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.heads if layered else keys.size("attention.head_count"),
        "num_key_value_heads": keys.kv_heads
        if layered
        else keys.size("attention.head_count_kv", keys.size("attention.head_count")),
        "head_dim": keys.head_dim,
        "intermediate_size": _intermediate_size(keys),
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base"),
        "rope_scaling": _rope_scaling(keys),
        "tie_word_embeddings": "output.weight" not in keys.tensors,
        "attention_bias": keys.has("attn_q.bias"),
        "mlp_bias": keys.has("ffn_gate.bias"),
        "eos_token_id": end_tokens or None,
    }
    if keys.prefix not in _OWN_HEADS:
        _check_heads(keys)
    if architecture.name in _OWN:
        config |= _OWN[architecture.name](keys)
    _check_causal(keys, architecture.encoder)
    config |= scoring(keys, architecture)
    return {name: value for name, value in config.items() if value is not None or name in _NULL}


def _intermediate_size(keys: Keys) -> int | None:
    """Return the width of MLPs, the largest where layers differ; None for models that have only experts."""
    if keys.prefix in _BY_LAYER:
        return keys.largest("feed_forward_length") if keys.value("feed_forward_length") is not None else None
    return None if keys.prefix in _ONLY_EXPERTS else keys.size("feed_forward_length")


def _check_causal(keys: Keys, encoder: bool) -> None:
    if keys.flag("attention.causal") is encoder:
        seen = "to earlier tokens alone" if encoder else "to later tokens"
        problem = f"the architecture {quoted(keys.prefix)} with attention {seen} is not supported"
        raise ConfigError(f"{keys.metadata.where}: {problem}")


def _check_heads(keys: Keys) -> None:
    """Refuse values of another length than keys, and a rope of part of a head, where a family has neither."""
    where = keys.metadata.where
    if keys.optional_size("attention.value_length") not in (None, keys.head_dim):
        raise ConfigError(f"{where}: values have another length than keys, which is not supported")
    if keys.rotated != keys.head_dim and keys.prefix not in _ROTATE_PART:
        problem = f"rotates {keys.rotated} of the {keys.head_dim} numbers of a head, which is not supported"
        raise ConfigError(f"{where}: the architecture {quoted(keys.prefix)} {problem}")


def _vocab_size(keys: Keys) -> int:
    table = keys.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ConfigError(f"{keys.metadata.where}: has no token_embd.weight", "is the file complete?")
    return table.shape[0]


def _rope_scaling(keys: Keys) -> dict[str, Any] | None:
    """Return the scaling of the rope: stated, or by factors of each frequency (Llama 3, LongRoPE)."""
    length, original = keys.size("context_length"), keys.optional_size("rope.scaling.original_context_length")
    short, long = keys.factors("rope_factors_short.weight"), keys.factors("rope_factors_long.weight")
    if short and long:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
            "attention_factor": keys.number("rope.scaling.attn_factor"),
        }
    if every := keys.factors("rope_freqs.weight"):  # the factors are those of any length
        return {
            "rope_type": "longrope",
            "short_factor": every,
            "long_factor": every,
            "original_max_position_embeddings": length,
            "attention_factor": 1.0,
        }
    kind, factor = keys.text("rope.scaling.type"), keys.number("rope.scaling.factor")
    factor = factor or keys.number("rope.scale_linear")
    if kind == "none" or not factor or factor == 1:
        return None
    kind = kind or "linear"
    scaling = {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        return scaling
    for name, key in {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}.items():
        scaling[name] = keys.number(f"rope.scaling.{key}")
    scaling["attention_factor"] = _attention_factor(keys, factor)
    return {**scaling, "original_max_position_embeddings": original or max(int(length / factor), 1)}


def _attention_factor(keys: Keys, factor: float) -> float | None:
    """Return the factor of cosine and sine of YaRN, None for that of its paper.

    A file states what multiplies the paper's.
    """
    stated = keys.number("rope.scaling.attn_factor") or keys.number("rope.scaling.yarn_attn_factor")
    return None if stated is None else stated * (0.1 * math.log(max(factor, 1)) + 1)


def _mixtral(keys: Keys) -> dict[str, Any]:
    return {**experts(keys), "sliding_window": keys.optional_size("attention.sliding_window")}


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    return experts(keys) | {
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
        "qkv_bias": keys.has("attn_q.bias"),
    }


def _minimax_m2(keys: Keys) -> dict[str, Any]:
    inner = keys.optional_size("expert_feed_forward_length") or _inner(keys)
    return experts(keys) | {"rotary_dim": keys.rotated, "intermediate_size": inner}


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    normed = keys.metadata.flag(f"{keys.prefix}.expert_weights_norm")
    inner = keys.size("expert_feed_forward_length")
    dense = [int(found[1]) for name in keys.tensors if (found := _DENSE.fullmatch(name))]
    own = {"moe_intermediate_size": inner, "norm_topk_prob": normed is not False, "mlp_only_layers": dense}
    return experts(keys) | own


def _olmoe(keys: Keys) -> dict[str, Any]:
    normed = keys.metadata.flag(f"{keys.prefix}.expert_weights_norm")
    inner = keys.optional_size("expert_feed_forward_length")
    return experts(keys) | {"norm_topk_prob": bool(normed), "intermediate_size": inner or _inner(keys)}


def _inner(keys: Keys) -> int:
    return keys.size("feed_forward_length")


def _phi3(keys: Keys) -> dict[str, Any]:
    original = keys.optional_size("rope.scaling.original_context_length")
    window = keys.optional_size("attention.sliding_window")
    return {**partial(keys), "original_max_position_embeddings": original, "sliding_window": window}


def _phimoe(keys: Keys) -> dict[str, Any]:
    """A file states another factor of cosine and sine than the published models have."""
    scaling = _rope_scaling(keys)
    return experts(keys) | {
        "architectures": ["PhiMoEForCausalLM"],  # the published code's name, with factors for longer contexts
        "sliding_window": keys.optional_size("attention.sliding_window"),
        "lm_head_bias": "output.bias" in keys.tensors,
        "rope_scaling": scaling and scaling | dict.fromkeys(("short_mscale", "long_mscale"), _PHIMOE_MSCALE),
    }


def _minicpm(keys: Keys) -> dict[str, Any]:
    """Older files state no factors: theirs are those of the first models, as in llama.cpp."""
    hidden = keys.size("embedding_length")
    residual, root = keys.number("residual_scale"), math.sqrt(keys.layers)
    return {
        "scale_emb": keys.number("embedding_scale") or 12.0,
        "scale_depth": residual * root if residual else 1.4,
        "dim_model_base": round(hidden / (keys.number("logit_scale") or hidden / 256)),
    }


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    own = {**window(keys), **experts(keys), "intermediate_size": keys.size("expert_feed_forward_length")}
    scaling = _rope_scaling(keys)
    return own | {"attention_bias": True, "rope_scaling": scaling and {**scaling, "truncate": False}}


def _mistral(keys: Keys) -> dict[str, Any]:
    return {"sliding_window": keys.optional_size("attention.sliding_window")}


def _exaone(keys: Keys) -> dict[str, Any]:
    eps = keys.number("attention.layer_norm_rms_epsilon")
    return {"num_layers": keys.layers, "layer_norm_epsilon": eps}


def _exaone4(keys: Keys) -> dict[str, Any]:
    """A file of a model without windows, such as the 1.2B, states none."""
    return {"sliding_window": None, **window(keys)}


def _ministral3(keys: Keys) -> dict[str, Any]:
    scaling = _rope_scaling(keys)
    if scaling is None or scaling["rope_type"] != "yarn":
        raise ConfigError(f"{keys.metadata.where}: queries grow with the position, but the rope is not YaRN")
    of_all = keys.number("rope.scaling.yarn_log_multiplier")
    more = {"mscale": of_all, "mscale_all_dim": of_all} if of_all else {}
    beta = {"llama_4_scaling_beta": keys.number("attention.temperature_scale")}
    return {"rope_scaling": {**scaling, **more, **beta}}


def _llama4(keys: Keys) -> dict[str, Any]:
    """Files do not state chunks, layers without rope and the growth of queries: those of all that exist."""
    count = keys.size("expert_count")
    own = {
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "intermediate_size_mlp": keys.size("feed_forward_length"),
        "interleave_moe_layer_step": keys.size("interleave_moe_layer_step"),
        "use_qk_norm": count != _MAVERICK,
    }
    if keys.value("attention.sliding_window") == 0:
        raise ConfigError(f"{keys.metadata.where}: a Llama 4 without chunks of attention is not supported")
    return experts(keys) | own


_PHIMOE_MSCALE = 1.243163121016122
_MAVERICK = 128  # experts of the Llama 4 whose queries and keys are not normalized

_OWN: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "OlmoeForCausalLM": _olmoe,
    "Qwen3NextForCausalLM": config_states.qwen3_next,
    "Qwen3_5ForCausalLM": config_states.qwen3_5,
    "Qwen3_5MoeForCausalLM": config_states.qwen3_5,
    "Gemma2ForCausalLM": config_gemma.gemma2,
    "Gemma3ForCausalLM": config_gemma.gemma3,
    "Gemma3TextModel": config_gemma.embedding_gemma,
    "Gemma3nForCausalLM": config_gemma.gemma3n,
    "Gemma4ForCausalLM": config_gemma.gemma4,
    "Lfm2ForCausalLM": config_states.lfm2,
    "Lfm2MoeForCausalLM": config_states.lfm2_moe,
    "GraniteMoeHybridForCausalLM": config_states.granite_hybrid,
    "FalconH1ForCausalLM": config_states.falcon_h1,
    "NemotronHForCausalLM": config_states.nemotron_h,
    "DeepseekV2ForCausalLM": config_latent.deepseek,
    "DeepseekV3ForCausalLM": config_latent.deepseek,
    "DeepseekV32ForCausalLM": config_latent.sparse,
    "GlmMoeDsaForCausalLM": config_latent.sparse,
    "KimiLinearForCausalLM": config_latent.kimi_linear,
    "MiniCPM3ForCausalLM": config_latent.minicpm3,
    "Glm4MoeForCausalLM": config_latent.glm4_moe,
    "BailingMoeV2ForCausalLM": config_latent.bailing2,
    "Ministral3ForCausalLM": _ministral3,
    "Llama4ForCausalLM": _llama4,
    "PhiForCausalLM": config_layer_norm.phi2,
    "NemotronForCausalLM": config_layer_norm.nemotron,
    "Phi3ForCausalLM": _phi3,
    "PhimoeForCausalLM": _phimoe,
    "GraniteForCausalLM": config_states.granite,
    "GraniteMoeSharedForCausalLM": config_states.granite_moe,
    "ArceeForCausalLM": lambda keys: {"mlp_bias": keys.has("ffn_up.bias")},
    "OlmoForCausalLM": lambda keys: {"clip_qkv": keys.number("attention.clamp_kqv")},
    "CohereForCausalLM": config_layer_norm.cohere,
    "Cohere2ForCausalLM": config_layer_norm.cohere2,
    "Glm4ForCausalLM": partial,
    "GPT2LMHeadModel": config_layer_norm.gpt2,
    "Starcoder2ForCausalLM": config_layer_norm.starcoder2,
    "StableLmForCausalLM": config_layer_norm.stablelm,
    "MiniCPMForCausalLM": _minicpm,
    "Ernie4_5_MoeForCausalLM": config_experts.ernie4_5_moe,
    "HunYuanMoEV1ForCausalLM": config_experts.hunyuan_moe,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "Olmo3ForCausalLM": window,
    "DeciLMForCausalLM": deci,
    "ExaoneForCausalLM": _exaone,
    "Exaone4ForCausalLM": _exaone4,
    "GptOssForCausalLM": _gpt_oss,
    "BertModel": config_encoders.bert,
    "ModernBertModel": config_encoders.modernbert,
    "NomicBertModel": config_encoders.nomic_bert,
    "DistilBertModel": config_encoders.distilbert,
}
