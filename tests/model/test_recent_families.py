"""What is special in Bamba, Command A+, dots.llm1, Hy3, K-EXAONE, LFM3, MiMo-V2-Flash and Solar Open."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import CONFIGS

from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Program
from quire.program.ops import Attention, Experts, Rotary, ShortConvolution, StateSpace


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
    for name in ("lfm3", "mimo_v2"):
        with pytest.raises(ConfigError, match="rope_parameters"):
            program(name, rope_parameters={"full_attention": {"rope_theta": 3e5}})


def test_caches_of_layers_with_a_window_have_twice_the_heads() -> None:
    full, sliding = program("mimo_v2").caches
    sizes = [(spec.num_heads, spec.key_dim, spec.value_dim) for spec in (full, sliding)]
    assert sizes == [(2, 12, 6), (4, 12, 6)]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
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
