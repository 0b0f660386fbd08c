"""What is special in families that differ from others in a few lines."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import CONFIGS

from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Program
from quire.program.ops import Attention, Rotary


def program(name: str, **changes: Any) -> Program:
    return read_model({**CONFIGS[name], **changes}).program


def windows(name: str, **changes: Any) -> list[int | None]:
    return [op.window for op in program(name, **changes) if isinstance(op, Attention)]


def bases(name: str, **changes: Any) -> list[float]:
    """The bases of the ropes of all queries."""
    return [op.rope.theta for op in program(name, **changes) if isinstance(op, Rotary)][::2]


def of_deci(**changes: Any) -> dict[str, Any]:
    """The block_configs of four layers whose parts state this."""
    stated = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}}
    parts = {name: {**part, **changes} for name, part in stated.items()}
    return {"block_configs": [parts] * 4}


def test_window_layers() -> None:
    assert windows("cwm", num_hidden_layers=5) == [None, 20, 20, 20, None]
    assert windows("granite_swa", num_hidden_layers=5, layer_rope_theta=None) == [None, 20, 20, 20, None]
    assert windows("ministral", layer_types=None) == [20, 20]
    assert windows("mellum", layer_types=None) == [None, None, None]
    assert windows("afmoe") == [20, None, 20]
    assert windows("gpt_neo") == [20, None]
    assert windows("gpt_neo", attention_layers=["global", "local"]) == [None, 20]
    assert windows("afmoe", global_attn_every_n_layers=3) == [20, 20, None]


def test_ropes() -> None:
    assert bases("mellum") == [10_000.0, 500_000.0, 10_000.0]
    assert len(bases("afmoe")) == 2  # of three layers
    assert bases("granite_swa") == [10_000.0, 500.0]  # the first layer rotates nothing
    assert bases("granite_swa", layer_rope_theta=None, rope_theta=700.0) == [700.0] * 3
    assert bases("cohere") == [500_000.0] * 2
    assert bases("gpt_neox", rotary_emb_base=300.0) == [300.0] * 2


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("afmoe", {"route_norm": False}, "route_norm"),
        ("afmoe", {"score_func": "softmax"}, "score_func"),
        ("granite_swa", {"layer_rope_theta": [0, 500.0]}, "layer_rope_theta"),
        ("granite_swa", {"layer_rope_theta": [0, 500.0, "x"]}, "layer_rope_theta"),
        ("granite_swa", {"layer_rope_theta": [0, 500.0, -1]}, "layer_rope_theta"),
        ("mellum", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ("mellum", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ("iquest_coder", {"use_sliding_window": True}, "use_sliding_window"),
        ("falcon", {"alibi": True}, "alibi"),
        ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("gptj", {"rotary_dim": None}, "rotary_dim"),
        ("codegen", {"n_head": 2}, "equal parts"),
        ("gpt_neo", {"attention_types": None}, "each of 2 layers"),
        ("gpt_neo", {"attention_types": [[["global", "sparse"], 1]]}, "sparse"),
        ("gpt_neo", {"attention_types": 3}, "each of 2 layers"),
        ("gpt_neo", {"attention_layers": ["global"]}, "each of 2 layers"),
        ("deci", {"block_configs": None}, "block_configs"),
        ("deci", {"num_hidden_layers": 3}, "block_configs"),
        ("deci", {"block_configs": [{}] * 4}, "no attention of layer 0"),
        ("deci", of_deci(window_length=64), "window_length"),
        ("deci", of_deci(n_heads_in_group=3), "n_heads_in_group"),
        ("deci", of_deci(n_heads_in_group=None), "n_heads_in_group"),
        ("deci", of_deci(ffn_mult=None), "ffn_mult"),
        ("deci", {"position_embedding_type": "mistral_yarn"}, "position_embedding_type"),
    ],
    ids=str,
)
def test_what_is_refused(name: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        program(name, **changes)


def test_experts_for_images_are_left_out() -> None:
    name = "composite-ernie4_5_vl"
    known = program(name)
    assert "model.layers.*.mlp.experts.7.*" in known.left_out[1].patterns
    for counts, widths in ((4, [8, 6]), ([4, 4], [8])):
        assert [*program(name, moe_num_experts=counts, moe_intermediate_size=widths)] == [*known]
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    for changes, problem in (({"moe_num_experts": [4, 6]}, "num_experts"), (scaled, "scaled rope")):
        with pytest.raises(ConfigError, match=problem):
            program(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "heads"),
    [
        ("llama", {}, 2),
        ("deci", {}, 2),
        ("falcon", {"new_decoder_architecture": False}, 1),
        ("gpt_bigcode", {}, 1),
        ("mimo_v2", {}, 4),
        ("deepseek_v3", {}, 2),
    ],
)
def test_the_heads_of_keys_are_those_of_layers(name: str, changes: dict[str, Any], heads: int) -> None:
    assert read_model({**CONFIGS[name], **changes}).num_kv_heads == heads
