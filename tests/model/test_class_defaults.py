"""What config.json leaves out: the defaults of transformers' configuration classes, for every key.

class_defaults.json holds all fields of the classes; `make oracle` compares it with those installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import CONFIGS, FAMILIES

from quire.errors import ConfigError
from quire.models import read_model
from quire.models.registry import FAMILIES as KNOWN
from quire.models.registry import TEXTS
from quire.program import Program
from quire.program.ops import Attention, Rotary

CLASSES = json.loads(Path(__file__).with_name("class_defaults.json").read_text())
# These change no logits of a model that is not being trained.
TRAINING = {
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "initializer_range"),
    *("residual_dropout", "embedding_dropout", "hidden_dropout", "input_jitter_noise"),
    *("altup_coef_clip", "router_aux_loss_coef", "router_jitter_noise", "pretraining_tp", "num_mtp_layers"),
    "z_loss_coefficient",
    *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    *("resid_dropout", "embed_dropout", "classifier_dropout", "is_decoder", "embedding_initializer_range"),
    *("mtp_layer_types", "mtp_mlp_layer_types"),
}
CHUNKS = {"mamba_chunk_size", "chunk_size"}  # positions computed at once: another order of sums
OUTPUTS = {"use_cache", "output_router_logits"}
PRECISION = {"reorder_and_upcast_attn", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"}
HEADS_OF_OTHER_TASKS = {
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    "summary_first_dropout",
}
TOKENS = {"bos_token_id", "pad_token_id", "eos_token_id", "eod_token_id", "sep_token_id"}
HARMLESS = TRAINING | CHUNKS | OUTPUTS | PRECISION | HEADS_OF_OTHER_TASKS | TOKENS
# The class ties nothing, has no window and no biases in attention, and has no largest step.
_NEMOTRON_UNUSED = {
    *("tie_word_embeddings", "sliding_window", "time_step_limit", "time_step_max", "time_step_floor"),
    *("expand", "mamba_proj_bias", "mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep"),
    *("moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type", "residual_in_fp32"),
    *("hidden_dropout", "rescale_prenorm_residual", "n_shared_experts", "attention_bias"),
}
_OF_DSA = ("head_dim", "mlp_bias", "layer_types")
NOT_READ = {
    ("CodeGenForCausalLM", "n_ctx"),
    ("FalconH1ForCausalLM", "num_logits_to_keep"),
    ("BambaForCausalLM", "num_logits_to_keep"),
    ("HYV3ForCausalLM", "enable_moe_fp32_combine"),  # all is computed in float32
    *(("NemotronHForCausalLM", key) for key in _NEMOTRON_UNUSED),
    ("GptOssForCausalLM", "hidden_act"),
    ("Gemma3ForCausalLM", "attn_logit_softcapping"),
    ("DeepseekV2ForCausalLM", "head_dim"),  # the class replaces it by qk_rope_head_dim
    ("MiniCPM3ForCausalLM", "head_dim"),
    ("DeepseekV4ForCausalLM", "num_nextn_predict_layers"),  # layers that are left out
    # The classes' MLPs have no biases, whatever is stated, and layers are all of one type.
    *((f"{name}ForCausalLM", key) for name in ("DeepseekV32", "GlmMoeDsa") for key in _OF_DSA),
}
# Of older checkpoints: no class defines them any more, but each takes them in.
OLDER = {
    *("rope_theta", "rope_scaling", "original_max_position_embeddings", "partial_rotary_factor"),
    *("hybrid_override_pattern", "rotary_dim", "architectures"),
    *("sliding_window_pattern", "rope_local_base_freq", "head_dim", "full_attention_interval"),
    *("global_head_dim", "num_global_key_value_heads", "per_layer_config"),  # of Gemma 4
    *("rope_parameters", "first_k_dense_replace", "sliding_window_size"),  # of Command A+, of MiMo-V2
    "linear_attn_config",  # of Kimi Linear
    "attention_layers",  # of GPT-Neo
    *("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),  # of GLM-5.2
    *("compress_ratios", "compress_rate_csa", "compress_rate_hca", "num_hash_layers"),  # of DeepSeek-V4
    *("qk_rope_head_dim", "model_type"),
}
KEYS = [(name, key) for name in FAMILIES for key in CLASSES[CONFIGS[name]["architectures"][0]]]


def read(raw: dict[str, Any]) -> Program | str:
    try:
        return read_model(raw).program
    except ConfigError as error:
        return error.message


def without(name: str, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in CONFIGS[name].items() if key not in keys}


@pytest.mark.parametrize("architecture", [*KNOWN, *TEXTS])
def test_every_key_of_a_class_is_read_refused_or_harmless(architecture: str) -> None:
    family, stated = {**KNOWN, **TEXTS}[architecture], CLASSES[architecture]
    of_the_whole = {"tie_word_embeddings", "eos_token_id"} if architecture in TEXTS else set()
    for key, default in stated.items():
        name = next((name for name, own in family.spelled.items() if own == key), key)
        if key in family.only:
            assert default in family.only[key], key
        elif key not in HARMLESS | of_the_whole and (architecture, key) not in NOT_READ:
            assert family.defaults[name] == default, key
    known = {*stated, *OLDER, *of_the_whole}
    assert not [name for name in family.defaults if not {name, family.spelled.get(name)} & known]


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_a_key_left_out_has_the_default_of_its_class(name: str, key: str) -> None:
    family = KNOWN[CONFIGS[name]["architectures"][0]]
    spellings = {general for general, own in family.spelled.items() if own == key}
    left = without(name, key, *spellings)
    assert read(left) == read({**left, key: CLASSES[CONFIGS[name]["architectures"][0]][key]})


def test_defaults_that_were_once_wrong() -> None:
    """Told in full, so that a table with a slip does not pass as its own witness."""

    def ops(name: str, *keys: str, **changes: Any) -> tuple[Attention, Rotary, float]:
        model = read_model({**without(name, *keys), **changes})
        attention = next(op for op in model.program if isinstance(op, Attention))
        rotary = next(op for op in model.program if isinstance(op, Rotary))
        return attention, rotary, model.config.norm_eps

    keys = ("rms_norm_eps", "rope_theta", "rope_scaling", "sliding_window")
    attention, rotary, eps = ops("gpt_oss", *keys)
    assert (attention.window, eps, rotary.rope.theta) == (128, 1e-5, 150000.0)
    rope = rotary.rope
    assert (rope.rope_type, rope.factor, rope.original_max_position) == ("yarn", 32.0, 4096)
    assert (rope.truncate, rope.beta_fast, rope.beta_slow) == (False, 32.0, 1.0)
    assert ops("gemma3", "sliding_window")[0].window == 4096
    assert ops("gemma3", "sliding_window", sliding_window=None)[0].window is None
    assert ops("gemma3", attn_logit_softcapping=5.0)[0].softcap is None
    assert ops("gemma2", "attn_logit_softcapping")[0].softcap == 50.0
    assert ops("gemma2", attn_logit_softcapping=None)[0].softcap is None
    assert [ops(name)[2] for name in ("phi3", "cohere2", "glm4")] == [1e-5, 1e-5, 1.5625e-7]
    assert ops("smollm3")[1].rope.theta == 2_000_000.0
    assert ops("mixtral")[1].rope.theta == 1_000_000.0


def test_biases_of_a_family_that_has_them() -> None:
    for name, biased in (("glm4", True), ("gpt_oss", True), ("llama", False), ("mistral", False)):
        names = read_model(without(name, "attention_bias")).program.weights()
        assert any(key.endswith("q_proj.bias") for key in names) is biased
    bare = read_model({**CONFIGS["gpt_oss"], "attention_bias": False}).program.weights()
    assert not any(key.endswith("_proj.bias") for key in bare)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "llama",
            {"sliding_window": 9, "layer_types": ["sliding_attention"] * 2, "use_sliding_window": True},
        ),
        ("llama", {"no_rope_layers": [0, 0], "no_rope_layer_interval": 1}),
        ("llama", {"attn_logit_softcapping": 2.0, "logit_scale": 3.0, "layer_norm_eps": 0.5}),
        ("llama", {"partial_rotary_factor": 0.5, "n_embd": 8, "hidden_activation": "relu"}),
        ("mistral", {"attention_bias": True, "mlp_bias": True, "max_window_layers": 1}),
        ("mistral", {"layer_types": ["full_attention"] * 2, "use_sliding_window": False}),
        ("qwen2", {"attention_bias": False, "mlp_bias": True, "no_rope_layers": [0, 0]}),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}),
        ("gemma2", {"hidden_act": "relu", "sliding_window_pattern": 3, "rope_local_base_freq": 3.0}),
        ("gemma3", {"attn_logit_softcapping": 2.0, "_sliding_window_pattern": 2, "hidden_act": "silu"}),
        ("olmo2", {"sliding_window": 9, "clip_qkv": 2.0, "mlp_bias": True}),
        ("olmoe", {"sliding_window": 9}),
        ("granite", {"sliding_window": 9, "logit_scale": 3.0}),
        ("cohere2", {"rms_norm_eps": 0.5, "logits_scaling": 3.0, "use_sliding_window": False}),
        ("glm4", {"sliding_window": 9, "use_bidirectional_attention": True}),
        ("gpt2", {"head_dim": 2, "num_key_value_heads": 2, "intermediate_size": 8, "rms_norm_eps": 0.5}),
        ("gpt_oss", {"sliding_window_pattern": 1, "hidden_act": "relu", "use_sliding_window": False}),
        ("phi3", {"attention_bias": True, "use_sliding_window": False}),
    ],
    ids=str,
)
def test_keys_of_other_families_mean_nothing(name: str, changes: dict[str, Any]) -> None:
    assert read_model({**CONFIGS[name], **changes}).program == read_model(CONFIGS[name]).program


@pytest.mark.parametrize(
    ("name", "own", "synonym"),
    [
        ("gpt2", "n_embd", "hidden_size"),
        ("mixtral", "num_local_experts", "num_experts"),
        ("olmoe", "num_experts", "num_local_experts"),
        ("qwen3_moe", "num_experts", "num_local_experts"),
    ],
)
def test_a_synonym_counts_more(name: str, own: str, synonym: str) -> None:
    raw = without(name, own, synonym)
    assert read({**raw, own: 32, synonym: 8}) == read({**raw, own: 8}) != read({**raw, own: 32})
    assert read({**raw, own: 8, synonym: None}) == read({**raw, synonym: 8})


def test_a_head_of_gpt2_may_be_its_own() -> None:
    tied = read_model(CONFIGS["gpt2"]).program.weights()
    own = read_model({**CONFIGS["gpt2"], "tie_word_embeddings": False}).program.weights()
    assert set(own) - set(tied) == {"lm_head.weight"}
