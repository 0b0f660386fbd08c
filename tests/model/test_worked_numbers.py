"""The worked numbers: each recomputed value against the figure that was worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.roofline.worked_numbers import LLAMA_8B, LLAMA_70B, VOCABULARY, ModelShape, worked_numbers

# Row: the figures worked out by hand, each as precisely as it was written down.
BY_HAND: dict[int, tuple[str, ...]] = {
    1: ("819", "83", "1.6", "48"),
    2: ("75", "45"),
    3: ("131072", "327680", "4"),
    4: ("122070",),
    5: ("16", "1"),
    6: ("2.0", "2.0", "1.0"),
    7: ("70", "140"),
    8: ("156", "1560", "3120"),
    9: ("47", "72"),
    10: ("2.0", "4.0", "1.88", "3.56"),
    11: ("1.88", "2.18", "2.53", "2.95"),
    12: ("51.3", "0.051", "8.0"),
    13: ("1.675",),
    14: ("16", "1.6"),
    15: ("8", "125"),
    16: ("2.0", "0.64", "156"),
    17: ("51.3",),
    18: ("800", "851.3", "843.3"),
    19: ("6.0", "94.0"),
    20: ("10", "15.6"),
    21: ("156",),
    22: ("1", "1000"),
    23: ("10", "100"),
    24: ("33.6", "33.6", "33.6"),
    25: ("499",),
    26: ("2.6",),
    27: ("32", "4096", "80", "8192", "128256"),
    28: ("140", "41.8"),
    29: ("989", "149", "295"),
    30: ("0.28", "0.14"),
    31: ("149", "295"),
    32: ("0.67", "0.34"),
    33: ("32", "149", "295"),
    34: ("16", "128"),
    35: ("4.8", "0.26"),
    36: ("4.8", "60"),
    37: ("237",),
    38: ("5",),
    39: ("8",),
    40: ("4.8", "47.8"),
}
ROWS = worked_numbers()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.number))
def test_a_worked_number(row) -> None:  # type: ignore[no-untyped-def]
    expected = BY_HAND[row.number]
    assert len(row.values) == len(expected)
    for value, text in zip(row.values, expected, strict=True):
        digits = len(text.partition(".")[2])
        assert f"{value:.{digits}f}" == text or abs(value - float(text)) <= 0.5 * 10**-digits
    assert row.published
    assert row.why
    assert "{" not in row.recomputed


def test_there_are_forty() -> None:
    assert [row.number for row in ROWS] == list(range(1, 41)) == sorted(BY_HAND)


@pytest.mark.parametrize(
    ("folder", "shape"),
    [("meta-llama--Meta-Llama-3.1-8B", LLAMA_8B), ("meta-llama--Meta-Llama-3.1-70B", LLAMA_70B)],
)
def test_shapes_are_those_of_the_configs(shared_data: Path, folder: str, shape: ModelShape) -> None:
    config = json.loads((shared_data / "configs" / folder / "config.json").read_text())
    assert config["num_hidden_layers"] == shape.layers
    assert config["num_attention_heads"] == shape.heads
    assert config["num_key_value_heads"] == shape.kv_heads
    assert config["hidden_size"] == shape.width
    assert config["vocab_size"] == VOCABULARY
