"""What is special in Bamba, Command A+, DeepSeek-V3.2, dots.llm1, GLM-5, Hy3, K-EXAONE, Kimi Linear, LFM3,
MiMo-V2-Flash, OLMo Hybrid and Solar Open.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import CONFIGS

from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Program
from quire.program.ops import (
    Attention,
    ChoosePositions,
    DeltaRule,
    Experts,
    LatentAttention,
    Rotary,
    ShortConvolution,
    StateSpace,
)
from quire.weights.load import load
from quire.weights.plan import plan
from quire.weights.safetensors import Checkpoint


def program(name: str, **changes: Any) -> Program:
    return read_model({**CONFIGS[name], **changes}).program


def windows(name: str, **changes: Any) -> list[int | None]:
    return [op.window for op in program(name, **changes) if isinstance(op, Attention)]


def test_window_layers() -> None:
    assert windows("lfm3", layer_types=None, num_hidden_layers=9) == [None, 24, None, 24]
    assert windows("dots1", num_hidden_layers=3) == [None, 20, 20]
    assert windows("dots1", sliding_window=None) == [None, None]
    assert windows("exaone_moe", num_hidden_layers=4) == [20, None, 20, None]
    assert windows("cohere2_moe", num_hidden_layers=5) == [None, 20, None, 20, None]
    stated = {"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 3}
    assert windows("cohere2_moe", num_hidden_layers=5, **stated) == [20, 20, None, 20, None]
    assert windows("mimo_v2", layer_types=None, num_hidden_layers=6) == [None, 20, 20, 20, 20, None]
    assert windows("mimo_v2", sliding_window_size=7) == [None, 8]
    assert windows("bamba", num_hidden_layers=4, attn_layer_indices=[0, 3]) == [None, None]


def test_the_types_of_layers() -> None:
    def kinds(name: str, *types: type, **changes: Any) -> str:
        return "".join(type(op).__name__[0] for op in program(name, **changes) if isinstance(op, types))

    assert kinds("lfm3", ShortConvolution, Attention, layer_types=None, num_hidden_layers=6) == "SSASAS"
    assert kinds("bamba", StateSpace, Attention) == "AAS"
    of_kimi = (DeltaRule, LatentAttention, Experts)
    assert kinds("kimi_linear", *of_kimi) == "DLEDE"
    assert kinds("kimi_linear", *of_kimi, layer_types=["full_attention"] * 3) == "LLELE"
    unstated = {"linear_attn_config": None, "num_hidden_layers": 6}
    assert kinds("kimi_linear", *of_kimi, first_k_dense_replace=4, **unstated) == "DDDDLEDE"
    assert kinds("olmo_hybrid", DeltaRule, Attention) == "DA"
    for layers, types in ((2, "DA"), (4, "DDDA"), (6, "DDDADD")):
        found = kinds("olmo_hybrid", DeltaRule, Attention, layer_types=None, num_hidden_layers=layers)
        assert found == types
    assert kinds("hy_v3", Attention, Experts, num_hidden_layers=3) == "AAEAE"
    assert kinds("solar_open", Attention, Experts) == "AEAE"
    assert kinds("mimo_v2", Attention, Experts, mlp_layer_types=["sparse", "dense"]) == "AEA"


def test_positions_without_a_window_are_those_of_dense_layers() -> None:
    def rotated(**changes: Any) -> int:
        return sum(isinstance(op, Rotary) for op in program("cohere2_moe", **changes))

    assert rotated() == 2 * 2  # the dense layer, and one of two with experts
    assert rotated(prefix_dense_sliding_window_pattern=2) == 2 * 2  # the same, which has a window now
    assert rotated(first_k_dense_replace=0) == 2 * 2
    assert rotated(layer_types=["full_attention"] * 3) == 2
    assert rotated(layer_types=["full_attention"] * 3, prefix_dense_sliding_window_pattern=4) == 0


def test_ropes_by_type_of_layer() -> None:
    def ropes(name: str, **changes: Any) -> list[tuple[str, float, int]]:
        found = (op.rope for op in program(name, **changes) if isinstance(op, Rotary))
        return [(rope.rope_type, rope.theta, rope.dim) for rope in found][::2]

    assert ropes("lfm3") == [("proportional", 1e6, 4), ("default", 1e4, 4)]
    assert ropes("mimo_v2") == [("default", 5e6, 6), ("default", 1e4, 6)]
    assert ropes("mimo_v2", rope_parameters=None) == [("default", 5e6, 4), ("default", 1e4, 4)]
    assert ropes("bamba") == [("default", 1e4, 2)] * 2
    assert ropes("kimi_linear") == ropes("olmo_hybrid") == []
    assert ropes("olmo_hybrid", rope_parameters=None) == [("default", 1e4, 4)]
    assert ropes("olmo_hybrid", rope_parameters=None, rope_theta=None) == []
    for name in ("lfm3", "mimo_v2"):
        with pytest.raises(ConfigError, match="rope_parameters"):
            program(name, rope_parameters={"full_attention": {"rope_theta": 3e5}})


def test_caches_of_layers_with_a_window_have_twice_the_heads() -> None:
    full, sliding = program("mimo_v2").caches
    sizes = [(spec.num_heads, spec.key_dim, spec.value_dim) for spec in (full, sliding)]
    assert sizes == [(2, 12, 6), (4, 12, 6)]


def test_layers_attend_to_what_the_last_indexer_before_them_chose() -> None:
    def indexers(name: str, **changes: Any) -> str:
        found, last = "", None
        for op in program(name, **changes):
            if isinstance(op, ChoosePositions):
                found, last = found + "i", op.out
            elif isinstance(op, LatentAttention):
                assert op.chosen == last
                found += "a"
        return found

    assert indexers("deepseek_v32") == "iaia"
    assert indexers("glm_moe_dsa") == "iaiaa"
    assert indexers("glm_moe_dsa", index_topk_freq=1) == "iaiaia"
    assert indexers("glm_moe_dsa", index_topk_freq=0) == "iaiaia"
    as_in_5_2 = {"index_topk_freq": 4, "index_skip_topk_offset": 3, "num_hidden_layers": 8}
    assert indexers("glm_moe_dsa", **as_in_5_2) == "iaiaiaaaaiaa"
    assert indexers("glm_moe_dsa", index_topk_pattern="FSF") == "iaaia"
    listed = ["full", "shared", "shared"]
    assert indexers("glm_moe_dsa", index_topk_pattern="FSF", indexer_types=listed) == "iaaa"


def test_indexers() -> None:
    """The first numbers of its queries and keys are rotated, in GLM side by side."""
    for name, interleaved in (("deepseek_v32", False), ("glm_moe_dsa", True)):
        recorded = program(name, index_topk=9)
        rotated = [op for op in recorded if isinstance(op, Rotary)]
        by_shape = {op.x.shape: (op.rope.dim, op.rope.interleaved) for op in rotated}
        assert by_shape == {
            **dict.fromkeys([(5, 6), (1, 6)], (4, interleaved)),
            **dict.fromkeys([(4, 4), (1, 4)], (4, True)),
        }
        choose = next(op for op in recorded if isinstance(op, ChoosePositions))
        assert (choose.out.shape, choose.out.dtype) == ((9,), "int32")
        assert recorded.kv_token_bytes(2) == 2 * (2 * 6 + 16 * (len(recorded.caches) - 2))  # two indexers


def test_delta_rules() -> None:
    def rule(name: str, **changes: Any) -> DeltaRule:
        return next(op for op in program(name, **changes) if isinstance(op, DeltaRule))

    of_kimi, of_olmo = rule("kimi_linear"), rule("olmo_hybrid")
    assert (of_kimi.by_channel, of_kimi.beta_factor, of_kimi.state.shape) == (True, 1.0, (3, 6, 6))
    assert (of_olmo.by_channel, of_olmo.beta_factor, of_olmo.state.shape) == (False, 2.0, (4, 5, 3))
    assert rule("olmo_hybrid", linear_allow_neg_eigval=False).beta_factor == 1.0
    unstated = ("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
    assert rule("olmo_hybrid", **dict.fromkeys(unstated)).state.shape == (4, 3, 6)
    stated = {"linear_num_heads": 2, "linear_head_dim": 4, "linear_conv_kernel_dim": 2}
    assert rule("kimi_linear", linear_attn_config=None, **stated).state.shape == (2, 4, 4)


OTHER_NAMES = {
    "kimi_linear": {"layers.0.mlp.": "layers.0.block_sparse_moe."},
    "olmo_hybrid": {
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
    },
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_tensors_as_transformers_writes_them(name: str, tmp_path: Path) -> None:
    rng, specs = np.random.default_rng(0), program(name).weights()
    tensors: dict[str, np.ndarray] = {}
    for spec in specs.values():
        shape = spec.stored or (spec.shape[1:] if len(spec.sources) > 1 else spec.shape)
        if spec.rows is not None:  # of the heads' matrices of keys and values
            shape = (4 * spec.rows.period, 12 if "kv_b" in spec.name else 16)
        for source in spec.sources:
            tensors.setdefault(source, rng.standard_normal(shape).astype(np.float32))
    found = []
    for renames in ({}, OTHER_NAMES[name]):
        names = {source: source for source in tensors}
        for old, new in renames.items():
            names = {source: named.replace(old, new) for source, named in names.items()}
        assert bool(renames) == any(source != named for source, named in names.items())
        folder = tmp_path / f"{len(found)}"
        folder.mkdir()
        save_file({names[source]: of for source, of in tensors.items()}, folder / "model.safetensors")
        found.append(load(plan(specs, Checkpoint.open(folder), ignored=())))
    for weight, other in zip(*(weights.values() for weights in found), strict=True):
        assert np.array_equal(weight.dense(), other.dense())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek_v32", {"q_lora_rank": None}),
        ("deepseek_v32", {"index_topk": 0}),
        ("deepseek_v32", {"index_topk": 1 << 17}),
        ("deepseek_v32", {"index_head_dim": 3}),
        ("deepseek_v32", {"index_head_dim": 1 << 13}),
        ("deepseek_v32", {"index_n_heads": "5"}),
        ("glm_moe_dsa", {"index_topk_pattern": "SFF"}),
        ("glm_moe_dsa", {"index_topk_pattern": "FF"}),
        ("glm_moe_dsa", {"index_topk_pattern": "FXF"}),
        ("glm_moe_dsa", {"indexer_types": {"0": "full"}}),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", 1]}),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}),
        ("glm_moe_dsa", {"index_topk_freq": None}),
        ("kimi_linear", {"mla_use_nope": False}),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}),
        ("kimi_linear", {"moe_layer_freq": 2}),
        ("kimi_linear", {"linear_attn_config": [1]}),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 2]}}),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [0], "kda_layers": [1, 2]}}),
        ("kimi_linear", {"linear_attn_config": {"head_dim": "6"}}),
        ("kimi_linear", {"linear_attn_config": {"head_dim": 1 << 13}}),
        ("olmo_hybrid", {"linear_num_key_heads": 3}),
        ("olmo_hybrid", {"linear_key_head_dim": 0}),
        ("olmo_hybrid", {"hidden_size": 1 << 20, "linear_key_head_dim": None}),
        ("cohere2_moe", {"expert_selection_fn": "tanh"}),
        ("cohere2_moe", {"shared_expert_combination_strategy": "product"}),
        ("solar_open", {"partial_rotary_factor": 0.5}),
        ("hy_v3", {"first_k_dense_replace": 2}),
        ("dots1", {"scoring_func": "softmax"}),
        ("dots1", {"n_shared_experts": None}),
        ("exaone_moe", {"sliding_window_pattern": "LLLG"}),
        ("lfm3", {"sliding_window": None}),
        ("mimo_v2", {"sliding_window": None}),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        program(name, **changes)
