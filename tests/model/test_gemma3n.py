"""Gemma 3n: the ops that it alone has, what its layers read, and what is refused of its config.json."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from test_ops import draw, last, run, source
from tiny import CONFIGS, VOCAB, Paged, batch_of, random_weights, same_bits, tiny

from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Builder, Load, PagedKV, Program
from quire.program.ops import AboveCutoff, Attention, Linear, MatchMagnitude, ScaleByWeight, SharedAttention


def changed(**changes: Any) -> dict[str, Any]:
    return {**CONFIGS["gemma3n"], **changes}


def of_kind(program: Program, kind: Any) -> list[Any]:
    return [op for op in program if isinstance(op, kind)]


def test_a_row_as_large_as_another() -> None:
    b = Builder()
    op = last(b, b.match_magnitude(source(b, 6), source(b, 6), 1e-5))
    x, like = draw(5, 6), draw(5, 6) * 9
    x[3] = 1e-6
    found = run(op, x, like)
    np.testing.assert_allclose((found[:3] ** 2).mean(axis=1), (like[:3] ** 2).mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(found[3], 1e-6 * np.sqrt((like[3] ** 2).mean() / 1e-5), rtol=1e-5)


def test_a_known_share_of_normal_numbers_stays() -> None:
    b = Builder()
    op = last(b, b.above_cutoff(source(b, 20_000), NormalDist().inv_cdf(0.95)))
    x = np.random.default_rng(0).normal(3, 2, (2, 20_000)).astype(np.float32)
    found = run(op, x)
    assert 0.045 < np.mean(found > 0) < 0.055
    cutoff = x.mean(axis=1) + 1.6448536 * x.std(axis=1)
    np.testing.assert_allclose(found, np.maximum(x - cutoff[:, None], 0), atol=1e-5)


def test_what_layers_read_and_write() -> None:
    program = tiny("gemma3n").program
    assert program.caches == (PagedKV(2, 4, 4, 24), PagedKV(2, 4, 4))
    assert [op.layer for op in of_kind(program, SharedAttention)] == [0]
    assert [op.scale for op in of_kind(program, Attention)] == [1.0, 1.0]
    widths = [op.weight.shape[0] for op in of_kind(program, Linear) if "mlp.up_proj" in op.weight.name]
    assert widths == [24, 20, 24]
    assert [round(op.deviations, 4) for op in of_kind(program, AboveCutoff)] == [0.2533, -0.5244]
    assert len(of_kind(program, MatchMagnitude)) == 4


def test_options() -> None:
    plain = read_model(changed(altup_correct_scale=False, altup_num_inputs=1, altup_active_idx=0)).program
    assert not of_kind(plain, ScaleByWeight)
    assert not of_kind(plain, MatchMagnitude)
    assert "model.layers.*.altup.correct_output_scale" in plain.ignored
    unstated = {
        key: value for key, value in CONFIGS["gemma3n"].items() if key != "activation_sparsity_pattern"
    }
    assert not of_kind(read_model(unstated).program, AboveCutoff)
    deep = {**unstated, "num_hidden_layers": 12, "layer_types": None, "intermediate_size": 24}
    sparse = of_kind(read_model(deep).program, AboveCutoff)
    assert [round(op.deviations, 4) for op in sparse] == [1.6449] * 10
    assert [op.window for op in of_kind(read_model(deep).program, Attention)][3:6] == [24, None, 24]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"altup_active_idx": 3}, "altup_active_idx = 3"),
        ({"altup_num_inputs": 17}, "altup_num_inputs = 17"),
        ({"intermediate_size": [24]}, "intermediate_size has 1 values for 3 layers"),
        ({"intermediate_size": [24, 0, 24]}, "intermediate_size = 0"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern has 1 values"),
        ({"activation_sparsity_pattern": [0.5, 1.0, 0.0]}, "1.0 is not a share"),
        ({"activation_sparsity_pattern": 0.5}, "is not a list"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input = 0"),
        ({"num_kv_shared_layers": 2}, "leaves no layer of full_attention"),
        ({"sliding_window": None}, "sliding_window is missing"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_model(changed(**changes))


def test_layers_without_a_cache_compute_only_rows_that_need_logits() -> None:
    """They have the bits that they have among all rows; and a prompt costs less."""
    program = tiny("gemma3n").program
    assert [op.q.count for op in of_kind(program, SharedAttention)] == ["L"]
    paged = Paged(program, random_weights(program))
    prompts = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (30, 70, 3)]
    sequences = [(paged.sequence(ids), len(ids)) for ids in prompts]
    some = np.array([3, 28, 29, 90, 99, 100])
    whole, part = (
        paged.backend.execute(batch_of(sequences, paged.block_size, logits, paged.ids))
        for logits in (None, some)
    )
    assert same_bits(part, whole[some])

    def flops(logits: int) -> float:
        return program.cost(Load(rows=((0, 99),), num_logits=logits), lambda spec: spec.size).flops

    assert flops(1) < 0.75 * flops(99)
