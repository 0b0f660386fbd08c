"""Adapters on every instruction set: near the reference, and the same bits in any batch."""

from __future__ import annotations

from pathlib import Path

import adapter_files as files
import numpy as np
import pytest
from lowered import BF16_ISAS, ISAS
from test_adapters import ADAPTERS, PROMPTS, load, run, scores


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    at = tmp_path_factory.mktemp("adapters")
    return files.write_model(at / "model"), files.write_three(at / "three")


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> dict[str, np.ndarray]:
    with load(*folders) as llm:
        return {name: scores(llm, name) for name in "abc"}


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets(
    folders: tuple[Path, Path],
    expected: dict[str, np.ndarray],
    isa: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_ISA", isa)
    with load(*folders, "native") as llm:
        for name, wanted in expected.items():
            rounded = name == "b" and isa in BF16_ISAS  # stored as bf16: so are its activations, rounded
            assert np.abs(scores(llm, name) - wanted).mean() < (0.03 if rounded else 1e-5)
        together = run(llm, PROMPTS, ADAPTERS)
    with load(*folders, "native", enable_prefix_caching=False) as llm:
        pairs = zip(PROMPTS, ADAPTERS, strict=True)
        assert [run(llm, [prompt], adapter)[0] for prompt, adapter in pairs] == together
