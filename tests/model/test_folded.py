"""Folded costs against the costs of programs, for random loads of every family and published config."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import fields
from pathlib import Path

import pytest
from tiny import CONFIGS, tiny

from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Builder, Cost, Load, Names, Program, WeightSpec
from quire.program.features import values
from quire.program.ops import Attention, Linear
from quire.program.ops.experts import ExpertWeights, Routing
from quire.program.passes import fuse
from quire.roofline.folded import fold


def nbytes(spec: WeightSpec) -> int:
    return 2 * spec.size + 3


def random_rows(rng: random.Random) -> tuple[tuple[int, int], ...]:
    """Rows that decode, prompts and chunks, with contexts below, at and above every window and chunk."""
    starts = (0, 1, 19, 20, 23, 24, 63, 64, 127, 128, 4095, 4096, 20_000)
    return tuple(
        (rng.choice((*starts, rng.randrange(9000))), rng.choice((1, 1, 1, 2, 64, 65, rng.randrange(1, 600))))
        for _ in range(rng.randrange(1, 40))
    )


def assert_equal(found: Cost, expected: Cost) -> None:
    for one in fields(Cost):
        assert getattr(found, one.name) == pytest.approx(getattr(expected, one.name), rel=1e-9), one.name


def check(program: Program, seed: str, num_loads: int = 4) -> None:
    rng = random.Random(seed)
    for version in (program, fuse(program)):
        for kv_itemsize, kv_scale_bytes in ((2, 0), (1, 4)):
            folded = fold(version, nbytes, kv_itemsize=kv_itemsize, kv_scale_bytes=kv_scale_bytes)
            for _ in range(num_loads):
                rows, num_logits = random_rows(rng), rng.randrange(50)
                expected = sum(
                    (op.cost(Load(rows, num_logits, kv_itemsize, kv_scale_bytes), nbytes) for op in version),
                    Cost(),
                )
                assert_equal(folded.cost(rows, num_logits), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_folded_costs_are_those_of_the_program(name: str) -> None:
    check(tiny(name).program, name)


def test_folded_costs_of_published_configs(shared_data: Path) -> None:
    """One of each architecture."""
    configs = [
        json.loads(path.read_text()) for path in sorted((shared_data / "configs").glob("*/config.json"))
    ]
    checked = 0
    for name, config in {config["architectures"][0]: config for config in configs}.items():
        with contextlib.suppress(ConfigError):
            check(read_model(config).program, name, num_loads=1)
            checked += 1
    assert checked >= 12


def stateful() -> Program:
    """A convolution, a recurrence and attention, then experts of the rows that need logits."""
    b, hidden = Builder(), 8

    def spec(name: str, *shape: int) -> WeightSpec:
        return WeightSpec(name, (6, *shape), (name,))

    x = b.embed(Names("e"), 32, hidden)
    x = b.short_convolution(x, Names("conv"), 4)
    decay = b.linear(x, Names("decay"), hidden)
    x = b.add(x, b.gated_recurrence(x, decay))
    x = b.sampled_rows(x)
    weights = ExpertWeights(spec("gate", 5, hidden), spec("up", 5, hidden), spec("down", hidden, 5))
    scores = b.linear(x, Names("router"), 6)
    return b.program(b.experts(x, scores, weights, routing=Routing(2)))


def test_folded_costs_of_states_and_of_experts_over_logits() -> None:
    program = stateful()
    check(program, "stateful")
    kinds = {feature.kind for feature in fold(program, nbytes).features}
    assert {"logit_experts", "earlier", "latest", "since_boundary", "past_boundary", "boundaries"} <= kinds


def test_parts_add_up_and_keep_their_arithmetic() -> None:
    program = fuse(tiny("mixtral").program)

    def arithmetic(op: object) -> str:
        return "bf16" if isinstance(op, Attention) else "int8" if isinstance(op, Linear) else "f32"

    folded, rows = fold(program, nbytes, arithmetic=arithmetic), ((70, 1), (3, 40))
    found = values(folded.features, rows, 2)
    assert_equal(sum((part.cost(found) for part in folded.parts), Cost()), folded.cost(rows, 2))
    attention = [op for op in program if isinstance(op, Attention)]
    load = Load(rows, 2)
    assert folded.flops(found)["bf16"] == sum(op.flops(load) for op in attention)
    assert {(p.name, p.arithmetic) for p in folded.parts} == {
        ("rest", "f32"),
        ("products", "int8"),
        ("products", "f32"),  # experts
        ("attention", "bf16"),
        ("head", "int8"),
    }
    head = next(part for part in folded.parts if part.name == "head")
    assert head.cost(found).flops == 2 * 2 * program.ops[-1].weights()[0].size


def test_a_cost_that_is_no_sum_of_features_is_refused() -> None:
    class Odd(Linear):
        def flops(self, load: Load) -> float:
            return load.num_tokens**2

    b = Builder()
    x = b.embed(Names("e"), 32, 8)
    program = b.program(b.sampled_rows(b.record(Odd(b.value((4,)), x, WeightSpec("w", (4, 8), ("w",)))).out))
    with pytest.raises(TypeError, match="unsupported operand"):
        fold(program, nbytes)


def test_a_cost_that_looks_at_rows_is_refused() -> None:
    class Looping(Linear):
        def flops(self, load: Load) -> float:
            return sum(count for _, count in load.rows)

    b = Builder()
    x = b.embed(Names("e"), 32, 8)
    weight = WeightSpec("w", (4, 8), ("w",))
    program = b.program(b.sampled_rows(b.record(Looping(b.value((4,)), x, weight)).out))
    with pytest.raises(TypeError, match="not iterable"):
        fold(program, nbytes)
