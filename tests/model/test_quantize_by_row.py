"""Products of W8A8 weights, whose activations have one scale for a row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire.quantize.coded import Coded
from quire.quantize.scales import Scales


def make(outputs: int, width: int, table: str = "signed") -> Coded:
    rng = np.random.default_rng([outputs, width])
    packed = rng.integers(0, 256, (outputs, width)).astype(np.uint8)
    scales = Scales((rng.random((outputs, 1)) / 50).astype(np.float32))
    return Coded("w8a8", packed, 8, width, table, None, scales, by_row=True)


@pytest.mark.parametrize("table", ["signed", "offset"])
@pytest.mark.parametrize("width", [1, 31, 128, 300])
def test_a_product_is_one_integer_per_output(width: int, table: str) -> None:
    weight = make(5, width, table)
    x = np.random.default_rng(width).standard_normal((3, width)).astype(np.float32)
    expected = np.empty((3, 5), np.float32)
    for t, row in enumerate(x):
        top = np.abs(row).max()
        q = np.rint(row * (np.float32(127) / top)).astype(np.int64)
        for o, codes in enumerate(weight.packed.astype(np.int64)):
            numbers = codes - 128 if table == "offset" else codes - 256 * (codes > 127)
            dot = np.float32(int((numbers * q).sum()))
            expected[t, o] = dot * (top / np.float32(127)) * weight.scales.values[o, 0]
    np.testing.assert_array_equal(weight.product(x), expected)


def test_a_product_is_close_to_that_of_floats() -> None:
    weight, x = make(16, 512), np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    exact = x @ weight.dense().T
    assert np.abs(weight.product(x) - exact).max() < 0.02 * np.abs(exact).max()


def test_rows_that_are_zero_or_not_finite() -> None:
    weight, x = make(3, 40), np.zeros((3, 40), np.float32)
    x[1, 7], x[2, 9] = np.inf, np.nan
    with np.errstate(all="ignore"):
        found = weight.product(x)
    assert not found[0].any()
    assert np.isnan(found[1:]).all()


def test_only_integers_with_one_scale_for_an_output() -> None:
    weight = make(3, 64)
    wide = Scales(np.ones((3, 2), np.float32))
    for change in ({"table": "unsigned"}, {"group": 32, "scales": wide}, {"minimums": weight.scales}):
        with pytest.raises(ValueError, match="W8A8"):
            replace(weight, **change)  # type: ignore[arg-type]
