"""The model families, by the architecture name in config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire.errors import ConfigError, did_you_mean, quoted
from quire.models import defaults, defaults_latent, defaults_later, defaults_mamba, spelled
from quire.models.apertus import apertus
from quire.models.apertus import unused as unused_of_apertus
from quire.models.cohere2 import cohere2
from quire.models.composites import COMPOSITES
from quire.models.config import LINEAR, SYNONYMS, ModelConfig, read_config, read_fields
from quire.models.deepseek import deepseek_v2, deepseek_v3, glm4_moe, minicpm3, mistral4, mtp_glm4, mtp_v3
from quire.models.defaults_gemma4 import GEMMA3N, GEMMA4, GEMMA4_UNIFIED
from quire.models.ernie4_5 import ernie4_5, ernie4_5_vl, for_images
from quire.models.exaone4 import exaone4
from quire.models.falcon_h1 import falcon_h1
from quire.models.family import Family
from quire.models.gemma import gemma, gemma2, gemma3
from quire.models.gemma3n import gemma3n
from quire.models.gemma3n import unused as unused3n
from quire.models.gemma4 import gemma4, of_shared_layers
from quire.models.glm4 import glm4, glm4v, glm_ocr
from quire.models.gpt2 import gpt2
from quire.models.granite import granite
from quire.models.granite_hybrid import HYBRID, granite_hybrid
from quire.models.hunyuan import hunyuan
from quire.models.left_out import later_layers, mtp, usable
from quire.models.lfm2 import CONV, lfm2
from quire.models.llama import llama, ministral3, paddleocr_vl, qwen2, qwen2_vl, rotates, seed_oss
from quire.models.llama4 import CHUNKED, llama4
from quire.models.minicpm import minicpm
from quire.models.minimax_m2 import minimax_m2
from quire.models.model import Model
from quire.models.moe import gpt_oss, mixtral, olmoe
from quire.models.nemotron_h import layers_of, nemotron_h
from quire.models.olmo2 import olmo2, olmo3
from quire.models.phi3 import phi3
from quire.models.phimoe import PUBLISHED, phimoe
from quire.models.prediction import Has
from quire.models.qwen2_moe import qwen2_moe
from quire.models.qwen2_moe import slides as slides_in_qwen2_moe
from quire.models.qwen3 import qwen3, qwen3_vl
from quire.models.qwen3_next import qwen3_5, qwen3_next, qwen_prediction
from quire.models.recent import RECENT
from quire.models.stablelm import stablelm
from quire.models.starcoder2 import starcoder2
from quire.models.variations import VARIATIONS
from quire.models.windows import (
    all_but_fourth,
    all_but_sixth,
    by_pattern,
    every_other,
    from_max_window_layers,
)
from quire.program import Builder, Names, Program

_EXPERTS = {"num_experts": "num_local_experts"}
_GELU = {"hidden_act": "hidden_activation"}
_ROUTED = {"num_experts": "n_routed_experts"}
_EVERY_LAYER = {"moe_layer_freq": (1,)}
_LOCAL_EXPERTS = {"num_experts": "num_local_experts"}  # num_experts means nothing there
_NO_OTHER_NAME = {"num_experts": "num_experts"}  # num_local_experts means nothing there
_GATED_OUTPUT = {"attn_output_gate": (True,)}
_CAUSAL = {"use_bidirectional_attention": (False, None)}
_CAUSAL_TEXT = {"use_bidirectional_attention": (None, "vision")}  # "vision": between tokens of an image
_ERNIE = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
_NO_BIAS = {"use_bias": (False, None)}
_ONLY = {"is_causal": (True,), "per_layer_config": (None,)}  # of every family

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama, defaults.LLAMA, seeing=llama),
    "Llama4ForCausalLM": Family(
        llama4, defaults.LLAMA4, spelled=_EXPERTS, older=_LOCAL_EXPERTS, kinds=(CHUNKED,), seeing=llama4
    ),
    "MistralForCausalLM": Family(llama, defaults.MISTRAL, seeing=llama),
    "Ministral3ForCausalLM": Family(ministral3, defaults.MINISTRAL3, seeing=ministral3),
    "Qwen2ForCausalLM": Family(qwen2, defaults.QWEN2, from_max_window_layers, seeing=qwen2),
    "Qwen2MoeForCausalLM": Family(
        qwen2_moe, defaults_later.QWEN2_MOE, slides_in_qwen2_moe, older=_NO_OTHER_NAME
    ),
    "Qwen3ForCausalLM": Family(qwen3, defaults.QWEN3, from_max_window_layers, seeing=qwen3),
    "Qwen3MoeForCausalLM": Family(qwen3, defaults.QWEN3_MOE, seeing=qwen3),
    "Qwen3NextForCausalLM": Family(
        qwen3_next,
        defaults.QWEN3_NEXT,
        older=_NO_OTHER_NAME,
        kinds=(LINEAR,),
        left_out=mtp,
        prediction=qwen_prediction,
    ),
    "Qwen3_5ForCausalLM": Family(
        qwen3_5,
        defaults.QWEN3_5,
        only=_GATED_OUTPUT,
        kinds=(LINEAR,),
        left_out=mtp,
        prediction=qwen_prediction,
        seeing=qwen3_5,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        qwen3_5,
        defaults.QWEN3_5_MOE,
        only=_GATED_OUTPUT,
        older=_NO_OTHER_NAME,
        kinds=(LINEAR,),
        left_out=mtp,
        prediction=qwen_prediction,
        seeing=qwen3_5,
    ),
    "GemmaForCausalLM": Family(gemma, defaults_later.GEMMA, only=_CAUSAL),
    "Gemma2ForCausalLM": Family(gemma2, defaults.GEMMA2, every_other, _GELU, _CAUSAL),
    "Gemma3ForCausalLM": Family(gemma3, defaults.GEMMA3, by_pattern, _GELU, seeing=gemma3),
    "Gemma3nForCausalLM": Family(
        gemma3n,
        GEMMA3N,
        lambda fields, layer: (layer + 1) % 5 != 0,
        {**_GELU, "intermediate_sizes": "intermediate_size"},
        unused=unused3n,
    ),
    "Gemma4ForCausalLM": Family(
        gemma4, GEMMA4, all_but_sixth, _GELU, _CAUSAL_TEXT, unused=of_shared_layers, seeing=gemma4
    ),
    "Gemma4UnifiedForCausalLM": Family(
        gemma4, GEMMA4_UNIFIED, all_but_sixth, _GELU, _CAUSAL_TEXT, unused=of_shared_layers
    ),
    "Phi3ForCausalLM": Family(phi3, defaults.PHI3),
    "Olmo2ForCausalLM": Family(olmo2, defaults.OLMO2),
    "SmolLM3ForCausalLM": Family(llama, defaults.SMOLLM3, lambda fields, layer: not rotates(fields, layer)),
    "GraniteForCausalLM": Family(granite, defaults.GRANITE),
    "GraniteMoeHybridForCausalLM": Family(
        granite_hybrid,
        defaults_mamba.GRANITE4,
        spelled=_EXPERTS,
        older={"num_experts": "num_local_experts", "layer_types": "layers_block_type"},
        kinds=HYBRID,
    ),
    "Cohere2ForCausalLM": Family(
        cohere2, defaults.COHERE2, by_pattern, {"rms_norm_eps": "layer_norm_eps"}, seeing=cohere2
    ),
    "Glm4ForCausalLM": Family(glm4, defaults.GLM4),
    "GPT2LMHeadModel": Family(
        gpt2, defaults.GPT2, spelled=spelled.GPT2, only={"add_cross_attention": (False,)}
    ),
    "Lfm2ForCausalLM": Family(
        lfm2,
        defaults.LFM2,
        spelled={"rms_norm_eps": "norm_eps"},
        older={"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"},
        kinds=(CONV,),
        seeing=lfm2,
    ),
    "Lfm2MoeForCausalLM": Family(
        lfm2,
        defaults.LFM2_MOE,
        spelled={"rms_norm_eps": "norm_eps"},
        older={"tie_word_embeddings": "tie_embedding", "num_experts": "num_experts"},
        kinds=(CONV,),
        seeing=lfm2,
    ),
    "MixtralForCausalLM": Family(mixtral, defaults.MIXTRAL, spelled=_EXPERTS),
    "OlmoeForCausalLM": Family(olmoe, defaults.OLMOE, only={"clip_qkv": (None,)}),
    "DeepseekV2ForCausalLM": Family(
        deepseek_v2,
        defaults_latent.DEEPSEEK_V2,
        spelled=_ROUTED,
        only={
            **_EVERY_LAYER,
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
            "norm_topk_prob": (False, None),
        },
    ),
    "DeepseekV3ForCausalLM": Family(
        deepseek_v3,
        defaults_latent.DEEPSEEK_V3,
        spelled=_ROUTED,
        only={**_EVERY_LAYER, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        left_out=later_layers,
        prediction=mtp_v3,
    ),
    "Glm4MoeLiteForCausalLM": Family(
        deepseek_v3,
        defaults_latent.GLM4_MOE_LITE,
        spelled=_ROUTED,
        only={
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "first_k_dense_replace": (1,),
            "partial_rotary_factor": (1,),
        },
        left_out=later_layers,
        prediction=mtp_v3,
    ),
    "Glm4MoeForCausalLM": Family(
        glm4_moe,
        defaults.GLM4_MOE,
        spelled=_ROUTED,
        only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        left_out=later_layers,
        prediction=mtp_glm4,
    ),
    "Mistral4ForCausalLM": Family(
        mistral4,
        defaults_latent.MISTRAL4,
        spelled=_ROUTED,
        only={"scoring_func": ("softmax",)},
        seeing=mistral4,
    ),
    "FalconH1ForCausalLM": Family(falcon_h1, defaults_mamba.FALCON_H1),
    "NemotronHForCausalLM": Family(
        nemotron_h,
        defaults_mamba.NEMOTRON_H,
        spelled=spelled.NEMOTRON,
        older=spelled.NEMOTRON_OLDER,
        layers=layers_of,
        left_out=mtp,
    ),
    "MiniCPMForCausalLM": Family(
        minicpm, defaults_later.MINICPM, only={"num_experts": (0, None), "sparse_config": (None,)}
    ),
    "MiniCPM3ForCausalLM": Family(minicpm3, defaults_latent.MINICPM3),
    "SeedOssForCausalLM": Family(seed_oss, defaults_later.SEED_OSS),
    "Olmo3ForCausalLM": Family(olmo3, defaults_later.OLMO3, all_but_fourth),
    "Exaone4ForCausalLM": Family(exaone4, defaults_later.EXAONE4, by_pattern, left_out=mtp),
    "StableLmForCausalLM": Family(
        stablelm, defaults_later.STABLELM, spelled={"rms_norm_eps": "layer_norm_eps"}
    ),
    "HunYuanDenseV1ForCausalLM": Family(hunyuan, defaults_later.HUNYUAN),
    "HunYuanMoEV1ForCausalLM": Family(
        hunyuan,
        defaults_later.HUNYUAN_MOE,
        spelled={"num_experts_per_tok": "moe_topk"},
        older={"num_experts_per_tok": "num_experts_per_tok"},
    ),
    "ApertusForCausalLM": Family(apertus, defaults_later.APERTUS, unused=unused_of_apertus),
    "PhimoeForCausalLM": Family(phimoe, defaults_later.PHIMOE, spelled=_EXPERTS),
    "MiniMaxM2ForCausalLM": Family(
        minimax_m2, defaults_later.MINIMAX_M2, spelled=_EXPERTS, only={"scoring_func": ("sigmoid",)}
    ),
    "Starcoder2ForCausalLM": Family(
        starcoder2, defaults_later.STARCODER2, spelled={"rms_norm_eps": "norm_epsilon"}
    ),
    "Ernie4_5ForCausalLM": Family(ernie4_5, defaults_later.ERNIE4_5, only=_NO_BIAS),
    "Ernie4_5_MoeForCausalLM": Family(
        ernie4_5,
        defaults_later.ERNIE4_5_MOE,
        spelled=_ERNIE,
        older={name: name for name in _ERNIE},
        only={**_NO_BIAS, "moe_norm_min": (1e-12,)},
    ),
    "GptOssForCausalLM": Family(
        gpt_oss,
        defaults.GPT_OSS,
        every_other,
        spelled=_EXPERTS,
        only={"swiglu_alpha": (1.702,)},
        seeing=gpt_oss,
    ),
    **RECENT,
    **VARIATIONS,
}
# Text models that only composites have, by their model_type
TEXTS: dict[str, Family] = {
    "ernie4_5_vl_moe_text": Family(
        ernie4_5_vl,
        defaults_later.ERNIE4_5_VL,
        spelled=_ERNIE,
        older={name: name for name in _ERNIE},
        only={**_NO_BIAS, "moe_norm_min": (1e-12,), "moe_layer_start_index": ([1, 1],)},
        left_out=for_images,
    ),
    "glm4v_text": Family(glm4v, defaults_later.GLM4V, seeing=glm4v),
    "glm4v_moe_text": Family(
        glm4_moe,
        defaults_later.GLM4V_MOE,
        spelled=_ROUTED,
        only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        left_out=later_layers,
        seeing=glm4_moe,
    ),
    "glm_ocr_text": Family(glm_ocr, defaults_later.GLM_OCR, left_out=later_layers, seeing=glm_ocr),
    "paddleocr_vl_text": Family(
        paddleocr_vl, defaults_later.PADDLEOCR_VL, only=_NO_BIAS, seeing=paddleocr_vl
    ),
    "qwen2_vl_text": Family(qwen2_vl, defaults.QWEN2_VL, from_max_window_layers, seeing=qwen2_vl),
    "qwen3_vl_text": Family(qwen3_vl, defaults.QWEN3_VL, seeing=qwen3_vl),
    "qwen3_vl_moe_text": Family(qwen3_vl, defaults.QWEN3_VL_MOE, seeing=qwen3_vl),
}
OTHER_NAMES = {PUBLISHED: "PhimoeForCausalLM"}  # names of the same architecture
IGNORED = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")


def read_model(raw: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> Model:
    """Find the family of a config.json and record its program.

    With the preprocessor_config.json of its images, it sees them, if that is supported.
    Raises ConfigError for an unknown architecture, listing the known ones.
    """
    name = _architecture(raw)
    family, text = _family(name, raw)
    cfg, composite, vision = _config(family, text), COMPOSITES.get(name), None
    if composite is not None and processor is not None:
        vision = composite.vision(raw, processor, cfg)
    parts = () if composite is None else composite.parts(raw, vision)
    builder = Builder()
    if vision is not None and family.seeing is not None:
        output = family.seeing(builder, cfg, Names(""), vision)
    else:
        output = family.record(builder, cfg, Names(""))
    ignored = (*IGNORED, "lm_head.weight") if cfg.tie_word_embeddings else IGNORED
    ignored = (*ignored, *family.unused(cfg), *(() if vision is None else vision.program.ignored))
    own_parts = family.left_out(cfg) if family.prediction is None else usable(family.left_out(cfg))
    return Model(name, cfg, builder.program(output, ignored, (*parts, *own_parts)), vision=vision)


def read_prediction(raw: Mapping[str, Any], has: Has) -> Program | None:
    """Record the prediction layer of a config.json's family; None if it has none that is known.

    `has` tells whether the checkpoint has a tensor. Raises ConfigError as `read_model` does.
    """
    family, raw = _family(_architecture(raw), raw)
    if family.prediction is None:
        return None
    return family.prediction(Builder(), _config(family, raw), Names(""), has)


def _config(family: Family, raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json as its family does. Raises ConfigError for what is not supported."""
    for key, done in {**_ONLY, **family.only}.items():
        if key in raw and key not in family.defaults and raw[key] not in done:
            raise ConfigError(f"config.json: {key} = {quoted(raw[key])} is not supported")
    fields = read_fields(raw, family.defaults, family.spelled, family.older)
    listed = family.layers(fields) if family.layers else ()
    return read_config(fields, family.slides, family.kinds, listed)


def check_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> None:
    """Raise ConfigError for a field that a config.json's family does not read: it would change nothing."""
    family, _ = _family(_architecture(raw), raw)
    known = {family.spelled.get(name, name) for name in family.defaults} | family.defaults.keys()
    known |= set(family.older.values())
    known |= {SYNONYMS[name] for name in known if name in SYNONYMS} | {*_ONLY, *family.only, "architectures"}
    for name in overrides:
        if name not in known:
            hint = did_you_mean(name, known) or f"fields of this family: {', '.join(sorted(known))}"
            raise ConfigError(f"hf_overrides: the model reads no field {quoted(name)}", hint)


def _family(name: str, raw: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    """Return the family that reads an architecture's config.json, and the part of it that it reads."""
    if name in COMPOSITES:
        name, raw = COMPOSITES[name].text(raw)
    return {**FAMILIES, **TEXTS}[OTHER_NAMES.get(name, name)], raw


def _architecture(raw: Mapping[str, Any]) -> str:
    """Return the architecture of a config.json, one of FAMILIES or COMPOSITES."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    every = {*FAMILIES, *COMPOSITES, *OTHER_NAMES}
    known = f"README.md lists the models, of {len(every)} architectures, that are read"
    if not isinstance(name, str):
        raise ConfigError("config.json names no architecture", known)
    if name not in every:
        near = did_you_mean(name, every)
        raise ConfigError(f"unknown architecture {quoted(name)}", f"{near} {known}" if near else known)
    return name
