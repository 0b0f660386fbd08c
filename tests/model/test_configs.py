"""config.json: published ones are read or refused for a stated reason, their parameters counted exactly;
broken ones are a ConfigError and never another exception.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIGS, FAMILIES

from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Load
from quire.program.ops import Attention, Rotary
from quire.program.passes import fuse, plan_buffers
from quire.weights.folder import ModelFolder


def windows(name: str, **changes: Any) -> list[int | None]:
    program = read_model({**CONFIGS[name], **changes}).program
    return [op.window for op in program if isinstance(op, Attention)]


def scales(name: str, **changes: Any) -> list[float]:
    program = read_model({**CONFIGS[name], **changes}).program
    return [op.scale for op in program if isinstance(op, Attention)]


# Published configs


def test_published_configs(shared_data: Path) -> None:
    """Every one is recorded with exactly its parameters, or refused by architecture."""
    folder = shared_data / "configs"
    counted = json.loads((folder / "parameters.json").read_text())["models"]
    read, refused = {}, {}
    for path in sorted(folder.glob("*/config.json")):
        raw, name = ModelFolder.at(path.parent).config(), path.parent.name
        try:
            read[name] = read_model(raw).program
        except ConfigError as error:
            refused[name] = (error, raw["architectures"][0])
    assert all(reason in error.message for error, reason in refused.values())
    for name, program in read.items():
        if program.left_out and program.left_out[0].text_only:
            continue  # those counted have its towers
        buffers = ("correction_bias", ".gate.bias", ".tid2eid")
        kept = (w.size for w in program.weights().values() if not w.name.endswith(buffers))
        parameters = sum(kept)  # as counted: without buffers
        assert parameters == counted.get(name, {"parameters": parameters})["parameters"], name
        cost = fuse(program).cost(Load(((1000, 1),), 1), lambda spec: 2 * spec.size)
        assert 0 < cost.weight_bytes < 2.001 * parameters  # the row of a tied table is read once more
        assert plan_buffers(program).nbytes(Load(((0, 512),), 64)) < 1 << 31
    assert len(read) >= 12
    quantized = {"openai--gpt-oss-20b", "nvidia--Llama-3.1-70B-Instruct-FP8"}
    assert {"Qwen--Qwen3-0.6B", "mistralai--Mixtral-8x7B-v0.1", *quantized} <= set(read)
    assert {"deepseek-ai--DeepSeek-V3", "nvidia--DeepSeek-V3.2-NVFP4", "zai-org--GLM-5.2-FP8"} <= set(read)
    assert "sgl-project--DeepSeek-V4-Pro-FP8" in refused
    sizes = {"Flash": 284_332_230_231, "Pro": 1_572_997_179_491}
    for name, parameters in sizes.items():
        weights = read[f"deepseek-ai--DeepSeek-V4-{name}"].weights().values()
        assert sum(w.size for w in weights if not w.name.endswith(buffers)) == parameters


# Architectures


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        *((names, "unknown architecture 'NoSuchModel'") for names in (["NoSuchModel"], "NoSuchModel")),
        *((names, "names no architecture") for names in ([], None, 7, [["x"]], [None], {"a": 1})),
    ],
)
def test_an_unknown_architecture_points_to_the_list_of_models(names: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        read_model({**CONFIGS["llama"], "architectures": names})
    assert "README.md lists the models" in (caught.value.hint or "")


def test_a_near_miss_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        read_model({**CONFIGS["llama"], "architectures": ["LLamaForCausalLM"]})
    assert "did you mean 'LlamaForCausalLM'?" in (caught.value.hint or "")


# Options that change the mathematics


def test_windows_by_family() -> None:
    assert windows("mistral") == [20, 20]
    assert windows("mistral", sliding_window=None) == [None, None]
    assert windows("llama") == [None, None]
    assert windows("gemma2") == [24, None, 24]
    assert windows("gemma3") == [24, 24, None]
    assert windows("gemma3", sliding_window_pattern=2) == [24, None, 24]
    assert windows("gpt_oss") == [20, None]
    assert windows("cohere2", layer_types=None, num_hidden_layers=5) == [24, 24, 24, None, 24]
    stated = ["full_attention", "sliding_attention"]
    assert windows("mistral", layer_types=stated, use_sliding_window=False) == [20, 20]
    assert windows("gpt_oss", layer_types=stated) == [None, 20]
    assert windows("gpt_oss", layer_types=[*stated, *stated]) == [None, 20]
    assert windows("cohere2", sliding_window=None, layer_types=stated) == [None, None]


def test_windows_of_qwen() -> None:
    """Only when use_sliding_window says so, and then from layer max_window_layers on (28 by default)."""
    assert windows("qwen2", sliding_window=9) == [None, None]
    used = {"sliding_window": 9, "use_sliding_window": True}
    assert windows("qwen2", **used) == [None, None]
    assert windows("qwen2", **used, max_window_layers=1) == [None, 9]
    assert windows("qwen3", **used, max_window_layers=0) == [9, 9]
    assert windows("qwen2", **used, num_hidden_layers=30)[26:] == [None, None, 9, 9]
    assert windows("qwen3_moe", **used) == [9, 9]
    stated = ["full_attention", "sliding_attention"]
    assert windows("qwen2", **used, layer_types=stated) == [None, 9]
    with pytest.raises(ConfigError, match="use_sliding_window is false"):
        windows("qwen2", sliding_window=9, layer_types=stated)


def test_windows_of_smollm3() -> None:
    """Without layer_types the layers slide that have no positions, where use_sliding_window says so."""
    used = {"sliding_window": 9, "use_sliding_window": True}
    assert windows("smollm3", **used) == [None, 9]
    assert windows("smollm3", sliding_window=9) == [None, None]
    assert windows("smollm3", **used, no_rope_layers=None, no_rope_layer_interval=1) == [9, 9]
    assert windows("smollm3", **used, layer_types=["sliding_attention", "full_attention"]) == [9, None]


def test_chunks_of_llama4() -> None:
    """Without layer_types those layers have them that rotate, if there is a size of chunks."""
    assert windows("llama4") == [20, 20, None]
    assert windows("llama4", attention_chunk_size=None) == [None] * 3
    with pytest.raises(ConfigError, match="attention_chunk_size is missing"):
        windows("llama4", attention_chunk_size=None, layer_types=["chunked_attention"] * 3)


def test_scales_by_family() -> None:
    assert scales("llama") == [0.5, 0.5]
    assert scales("granite") == [0.3, 0.3]
    assert scales("gemma2", query_pre_attn_scalar=16) == [0.25] * 3
    assert scales("gpt2") == [0.5, 0.5]
    assert scales("gpt2", scale_attn_weights=False) == [1.0, 1.0]
    assert scales("gpt2", scale_attn_by_inverse_layer_idx=True) == [0.5, 0.25]


def test_older_spellings_win_over_defaults() -> None:
    cfg = read_model({**CONFIGS["gpt2"], "activation_function": "relu", "layer_norm_epsilon": 0.5}).config
    assert (cfg.hidden_act, cfg.norm_eps, cfg.hidden_size, cfg.head_dim) == ("relu", 0.5, 16, 4)
    assert (cfg.intermediate_size, cfg.max_position_embeddings) == (64, 256)
    assert read_model({**CONFIGS["gpt2"], "n_inner": 24}).config.intermediate_size == 24
    both = {**CONFIGS["gemma2"], "hidden_act": "relu", "hidden_activation": "silu"}
    assert read_model(both).config.hidden_act == "silu"
    assert read_model({**CONFIGS["cohere2"], "layer_norm_eps": 0.25}).config.norm_eps == 0.25


def test_null_means_absent() -> None:
    for name in FAMILIES:
        raw = CONFIGS[name]
        nulls = {key: None for key in ("rope_scaling", "unknown_field", "use_cache") if key not in raw}
        assert read_model({**raw, **nulls}).program == read_model(raw).program


NOT_DONE: list[tuple[str, dict[str, Any]]] = [
    ("olmoe", {"clip_qkv": 8.0}),
    ("gemma2", {"use_bidirectional_attention": True}),
    ("gpt2", {"add_cross_attention": True}),
    ("gpt_oss", {"swiglu_alpha": 1.5}),
    ("llama", {"per_layer_config": {"0": {"hidden_act": "relu"}}}),
    ("llama", {"is_causal": False}),
    ("gpt2", {"is_causal": None}),
]


@pytest.mark.parametrize(("name", "changes"), NOT_DONE, ids=str)
def test_options_that_are_not_done_are_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} = .* is not supported"):
        read_model({**CONFIGS[name], **changes})


def test_options_that_say_what_is_done_anyway() -> None:
    for name, key, value in (
        ("olmoe", "clip_qkv", None),
        ("gemma2", "use_bidirectional_attention", None),
        ("gemma3", "use_bidirectional_attention", False),
        ("gpt_oss", "swiglu_alpha", 1.702),
        ("gpt2", "add_cross_attention", False),
        ("llama", "per_layer_config", None),
        ("llama", "is_causal", True),
    ):
        assert read_model({**CONFIGS[name], key: value}).program == read_model(CONFIGS[name]).program


def test_layer_types_and_activations_that_are_unknown_are_refused() -> None:
    with pytest.raises(ConfigError, match="linear_attention"):
        read_model({**CONFIGS["qwen3"], "layer_types": ["linear_attention", "full_attention"]})
    with pytest.raises(ConfigError, match="quick_gelu"):
        read_model({**CONFIGS["llama"], "hidden_act": "quick_gelu"})


# Broken configs

BROKEN: list[dict[str, Any]] = [
    {"hidden_size": "16"},
    {"hidden_size": None},
    {"hidden_size": 16.0},
    {"hidden_size": True},
    {"hidden_size": [16]},
    {"hidden_size": -16},
    {"vocab_size": 0},
    {"vocab_size": 1 << 40},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": 1 << 30},
    {"num_attention_heads": 0},
    {"num_attention_heads": -4},
    {"num_attention_heads": None},
    {"num_attention_heads": 64, "head_dim": None},
    {"num_key_value_heads": 3},
    {"num_key_value_heads": 8},
    {"num_key_value_heads": "2"},
    {"head_dim": 5},
    {"head_dim": 0},
    {"head_dim": 1},
    {"intermediate_size": -1},
    {"max_position_embeddings": "long"},
    {"max_position_embeddings": 0},
    {"hidden_act": 3},
    {"hidden_act": "no such"},
    {"hidden_act": ["silu"]},
    {"rms_norm_eps": "1e-6"},
    {"rms_norm_eps": math.nan},
    {"rms_norm_eps": []},
    {"tie_word_embeddings": "yes"},
    {"attention_bias": 1},
    {"mlp_bias": "no"},
    {"original_max_position_embeddings": "4096"},
    {"rope_theta": "1e6"},
    {"rope_theta": 1e300},
    {"rope_scaling": {"type": "dynamic", "factor": 1e200}},
    {"rope_scaling": "yarn"},
]


@pytest.mark.parametrize("changes", BROKEN, ids=str)
def test_broken_configs_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        read_model({**CONFIGS["llama"], **changes})


OF_A_FAMILY: list[tuple[str, dict[str, Any]]] = [
    *(("mistral", {"sliding_window": size}) for size in (True, "all", 0, -5, 4.5)),
    ("gpt_oss", {"layer_types": ["full_attention"]}),
    ("gpt_oss", {"layer_types": "full_attention"}),
    ("gpt_oss", {"layer_types": [1, 2]}),
    ("gpt_oss", {"layer_types": [["a"], {}]}),
    ("gpt_oss", {"layer_types": {"0": "full_attention"}}),
    ("qwen2", {"use_sliding_window": "no", "sliding_window": 4}),
    *(("smollm3", {"no_rope_layers": rotates}) for rotates in ("1101", [1, None], [1], [])),
    *(("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": n}) for n in (0, "4")),
    ("gemma2", {"query_pre_attn_scalar": 0}),
    ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3", {"rope_parameters": {"full_attention": "linear"}}),
    ("mixtral", {"num_experts": "4"}),
    ("mixtral", {"num_experts": None}),
    ("mixtral", {"num_experts": 1 << 30}),
    ("mixtral", {"num_experts_per_tok": 5}),
    ("mixtral", {"num_experts_per_tok": 0}),
    ("olmoe", {"norm_topk_prob": "true"}),
    ("qwen3_moe", {"mlp_only_layers": 3}),
    ("qwen3_moe", {"mlp_only_layers": ["0"]}),
    ("qwen3_moe", {"decoder_sparse_step": 0}),
    ("qwen3_moe", {"moe_intermediate_size": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": "1"}),
    ("gemma3", {"sliding_window_pattern": 0}),
    ("gemma3", {"sliding_window_pattern": "3"}),
    ("gemma3", {"rope_local_base_freq": "1e4"}),
    ("gemma3", {"rope_local_base_freq": 0.5}),
    ("gemma2", {"query_pre_attn_scalar": "4"}),
    ("gemma2", {"attn_logit_softcapping": -1.0}),
    ("gemma2", {"final_logit_softcapping": "30"}),
    ("granite", {"residual_multiplier": "x"}),
    ("granite", {"logits_scaling": -1}),
    ("cohere2", {"logit_scale": "x"}),
    ("glm4", {"partial_rotary_factor": "half"}),
    ("gpt_oss", {"swiglu_limit": "7"}),
    ("gpt2", {"n_embd": "16"}),
    ("gpt2", {"n_head": 0}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": 1}),
    ("phi3-longrope", {"original_max_position_embeddings": 0}),
]


@pytest.mark.parametrize(("name", "changes"), OF_A_FAMILY, ids=str)
def test_broken_configs_of_a_family_are_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        read_model({**CONFIGS[name], **changes})


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {**_YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONGROPE = {**_YARN, "rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0, 1.0]}
_SCALINGS: list[dict[str, Any]] = [
    *(_YARN | {"original_max_position_embeddings": n} for n in (0.5, 64.5, -1, 1 << 31, math.nan)),
    *(_YARN | {"factor": n} for n in (0.5, 1e7, math.inf, 10**400, "4")),
    *(_YARN | {name: n} for name in ("beta_fast", "beta_slow") for n in (0, -1, 1e300, math.nan)),
    _YARN | {"beta_slow": 33},
    *(_YARN | {"attention_factor": n} for n in (0, 1e9)),
    _YARN | {"mscale": 1e9, "mscale_all_dim": 1},
    _YARN | {"truncate": "no"},
    _YARN | {"factor": 1e6, "original_max_position_embeddings": 1 << 30},
    _LLAMA3 | {"low_freq_factor": 5.0},
    _LLAMA3 | {"high_freq_factor": 1e300},
    _LONGROPE | {"short_factor": [1.0, 0]},
    _LONGROPE | {"long_factor": [1.0, math.inf]},
]
# Numbers that would be read, and then be infinite, no numbers, or out of memory in some step.
EXTREME: list[tuple[str, dict[str, Any], str]] = [
    *(("llama", {"rms_norm_eps": n}, "rms_norm_eps") for n in (-1, 0, 1e-300, 1.5, 1e300, 10**400, math.inf)),
    *(("llama", {"rope_theta": n}, "rope_theta") for n in (-1.0, 0, 1, 1.0000001, 1e16, 10**400, math.inf)),
    *(("llama", {"head_dim": n}, "head_dim") for n in (0, 1 << 13, 1 << 31)),
    *(("llama", {"rope_scaling": scaling}, "rope scaling") for scaling in _SCALINGS),
    ("gemma3", {"rope_local_base_freq": 1.0000001}, "rope_theta"),
    *(("gemma2", {"query_pre_attn_scalar": n}, "query_pre_attn") for n in (1e-300, 1e300, 0, -4)),
    *(("gemma2", {"attn_logit_softcapping": n}, "attn_logit") for n in (1e-300, 1e300)),
    *(("gpt_oss", {"swiglu_limit": n}, "swiglu_limit") for n in (0, -7.0, 1e300)),
    *(("granite", {"residual_multiplier": n}, "residual_multiplier") for n in (1e300, -1e300, 10**400)),
    *(("granite", {"logits_scaling": n}, "logits_scaling") for n in (1e-300, 1e300)),
    *(("glm4", {"partial_rotary_factor": n}, "partial_rotary_factor") for n in (1.5, -0.5, 1e300)),
    ("smollm3", {"no_rope_layers": [1] * 2000}, "no_rope_layers"),
    ("llama", {"num_hidden_layers": 4096}, "num_hidden_layers"),
    ("mixtral", {"num_experts": 4097}, "num_experts"),
    ("mixtral", {"num_experts": 4096, "num_hidden_layers": 1024}, "more than 131,072 tensors"),
]


@pytest.mark.parametrize(("name", "changes", "named"), EXTREME, ids=lambda value: str(value)[:60])
def test_extreme_numbers_are_refused(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        read_model({**CONFIGS[name], **changes})
    assert len(caught.value.message) < 250


@pytest.mark.parametrize("name", ["A" * 10**6, "\x1b[2J\u202e"], ids=["long", "steering"])
def test_what_is_quoted_is_short_and_steers_no_terminal(name: str) -> None:
    for changes in ({"architectures": [name]}, {"hidden_act": name}):
        with pytest.raises(ConfigError) as caught:
            read_model({**CONFIGS["llama"], **changes})
        assert len(caught.value.message) < 250
        assert name[:100] not in (caught.value.hint or "")
        assert caught.value.message.isprintable()


FIELDS = sorted(
    {key for raw in CONFIGS.values() for key in raw}
    | {key for changes in (*BROKEN, *(c for _, c in OF_A_FAMILY)) for key in changes}
    | {"rope_parameters", "max_window_layers", "swiglu_alpha", "clip_qkv", "model_type"}
    | {"partial_rotary_factor", "quantization_config", "scale_attn_weights"}
)
SCALING_FIELDS = [
    *("type", "rope_type", "factor", "rope_theta", "full_attention", "sliding_attention", "long_factor"),
    *("original_max_position_embeddings", "attention_factor", "mscale", "beta_fast", "short_factor"),
]
SCALING = st.dictionaries(
    st.sampled_from(SCALING_FIELDS),
    st.one_of(
        st.none(),
        st.integers(-1, 70),
        st.floats(),
        st.sampled_from(["linear", "dynamic", "yarn", "llama3", "longrope", "default"]),
        st.dictionaries(st.just("rope_theta"), st.floats(), max_size=1),
        st.lists(st.floats(), max_size=2),
    ),
    max_size=5,
)
ODD = [1 << 31, 1 << 70, -(1 << 70), 0.0, -0.0, 0.5, 1e308, math.nan, math.inf, "", "8", "silu"]
ITEMS = st.one_of(st.none(), st.integers(-1, 3), st.floats(), st.text(max_size=3))
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from(ODD),
    st.lists(ITEMS, max_size=3),
    SCALING,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=4))
def test_junk_is_read_or_refused(name: str, changes: dict[str, Any]) -> None:
    """Whatever a field holds: a program whose frequencies can be computed, or a ConfigError."""
    try:
        model = read_model({**CONFIGS[name], **changes})
    except ConfigError:
        return
    assert model.max_context >= model.config.max_position_embeddings
    for op in model.program:
        if isinstance(op, Rotary):
            for limit in (1, 10**6):
                frequencies = op.rope.frequencies(op.rope.variant(limit))
                assert frequencies.shape == (op.rope.dim // 2,)
    assert model.program.cost(Load(((3, 2),), 1), lambda spec: spec.size).flops > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_missing_field_has_a_default_or_is_refused(name: str) -> None:
    for field in CONFIGS[name]:
        left = {key: value for key, value in CONFIGS[name].items() if key != field}
        with contextlib.suppress(ConfigError):
            read_model(left)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_size_is_named(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is missing"):
        read_model({**CONFIGS["llama"], field: None})
