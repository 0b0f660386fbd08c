"""What is special in Apertus, Ernie 4.5, EXAONE 4, Gemma 1, Hunyuan, OLMo 3, Phi-3.5-MoE, Qwen2-MoE and
StableLM.
"""

from __future__ import annotations

from typing import Any

import pytest
from tiny import CONFIGS

from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Program
from quire.program.ops import Attention, Experts, Rotary


def program(name: str, **changes: Any) -> Program:
    return read_model({**CONFIGS[name], **changes}).program


def ropes(name: str, **changes: Any) -> list[tuple[str, float]]:
    return [(op.rope.rope_type, op.rope.theta) for op in program(name, **changes) if isinstance(op, Rotary)]


def windows(name: str, **changes: Any) -> list[int | None]:
    return [op.window for op in program(name, **changes) if isinstance(op, Attention)]


def test_window_layers() -> None:
    used = {"use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 5}
    assert windows("qwen2_moe", **used, max_window_layers=4) == [9, None, 9, None, None]
    assert windows("olmo3", layer_types=None, num_hidden_layers=5) == [20, 20, 20, None, 20]
    assert windows("exaone4") == [20, None]
    assert windows("exaone4", sliding_window=None, sliding_window_pattern=None) == [None, None]
    assert windows("starcoder2") == [20, 20]


def test_layers_without_positions_and_scaled_ropes() -> None:
    assert len(ropes("exaone4")) == 2  # the queries and keys of one layer of two
    assert len(ropes("exaone4", sliding_window=None)) == 4
    assert [kind for kind, _ in ropes("olmo3")] == ["default", "default", "yarn", "yarn"]
    assert ropes("apertus")[0] == ("llama3", 12_000_000.0)
    assert ropes("apertus", rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_theta=9e3)[0][1] == 9e3


def test_a_stretched_base_of_hunyuan() -> None:
    (kind, theta), *_ = ropes("hunyuan", rope_theta=1000.0)
    assert (kind, theta) == ("default", pytest.approx(1000.0 * 20.0 ** (4 / 2)))
    assert ropes("hunyuan", rope_scaling={"type": "dynamic", "factor": 2.0})[0][0] == "dynamic"
    with pytest.raises(ConfigError, match="alpha"):
        program("hunyuan", rope_scaling={"type": "dynamic", "alpha": "much"})


def test_gelu_in_a_gemma_is_its_approximation() -> None:
    """Released configs have the wrong name."""
    assert program("gemma", hidden_act="gelu") == program("gemma", hidden_act="gelu_pytorch_tanh")
    assert program("gemma", hidden_act="gelu") != program("gemma", hidden_act="relu")


def test_experts_of_a_token_by_layer() -> None:
    chosen = [op.routing.chosen for op in program("hunyuan_moe") if isinstance(op, Experts)]
    assert chosen == [1, 2]
    with pytest.raises(ConfigError, match="moe_topk"):
        program("hunyuan_moe", moe_topk=[1])
    layers = {"moe_layer_start_index": 0, "moe_layer_interval": 2, "num_hidden_layers": 6}
    assert sum(isinstance(op, Experts) for op in program("ernie4_5_moe", **layers)) == 3
    assert (
        sum(isinstance(op, Experts) for op in program("ernie4_5_moe", **layers, moe_layer_end_index=3)) == 2
    )


def test_the_published_name_of_phi_moe_has_frequencies_of_long_contexts() -> None:
    published = program("phimoe", architectures=["PhiMoEForCausalLM"])
    of_published, of_class = (
        next(op.rope for op in of if isinstance(op, Rotary)) for of in (published, program("phimoe"))
    )
    assert of_published.long_factor == (1.5, 4.0)
    assert of_class.long_factor == of_class.short_factor == of_published.short_factor


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("phimoe", {"tie_word_embeddings": True}, "lm_head_bias"),
        ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        ("phimoe", {"rope_scaling": {**CONFIGS["phimoe"]["rope_scaling"], "long_mscale": 1.3}}, "mscale"),
        ("phimoe", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "longrope"),
        ("ernie4_5", {"use_bias": True}, "use_bias"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        program(name, **changes)
