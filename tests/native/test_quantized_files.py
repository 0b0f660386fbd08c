"""Quantized checkpoints on the native backend: as near to the golden logits as the reference is."""

from __future__ import annotations

from pathlib import Path

import pytest
from lowered import ISAS, native
from quantized_files import FOLDERS, error_of, golden_of
from tiny import Paged

from quire.backends.native import _core
from quire.backends.native.weights import load_packed
from quire.config import EngineConfig
from quire.description import describe
from quire.weights.load import load


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_as_near_as_those_of_the_reference(name: str, shared_data: Path) -> None:
    """The native backend rounds activations as the reference does, or less: to bf16, or not at all."""
    folder = shared_data / "quantized" / name
    golden = golden_of(folder)
    facts = describe(EngineConfig.from_keywords(model=str(folder), device="reference"))
    allowed = 1.2 * error_of(facts.model, Paged(facts.program, load(facts.weights), num_blocks=300), golden)
    facts = describe(EngineConfig.from_keywords(model=str(folder), device="native"))
    packed = load_packed(facts.weights, isa=ISAS[0], nodes=_core.Nodes(1))
    paged = Paged(facts.program, packed, num_blocks=300, make=native(ISAS[0]))
    assert error_of(facts.model, paged, golden) <= allowed + 2e-2
