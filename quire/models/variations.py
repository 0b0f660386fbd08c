"""More families that vary others, by the architecture name in config.json."""

from __future__ import annotations

from quire.models import defaults, defaults_classic, defaults_latent, defaults_variations
from quire.models.afmoe import afmoe
from quire.models.bailing import bailing, bailing2
from quire.models.bitnet import bitnet
from quire.models.cohere2 import cohere
from quire.models.deci import deci
from quire.models.deepseek import youtu
from quire.models.falcon import falcon
from quire.models.family import Family
from quire.models.gemma import vaultgemma
from quire.models.glm4 import glm
from quire.models.gpt_neox import gpt_neox
from quire.models.gpt_neox import unused as unused_of_neox
from quire.models.gpt_variations import codegen, gpt_bigcode, gpt_neo, gptj, layers_of_gpt_neo
from quire.models.granite import granite_moe
from quire.models.granite_variations import granite_moe_swa, granite_swa, hyperclovax
from quire.models.left_out import later_layers, mtp
from quire.models.llama import arcee, cwm, helium, llama
from quire.models.llama_renamed import exaone, internlm2
from quire.models.mellum import mellum
from quire.models.nanochat import nanochat
from quire.models.nemotron import jais2, nemotron
from quire.models.olmo import olmo
from quire.models.olmo2 import flex_olmo
from quire.models.phi import phi
from quire.models.spelled import EXAONE, FALCON, GPT2, GPT_NEO, GPT_NEOX
from quire.models.windows import all_but_fourth_from_first, all_but_stated, every_other

_EXPERTS = {"num_experts": "num_local_experts"}
_NO_OTHER_NAME = {"num_experts": "num_experts"}  # num_local_experts means nothing there
_OF_BAILING = {"n_shared_experts": "num_shared_experts", "num_experts": "num_experts"}

VARIATIONS: dict[str, Family] = {
    "MellumForCausalLM": Family(
        mellum, defaults_variations.MELLUM, lambda fields, layer: False, left_out=mtp
    ),
    "GlmForCausalLM": Family(glm, defaults.GLM4),
    "GraniteMoeForCausalLM": Family(granite_moe, defaults_variations.GRANITE_MOE, spelled=_EXPERTS),
    "GraniteMoeSharedForCausalLM": Family(
        granite_moe, defaults_variations.GRANITE_MOE_SHARED, spelled=_EXPERTS
    ),
    "GraniteSWAForCausalLM": Family(granite_swa, defaults_variations.GRANITE_SWA, all_but_fourth_from_first),
    "GraniteMoeSWAForCausalLM": Family(
        granite_moe_swa, defaults_variations.GRANITE_MOE_SWA, all_but_fourth_from_first, spelled=_EXPERTS
    ),
    "HyperCLOVAXForCausalLM": Family(hyperclovax, defaults_variations.HYPERCLOVAX),
    "AfmoeForCausalLM": Family(
        afmoe,
        defaults_variations.AFMOE,
        all_but_stated,
        only={"route_norm": (True,), "score_func": ("sigmoid",), "n_group": (1, None)},
        older=_NO_OTHER_NAME,
    ),
    "YoutuForCausalLM": Family(youtu, defaults_latent.YOUTU),
    "OlmoForCausalLM": Family(olmo, defaults_variations.OLMO, only={"clip_qkv": (None,)}),
    "CohereForCausalLM": Family(
        cohere, defaults_variations.COHERE, spelled={"rms_norm_eps": "layer_norm_eps"}, seeing=cohere
    ),
    "PhiForCausalLM": Family(phi, defaults_variations.PHI, spelled={"rms_norm_eps": "layer_norm_eps"}),
    "NemotronForCausalLM": Family(
        nemotron, defaults_variations.NEMOTRON, spelled={"rms_norm_eps": "norm_eps"}
    ),
    "Jais2ForCausalLM": Family(jais2, defaults_variations.JAIS2, spelled={"rms_norm_eps": "layer_norm_eps"}),
    "GPTNeoXForCausalLM": Family(
        gpt_neox, defaults_variations.GPT_NEOX, spelled=GPT_NEOX, unused=unused_of_neox
    ),
    "FalconForCausalLM": Family(
        falcon, defaults_classic.FALCON, spelled=FALCON, only={"alibi": (False, None)}
    ),
    "GPTBigCodeForCausalLM": Family(
        gpt_bigcode, defaults_classic.GPT_BIGCODE, spelled=GPT2, only={"add_cross_attention": (False,)}
    ),
    "GPTNeoForCausalLM": Family(
        gpt_neo,
        defaults_classic.GPT_NEO,
        spelled=GPT_NEO,
        older={name: name for name in ("num_hidden_layers", "num_attention_heads")},
        layers=layers_of_gpt_neo,
        unused=lambda cfg: ("*.attn.attention.bias", "*.attn.attention.masked_bias"),
    ),
    "GPTJForCausalLM": Family(gptj, defaults_classic.GPTJ, spelled=GPT2),
    "CodeGenForCausalLM": Family(
        codegen, defaults_classic.GPTJ, spelled=GPT2, unused=lambda cfg: ("*.attn.causal_mask",)
    ),
    "VaultGemmaForCausalLM": Family(
        vaultgemma, defaults.GEMMA2, every_other, {"hidden_act": "hidden_activation"}
    ),
    "FlexOlmoForCausalLM": Family(flex_olmo, defaults_variations.FLEX_OLMO),
    "NanoChatForCausalLM": Family(nanochat, defaults_variations.NANOCHAT),
    "IQuestCoderForCausalLM": Family(
        llama,
        defaults_variations.IQUEST_CODER,
        only={"clip_qkv": (None,), "use_sliding_window": (False, None)},
    ),
    "BailingMoeForCausalLM": Family(
        bailing,
        defaults_variations.BAILING,
        spelled=_OF_BAILING,
        only={
            "norm_head": (False,),
            "score_function": ("softmax",),
            "moe_router_enable_expert_bias": (False,),
        },
    ),
    "BailingMoeV2ForCausalLM": Family(
        bailing2,
        defaults_variations.BAILING2,
        spelled=_OF_BAILING,
        only={"score_function": ("sigmoid",), "moe_router_enable_expert_bias": (True,)},
        left_out=later_layers,
    ),
    "DeciLMForCausalLM": Family(
        deci, defaults_variations.DECI, only={"position_embedding_type": ("rope", None)}
    ),
    "ExaoneForCausalLM": Family(exaone, defaults_variations.EXAONE, spelled=EXAONE),
    "InternLM2ForCausalLM": Family(internlm2, defaults_variations.INTERNLM2),
    "InternLM3ForCausalLM": Family(
        llama, defaults_variations.INTERNLM3, only={"bias": (False,), "qkv_bias": (False,)}
    ),
    "ArceeForCausalLM": Family(arcee, defaults_variations.ARCEE),
    "BitNetForCausalLM": Family(bitnet, defaults_variations.BITNET),
    "HeliumForCausalLM": Family(helium, defaults_variations.HELIUM),
    "MinistralForCausalLM": Family(llama, defaults_variations.MINISTRAL),
    "CwmForCausalLM": Family(cwm, defaults_variations.CWM, all_but_fourth_from_first),
}
