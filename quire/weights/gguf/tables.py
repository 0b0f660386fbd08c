"""Names of tensors in GGUF files, and what they are called in config.json's world: in a layer, or whole.

A name with its ending (.weight, .bias, .scale, or none) stands for a whole name, one without for a module. *
stands for the number of an expert, or of one of a list that a file has in one tensor. A name of a weight that
the checkpoint has as part of another is that of the program (WeightSpec.name).
"""

from __future__ import annotations

PLAIN_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "cls.output": "score",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PACKED = {"ffn_up": "mlp.gate_up_proj"}  # gate and up in one matrix
NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA = {**NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
DENSE = {name: f"{name}.linear" for name in ("dense_2", "dense_3")}  # modules after pooling
EMBEDDING_GEMMA = {**GEMMA, **DENSE}
GLM4 = {**PACKED, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
SEED_OSS = {"post_attention_norm": "post_attention_layernorm"}
HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
STABLELM = {  # of each head a norm of its own
    "attn_q_norm": "self_attn.q_layernorm.norms.*",
    "attn_k_norm": "self_attn.k_layernorm.norms.*",
}
PHI2 = {
    "output_norm": "model.final_layernorm",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
STARCODER2 = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
EXAONE = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn_q": "attn.attention.q_proj",
    "attn_k": "attn.attention.k_proj",
    "attn_v": "attn.attention.v_proj",
    "attn_output": "attn.attention.out_proj",
    "ffn_norm": "ln_2",
    "ffn_gate": "mlp.c_fc_0",
    "ffn_up": "mlp.c_fc_1",
    "ffn_down": "mlp.c_proj",
}

_ENCODER = {"token_embd": "embeddings.word_embeddings", "token_types": "embeddings.token_type_embeddings"}
_BERT = {
    **_ENCODER,
    "token_embd_norm": "embeddings.LayerNorm",
    "position_embd": "embeddings.position_embeddings",
}
BERT = {
    **_BERT,
    **{f"attn_{part[0]}": f"attention.self.{part}" for part in ("query", "key", "value")},
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
    "cls": "pooler.dense",  # also of RoBERTa, whose own name is another
    "cls.output": "classifier",
}
NOMIC_BERT = {
    **_ENCODER,
    "token_embd_norm": "emb_ln",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc11",
    "ffn_gate": "mlp.fc12",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}
MODERN_BERT = {
    "token_embd": "embeddings.tok_embeddings",
    "token_embd_norm": "embeddings.norm",
    "output_norm": "final_norm",
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}
DISTILBERT = {
    **_BERT,
    **{f"attn_{part}": f"attention.{part}_lin" for part in "qkv"},
    "attn_output": "attention.out_lin",
    "attn_output_norm": "sa_layer_norm",
    "ffn_up": "ffn.lin1",
    "ffn_down": "ffn.lin2",
    "layer_output_norm": "output_layer_norm",
    "cls": "pre_classifier",
    "cls.output": "classifier",
}


def _experts(module: str, router: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return the names of experts that the checkpoint has one by one."""
    parts = {"ffn_gate": gate, "ffn_up": up, "ffn_down": down}
    stacked = {f"{part}_exps": f"{module}.experts.*.{name}" for part, name in parts.items()}
    single = {f"{part}.*": f"{module}.experts.*.{name}" for part, name in parts.items()}
    return {"ffn_gate_inp": f"{module}.{router}", **stacked, **single}


def _fused(module: str, down: str) -> dict[str, str]:
    """Return the names of experts that the checkpoint has in one tensor, gate and up together."""
    return {
        "ffn_gate_up_exps.weight": f"{module}.gate_up_proj",
        "ffn_gate_exps.weight": f"{module}.gate",
        "ffn_up_exps.weight": f"{module}.up",
        "ffn_down_exps.weight": f"{module}.{down}",
    }


def _shared(module: str) -> dict[str, str]:
    """Return the names of an expert that every token uses."""
    return {f"ffn_{part}_shexp": f"{module}.{part}_proj" for part in ("gate", "up", "down")}


def _mamba(module: str) -> dict[str, str]:
    """Return the names of Mamba-2's mixer."""
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d": f"{module}.conv1d",
        "ssm_dt.bias": f"{module}.dt_bias",
        "ssm_a": f"{module}.A_log",
        "ssm_d": f"{module}.D",
        "ssm_norm": f"{module}.norm",
        "ssm_out": f"{module}.out_proj",
    }


MIXTRAL = _experts("block_sparse_moe", "gate", "w1", "w3", "w2")
MOE = _experts("mlp", "gate", "gate_proj", "up_proj", "down_proj")
HUNYUAN_MOE = {
    **HUNYUAN,
    **_experts("mlp", "gate.wg", "gate_proj", "up_proj", "down_proj"),
    **_shared("mlp.shared_mlp"),
}
ERNIE4_5_MOE = {
    **MOE,
    **_shared("mlp.shared_experts"),
    "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
}
MINIMAX_M2 = {**MIXTRAL, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}

# Prediction layers: Qwen's under a name of their own, others as a layer after the last
_QWEN_PREDICTION = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
    "nextn.shared_head_head": "mtp.shared_head.head",
    "nextn.embed_tokens": "mtp.embed_tokens",
}
_LATER_PREDICTION = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}
_NET = {
    **_QWEN_PREDICTION,
    "post_attention_norm": "post_attention_layernorm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_GATED_SHARED = {**_shared("mlp.shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
QWEN2_MOE = {**MOE, **_GATED_SHARED}
QWEN35 = {
    **_NET,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
QWEN35_MOE = {
    **QWEN35,
    **_fused("mlp.experts", "down_proj"),
    **_GATED_SHARED,
    "ffn_gate_inp": "mlp.gate",
}
QWEN3_VL_MOE = {**_fused("mlp.experts", "down_proj"), "ffn_gate_inp": "mlp.gate"}
QWEN_PREDICTING = {  # whose experts are one by one in Qwen3.5 as well
    f"ffn_{part}_exps.weight": f"mlp.experts.*.{part}_proj.weight" for part in ("gate", "up", "down")
}
QWEN3_NEXT = {
    **_NET,
    **MOE,
    **_GATED_SHARED,
    "attn_qkv.weight": "linear_attn.in_proj_qkvz.qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_qkvz.z.weight",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of files made before these were two
    "ssm_ba": "linear_attn.in_proj_ba",
}
_LAYER_INPUTS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA4 = {
    **GEMMA,
    **_LAYER_INPUTS,
    **_fused("experts", "down_proj"),
    "layer_output_scale.weight": "layer_scalar",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
GEMMA3N = {
    **GEMMA,
    **_LAYER_INPUTS,
    "altup_proj": "model.altup_projections.*",
    "altup_unembd_proj": "model.altup_unembed_projections.*",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_BIASED = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # of older files, and of MiniCPM3
    "attn_k_b.weight": "self_attn.kv_b_proj.keys.weight",
    "attn_v_b.weight": "self_attn.kv_b_proj.values.weight",
}
LATENT = {**_LATER_PREDICTION, **MOE, **_BIASED, **_shared("mlp.shared_experts"), **_LATENT}
SPARSE_LATENT = {
    **LATENT,
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
KIMI_LINEAR = {
    **_LATENT,
    **_experts("block_sparse_moe", "gate", "w1", "w3", "w2"),
    **_shared("block_sparse_moe.shared_experts"),
    "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_a": "self_attn.A_log",
    "ssm_norm": "self_attn.o_norm",
}
LATENT_FUSED = {**LATENT, **_fused("mlp.experts", "down_proj")}
GLM4_MOE = {
    **_LATER_PREDICTION,
    **MOE,
    **_BIASED,
    **_shared("mlp.shared_experts"),
    "post_attention_norm": "post_attention_layernorm",
}
BAILING2 = {
    **_LATER_PREDICTION,
    **MOE,
    **_shared("mlp.shared_experts"),
    "exp_probs_b.bias": "mlp.gate.expert_bias",
    "token_embd": "model.word_embeddings",
    "attn_qkv": "attention.query_key_value",
    "attn_q_norm": "attention.query_layernorm",
    "attn_k_norm": "attention.key_layernorm",
    "attn_output": "attention.dense",
}
LFM2 = {
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
LFM2_MOE = {
    **LFM2,
    **_experts("feed_forward", "gate", "w1", "w3", "w2"),
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_BOTH = dict.fromkeys(("ffn_gate", "ffn_up", "ffn_gate_shexp", "ffn_up_shexp"), "shared_mlp.input_linear")
GRANITE_HYBRID = {
    **_mamba("mamba"),
    **_BOTH,  # the rows of the gate before those of what it multiplies
    "ffn_down": "shared_mlp.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps.weight": "block_sparse_moe.gate",
    "ffn_up_exps.weight": "block_sparse_moe.up",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
FALCON_H1 = {
    **_mamba("mamba"),
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm.weight",  # has no ending in files
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
NEMOTRON_H = {
    **_mamba("mixer"),
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.*.up_proj",
    "ffn_down_exps": "mixer.experts.*.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
LLAMA4 = {
    **_fused("feed_forward.experts", "down"),
    **_shared("feed_forward.shared_expert"),
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
}
