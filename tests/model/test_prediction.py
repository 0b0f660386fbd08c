"""Prediction layers of checkpoints as drafters: they propose what the formula gives, and change no output."""

from __future__ import annotations

import predicted
import pytest
from predicted import FAMILIES, on_reference


@pytest.mark.parametrize("name", FAMILIES)
def test_what_it_proposes_is_what_the_formula_gives(name: str) -> None:
    predicted.check_formula(on_reference, name, 13)


def test_it_catches_up() -> None:
    predicted.check_formula(on_reference, "deepseek_v3", 999, max_tokens=9)


def test_drawn_tokens_are_those_without_it() -> None:
    predicted.check_drawn(on_reference, "qwen3_next", "penalized")


@pytest.mark.parametrize("known", [True, False])
def test_cached_blocks(known: bool) -> None:
    predicted.check_prefix(on_reference, known)


def test_replaced_blocks() -> None:
    predicted.check_replaced(on_reference)


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
def test_a_layer_that_is_right_is_accepted(name: str) -> None:
    predicted.check_accepted(on_reference, name)
