"""Gemma 4: what its layers read, the ops that it alone has, and what is refused of its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import CONFIGS, Paged, random_weights, same_bits, tiny

from quire.config import EngineConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Builder, Load, Names, PagedKV, Program
from quire.program.ops import (
    Attention,
    Embed,
    GatedActivation,
    RMSNorm,
    Rotary,
    ScaleByWeight,
    SharedAttention,
)
from quire.program.rope import rope_from_config

W = Names("w")


def changed(**changes: Any) -> dict[str, Any]:
    return {**CONFIGS["gemma4"], **changes}


def of_kind(program: Program, kind: Any) -> list[Any]:
    return [op for op in program if isinstance(op, kind)]


def test_last_layers_read_the_caches_of_the_last_before_them_of_their_type() -> None:
    program = tiny("gemma4").program
    sliding, full = PagedKV(2, 4, 4, 24), PagedKV(1, 8, 8)
    assert program.caches == (sliding, full)
    assert program.cache_groups == (sliding, full)
    assert [(op.layer, op.spec, op.scale) for op in of_kind(program, SharedAttention)] == [
        (0, sliding, 1.0),
        (1, full, 1.0),
    ]
    six = read_model(
        changed(num_hidden_layers=6, num_kv_shared_layers=1, layer_types=["sliding_attention"] * 2 + FULL * 4)
    )
    assert [op.layer for op in of_kind(six.program, SharedAttention)] == [4]


FULL = ["full_attention"]


def test_the_last_layer_is_of_full_attention() -> None:
    raw = changed(layer_types=["full_attention", "sliding_attention"] * 2, num_kv_shared_layers=0)
    windows = [op.window for op in of_kind(read_model(raw).program, Attention)]
    assert windows == [None, 24, None, None]


def test_a_shared_layer_reads_its_cache_and_writes_none() -> None:
    program, load = tiny("gemma4").program, Load(rows=((30, 1), (0, 5)), num_logits=2)
    own, shared = (of_kind(program, kind)[0] for kind in (Attention, SharedAttention))
    read, written = own.kv_bytes(load)
    assert shared.kv_bytes(load) == (read, 0)
    assert written == load.num_tokens * 2 * 2 * 4 * 4
    assert shared.flops(load) == own.flops(load)


def test_the_table_of_all_layers_is_read_by_row() -> None:
    program = tiny("gemma4").program
    table = of_kind(program, Embed)[1]
    load = Load(rows=((0, 3),), num_logits=1)
    assert table.table.shape == (29, 4 * 6)
    assert table.weight_bytes(load, lambda spec: spec.size * 2) == 3 * 24 * 2
    assert not table.table.quantizable


def test_ids_beyond_a_table_have_its_first_row() -> None:
    program = tiny("gemma4").program
    weights = random_weights(program)
    name = of_kind(program, Embed)[1].table.name
    paged = Paged(program, weights)

    def logits(token: int) -> np.ndarray:
        return paged.prefill(paged.sequence([token]))

    before = logits(30)
    weights[name].array[28] += 1
    paged = Paged(program, weights)
    assert same_bits(logits(30), before)
    weights[name].array[0] += 1
    paged = Paged(program, weights)
    assert not same_bits(logits(30), before)


def test_only_the_first_pairs_of_a_head_rotate() -> None:
    stated = {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0}
    frequencies = rope_from_config(stated, dim=16, theta=100.0, max_position=64).frequencies()
    expected = [100.0 ** (-i / 8) / 2 for i in range(2)] + [0.0] * 6
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    ropes = [op.rope for op in of_kind(tiny("gemma4").program, Rotary)]
    assert {(rope.dim, rope.theta, rope.rotated_pairs) for rope in ropes} == {(4, 1e4, 0), (8, 1e6, 1)}


def test_heads_by_layer() -> None:
    """As transformers writes them now, in place of global_head_dim."""
    own = {"head_dim": 6, "num_key_value_heads": 4}
    plain = changed(num_kv_shared_layers=0, attention_k_eq_v=False)
    program = read_model({**plain, "per_layer_config": {"01": own, "3": own}}).program
    assert program.caches == (PagedKV(2, 4, 4, 24), PagedKV(4, 6, 6)) * 2
    assert read_model({**plain, "per_layer_config": {}}).program.caches[1] == PagedKV(2, 4, 4)


def test_values_without_a_matrix() -> None:
    """Values are the keys before their norm, and have a norm without a weight; biases are where stated."""
    program = read_model(changed(num_kv_shared_layers=0, attention_bias=True)).program
    names = program.weights()
    assert (
        "model.layers.1.self_attn.v_proj.weight" in names,
        "model.layers.0.self_attn.v_proj.bias" in names,
    ) == (
        False,
        True,
    )
    attention = of_kind(program, Attention)[1]
    norms = {op.out: op for op in of_kind(program, RMSNorm)}
    rotaries = {op.out: op for op in of_kind(program, Rotary)}
    assert norms[attention.v].weight is None
    assert norms[attention.v].x == norms[rotaries[attention.k].x].x


def test_without_what_small_models_have() -> None:
    raw = changed(hidden_size_per_layer_input=0, enable_moe_block=False, num_kv_shared_layers=0)
    program = read_model(raw).program
    assert not of_kind(program, GatedActivation) or len(of_kind(program, Embed)) == 1
    assert len(of_kind(program, ScaleByWeight)) == 4  # one number for each layer


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_kv_shared_layers": 3}, "leaves no layer of full_attention"),
        ({"num_kv_shared_layers": 4}, "is not a number from 0 to 3"),
        ({"num_kv_shared_layers": 1.5}, "is not a whole number"),
        ({"use_bidirectional_attention": "all"}, "'all' is not supported"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"global_head_dim": None}, "head_dim is missing"),
        ({"top_k_experts": 9}, "cannot choose 9 of 4 experts"),
        ({"rope_parameters": {"rope_theta": 3e4}}, "not an object of layer types"),
        ({"rope_parameters": {"full_attention": 3}}, "not an object of layer types"),
        ({"per_layer_config": {"1": {"intermediate_size": 4}}}, "'intermediate_size' of per_layer_config"),
        ({"per_layer_config": [4]}, "is not an object of layers"),
        ({"per_layer_config": {"3": {"head_dim": 6}}}, "cannot use the cache"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_model(changed(**changes))


def test_a_composite_with_keys_of_shared_layers(tmp_path: Path) -> None:
    """As released: names, towers that are left out, and matrices that no layer reads."""
    text = {key: value for key, value in CONFIGS["gemma4"].items() if key != "architectures"}
    raw = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {**text, "use_bidirectional_attention": "vision"},
        "vision_config": {},
        "audio_config": {},
    }
    arrays = {
        name.replace("model.", "model.language_model.", 1): weight.array
        for name, weight in random_weights(read_model(raw).program).items()
    }
    fused = [arrays.pop(name) for name in list(arrays) if ".experts.gate" in name or ".experts.up" in name]
    for layer in range(4):
        both = np.concatenate(fused[2 * layer : 2 * layer + 2], axis=1)
        arrays[f"model.language_model.layers.{layer}.experts.gate_up_proj"] = both
    arrays["model.language_model.layers.3.self_attn.k_proj.weight"] = np.zeros((8, 16), np.float32)
    arrays["model.language_model.layers.3.self_attn.k_norm.weight"] = np.zeros(8, np.float32)
    towers = ("model.vision_tower.a.weight", "model.embed_vision.b.weight", "model.audio_tower.c.weight")
    arrays |= {name: np.zeros((4, 3), np.float32) for name in towers}
    save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = describe(EngineConfig(model=str(tmp_path), device="reference"))
    assert found.model.program.ops == tiny("gemma4").program.ops
    assert "the vision tower (24 parameters)" in " ".join(found.weights.notes)


def test_builder_refuses_what_does_not_fit() -> None:
    b = Builder()
    heads = b.linear(b.embed(W / "e", 3, 2), W / "q", (4, 6))
    keys = b.slice(heads, 0, (2, 6))
    b.attention(heads, keys, keys)
    for record in (
        lambda: b.scale_by_weight(heads, W / "scale", 4),
        lambda: b.shared_attention(b.slice(heads, 0, (3, 6)), 0, scale=1.0),
        lambda: b.shared_attention(b.slice(heads, 0, (6, 4)), 0, scale=1.0),
    ):
        with pytest.raises(ConfigError):
            record()
