"""The architectures of GGUF files that Quire has, and how their tensors are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.weights.gguf import tables
from quire.weights.gguf.changes import Alteration


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture: its name in config.json, and the names of its tensors.

    `paired`: rows of queries and keys are in pairs, where the model rotates halves. `halved`: they are in
    halves, where the model rotates pairs, in files that state sections of positions. `one_plus`: norms are
    stored plus one. `layers` is the module of the layers, `prediction` that of layers after the last, if they
    have one of their own, and `predicting` are names of tensors in those alone, `without_keys`
    in layers that have no heads of keys. `transposed` are modules that
    config.json's world stores [in, out], `bare` those whose tensor has no suffix there, with the name of
    their bias. `alternating`: of a gate and what it multiplies in one matrix, rows alternate.
    `tiled_values`: value heads of delta nets are in another order than their keys. `changes` are those of
    tensors by their names in the file. `encoder`: tokens see those after them.
    """

    name: str
    own: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False
    halved: bool = False
    one_plus: bool = False
    layers: str = "model.layers"
    prediction: str = ""
    predicting: Mapping[str, str] = field(default_factory=dict)
    without_keys: Mapping[str, str] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    bare: Mapping[str, str] = field(default_factory=dict)
    alternating: bool = False
    tiled_values: bool = False
    changes: Mapping[str, Alteration] = field(default_factory=dict)
    encoder: bool = False


_KERNEL, _VECTOR, _DECAY = (
    Alteration(form="kernel"),
    Alteration(form="vector"),
    Alteration(numbers="decay", form="vector"),
)
_STATES = {"ssm_conv1d.weight": _KERNEL, "ssm_a": _DECAY, "ssm_d": _VECTOR, "ssm_norm.weight": _VECTOR}
_KDA = {**_STATES, **{f"ssm_conv1d_{part}.weight": _KERNEL for part in "qkv"}}
_GATED_SHARED = {"ffn_gate_inp_shexp.weight": Alteration(form="row")}
_NET = {**_STATES, **_GATED_SHARED}
_ENCODER = {name: Alteration(form="row") for name in ("token_types.weight", "cls.output.weight")}
_CONV = {"shortconv.conv.weight": _KERNEL}


def _qwen(name: str, own: Mapping[str, str], tiled_values: bool) -> Architecture:
    return Architecture(
        name,
        own,
        one_plus=True,
        prediction="mtp.layers",
        predicting=tables.QWEN_PREDICTING,
        tiled_values=tiled_values,
        changes=_NET,
    )


_NEMOTRON = "NemotronHForCausalLM"
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", paired=True),
    "internlm2": Architecture("LlamaForCausalLM", paired=True),
    "deci": Architecture(
        "DeciLMForCausalLM", paired=True, without_keys={"attn_output": "self_attn.linear_attn"}
    ),
    "llama4": Architecture("Llama4ForCausalLM", tables.LLAMA4),
    "mistral3": Architecture("Ministral3ForCausalLM", paired=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2vl": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", tables.QWEN2_MOE, changes=_GATED_SHARED),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3vl": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", tables.MOE),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", tables.MOE),
    "qwen3next": _qwen("Qwen3NextForCausalLM", tables.QWEN3_NEXT, tiled_values=False),
    "qwen35": _qwen("Qwen3_5ForCausalLM", tables.QWEN35, tiled_values=True),
    "qwen35moe": _qwen("Qwen3_5MoeForCausalLM", tables.QWEN35_MOE, tiled_values=True),
    "gemma": Architecture("GemmaForCausalLM", one_plus=True),
    "gemma2": Architecture("Gemma2ForCausalLM", tables.GEMMA, one_plus=True),
    "gemma3": Architecture("Gemma3ForCausalLM", tables.GEMMA, one_plus=True),
    "gemma-embedding": Architecture("Gemma3TextModel", tables.EMBEDDING_GEMMA, one_plus=True, encoder=True),
    "gemma3n": Architecture("Gemma3nForCausalLM", tables.GEMMA3N),
    "gemma4": Architecture("Gemma4ForCausalLM", tables.GEMMA4),
    "phi2": Architecture("PhiForCausalLM", tables.PHI2),
    "phi3": Architecture("Phi3ForCausalLM", tables.PACKED),
    "phimoe": Architecture("PhimoeForCausalLM", tables.MIXTRAL),
    "olmo": Architecture("OlmoForCausalLM", paired=True),
    "olmo2": Architecture("Olmo2ForCausalLM", tables.NORMS_AFTER),
    "olmoe": Architecture("OlmoeForCausalLM", tables.MOE),
    "smollm3": Architecture("SmolLM3ForCausalLM", paired=True),
    "granite": Architecture("GraniteForCausalLM", paired=True),
    "granitemoe": Architecture("GraniteMoeSharedForCausalLM", tables.GRANITE_HYBRID, paired=True),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM", tables.GRANITE_HYBRID, paired=True, changes=_STATES
    ),
    "falcon-h1": Architecture("FalconH1ForCausalLM", tables.FALCON_H1, changes=_STATES),
    "nemotron_h": Architecture(
        _NEMOTRON, tables.NEMOTRON_H, paired=True, layers="backbone.layers", changes=_STATES
    ),
    "nemotron_h_moe": Architecture(
        _NEMOTRON,
        tables.NEMOTRON_H,
        paired=True,
        layers="backbone.layers",
        prediction="mtp.layers",
        changes=_STATES,
    ),
    "lfm2": Architecture("Lfm2ForCausalLM", tables.LFM2, changes=_CONV),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", tables.LFM2_MOE, changes=_CONV),
    "deepseek2": Architecture("DeepseekV3ForCausalLM", tables.LATENT),
    "deepseek32": Architecture("DeepseekV32ForCausalLM", tables.SPARSE_LATENT),
    "glm-dsa": Architecture("GlmMoeDsaForCausalLM", tables.SPARSE_LATENT),
    "kimi-linear": Architecture("KimiLinearForCausalLM", tables.KIMI_LINEAR, changes=_KDA),
    "minicpm3": Architecture("MiniCPM3ForCausalLM", tables.LATENT),
    "glm4moe": Architecture("Glm4MoeForCausalLM", tables.GLM4_MOE),
    "bailingmoe2": Architecture("BailingMoeV2ForCausalLM", tables.BAILING2),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", tables.MINIMAX_M2),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM", tables.ERNIE4_5_MOE, changes={"exp_probs_b.bias": Alteration(form="row")}
    ),
    "exaone": Architecture("ExaoneForCausalLM", tables.EXAONE, layers="transformer.h"),
    "exaone4": Architecture("Exaone4ForCausalLM", tables.NORMS_AFTER),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", tables.HUNYUAN),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", tables.HUNYUAN_MOE),
    "minicpm": Architecture("MiniCPMForCausalLM", paired=True),
    "seed_oss": Architecture("SeedOssForCausalLM", tables.SEED_OSS),
    "stablelm": Architecture("StableLmForCausalLM", tables.STABLELM),
    "starcoder2": Architecture("Starcoder2ForCausalLM", tables.STARCODER2),
    "nemotron": Architecture("NemotronForCausalLM", one_plus=True),
    "arcee": Architecture("ArceeForCausalLM", paired=True),
    "command-r": Architecture("CohereForCausalLM"),
    "cohere2": Architecture("Cohere2ForCausalLM"),
    "glm4": Architecture("Glm4ForCausalLM", tables.GLM4, halved=True),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        tables.GPT2,
        layers="transformer.h",
        transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    ),
    "bert": Architecture("BertModel", tables.BERT, layers="encoder.layer", changes=_ENCODER, encoder=True),
    "modern-bert": Architecture("ModernBertModel", tables.MODERN_BERT, layers="layers", encoder=True),
    "nomic-bert": Architecture(
        "NomicBertModel", tables.NOMIC_BERT, layers="encoder.layers", changes=_ENCODER, encoder=True
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        tables.GPT_OSS,
        transposed=frozenset({"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
        bare={
            "self_attn.sinks": "self_attn.sinks",
            "mlp.experts.gate_up_proj": "mlp.experts.gate_up_proj_bias",
            "mlp.experts.down_proj": "mlp.experts.down_proj_bias",
        },
        alternating=True,
    ),
}
# Variants that the name of the architecture does not tell
MIXTRAL = Architecture("MixtralForCausalLM", tables.MIXTRAL, paired=True)  # "llama" with experts
MISTRAL = Architecture("MistralForCausalLM", paired=True)  # "llama" with a sliding window, or "mistral3"
OLMO3 = Architecture("Olmo3ForCausalLM", tables.NORMS_AFTER)  # "olmo2" with a sliding window
DEEPSEEK_V2 = Architecture("DeepseekV2ForCausalLM", tables.LATENT)  # "deepseek2" with a softmax router
DISTILBERT = Architecture(  # "bert" without segments
    "DistilBertModel", tables.DISTILBERT, layers="transformer.layer", changes=_ENCODER, encoder=True
)
