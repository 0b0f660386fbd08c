"""Families of 2025 and 2026 that vary older ones, by the architecture name in config.json."""

from __future__ import annotations

from quire.models import (
    cohere2_moe,
    deepseek_v4,
    defaults_latent,
    defaults_recent,
    kimi_linear,
    mimo_v2,
    olmo_hybrid,
)
from quire.models.bailing import bailing2
from quire.models.bamba import bamba
from quire.models.config import LINEAR
from quire.models.deepseek import deepseek_v3
from quire.models.dots1 import dots1, solar_open
from quire.models.exaone_moe import exaone_moe
from quire.models.family import Family
from quire.models.hy_v3 import hy_v3
from quire.models.left_out import later_layers, mtp
from quire.models.lfm2 import CONV
from quire.models.lfm3 import lfm3
from quire.models.sparse_latent import deepseek_v32, glm_moe_dsa, mtp_glm_dsa, mtp_v32
from quire.models.windows import by_pattern, from_max_window_layers

_ROUTED = {"num_experts": "n_routed_experts"}
_OF_KIMI = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}

_OF_SARVAM = {"num_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
_AS_V3 = {"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}

RECENT: dict[str, Family] = {
    "Lfm3ForCausalLM": Family(
        lfm3,
        defaults_recent.LFM3,
        spelled={"rms_norm_eps": "norm_eps"},
        kinds=(CONV,),
    ),
    "HYV3ForCausalLM": Family(
        hy_v3, defaults_recent.HY_V3, only={"first_k_dense_replace": (1,)}, left_out=later_layers
    ),
    "Dots1ForCausalLM": Family(
        dots1,
        defaults_recent.DOTS1,
        from_max_window_layers,
        spelled=_ROUTED,
        only={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    ),
    "SolarOpenForCausalLM": Family(
        solar_open,
        defaults_recent.SOLAR_OPEN,
        spelled=_ROUTED,
        only={"first_k_dense_replace": (0,), "partial_rotary_factor": (1,)},
    ),
    "ExaoneMoeForCausalLM": Family(
        exaone_moe,
        defaults_recent.EXAONE_MOE,
        by_pattern,
        spelled={"n_shared_experts": "num_shared_experts"},
        older={"num_experts": "num_experts"},
        only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        left_out=mtp,
    ),
    "Cohere2MoeForCausalLM": Family(
        cohere2_moe.cohere2_moe,
        defaults_recent.COHERE2_MOE,
        cohere2_moe.slides,
        spelled={"rms_norm_eps": "layer_norm_eps", "root_mean_square_eps": "rms_norm_eps"},
        older={"num_experts": "num_experts"},
    ),
    "MiMoV2FlashForCausalLM": Family(
        mimo_v2.mimo_v2,
        defaults_recent.MIMO_V2,
        mimo_v2.slides,
        spelled=_ROUTED,
        only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        left_out=mtp,
    ),
    "BambaForCausalLM": Family(bamba, defaults_recent.BAMBA),
    "KimiLinearForCausalLM": Family(
        kimi_linear.kimi_linear,
        defaults_recent.KIMI_LINEAR,
        spelled={"num_experts": "num_local_experts"},
        older=_OF_KIMI,
        only={
            "mla_use_nope": (True,),
            "moe_router_activation_func": ("sigmoid",),
            "moe_layer_freq": (1,),
        },
        kinds=(LINEAR,),
        layers=kimi_linear.layers_of,
    ),
    "DeepseekV32ForCausalLM": Family(
        deepseek_v32,
        defaults_latent.DEEPSEEK_V32,
        spelled=_ROUTED,
        only=_AS_V3,
        left_out=later_layers,
        prediction=mtp_v32,
    ),
    "DeepseekV4ForCausalLM": Family(
        deepseek_v4.deepseek_v4,
        defaults_latent.DEEPSEEK_V4,
        spelled=_ROUTED,
        older={"moe_intermediate_size": "intermediate_size"},
        only={
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "n_shared_experts": (1,),
            "norm_topk_prob": (True,),
            "scoring_func": ("sqrtsoftplus",),
            "tie_word_embeddings": (False,),
            "topk_method": ("noaux_tc",),
        },
        layers=deepseek_v4.layers_of,
        left_out=mtp,
    ),
    "GlmMoeDsaForCausalLM": Family(
        glm_moe_dsa,
        defaults_latent.GLM_MOE_DSA,
        spelled=_ROUTED,
        only={**_AS_V3, "rope_interleave": (True,), "indexer_rope_interleave": (True,)},
        left_out=later_layers,
        prediction=mtp_glm_dsa,
    ),
    "SarvamMoEForCausalLM": Family(
        bailing2,
        defaults_recent.SARVAM_MOE,
        spelled={**_ROUTED, "use_qkv_bias": "attention_bias"},
        older={**_OF_SARVAM, "use_qkv_bias": "use_qkv_bias"},
        only={"score_function": ("sigmoid",), "use_bias": (False, None)},
        left_out=later_layers,
    ),
    "SarvamMLAForCausalLM": Family(
        deepseek_v3,
        defaults_recent.SARVAM_MLA,
        spelled=_ROUTED,
        older=_OF_SARVAM,
        only=_AS_V3,
        left_out=later_layers,
    ),
    "OlmoHybridForCausalLM": Family(
        olmo_hybrid.olmo_hybrid,
        defaults_recent.OLMO_HYBRID,
        kinds=(LINEAR,),
        layers=olmo_hybrid.layers_of,
    ),
}
