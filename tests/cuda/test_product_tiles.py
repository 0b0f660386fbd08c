"""The tiles of products of many rows: when they are chosen, and their bits."""

from __future__ import annotations

import numpy as np
import pytest

from quire.backends.cuda.accelerator import Constant, DeviceArray, Launch
from quire.backends.cuda.interpreted import InterpretedAccelerator, view_of
from quire.backends.cuda.kernels.product_variants import gated_tile, product_tile, quantized_tile
from quire.backends.cuda.launch_list import product_grid
from quire.quantize.kinds import DTYPES

ROWS, OUTPUTS, INPUTS = 150, 300, 80


@pytest.mark.parametrize(
    ("rows", "outputs", "wanted"),
    [
        *((16, 1 << 17, 32), (64, 4096, 64), (65, 4096, 128), (64, 8192, 128), (512, 4096, 128)),
        *((1024, 4096, 256), (2048, 4096, 256), (17, 28672, 256)),
    ],
)
def test_tiles_are_as_large_as_there_are_enough_of_them(rows: int, outputs: int, wanted: int) -> None:
    assert product_tile(rows, outputs, "bf16")["BLOCK_N"] == wanted
    assert product_tile(rows, outputs, "fp32")["BLOCK_N"] == 32
    assert quantized_tile(rows, outputs)["BLOCK_N"] == min(wanted, 128)
    if rows > 16:
        assert gated_tile(rows, outputs // 2, "bf16")["BLOCK_N"] == max(wanted // 2, 64)


@pytest.mark.parametrize("gated", [False, True])
def test_bits_are_those_of_all_tiles(gated: bool) -> None:
    accelerator, rng = InterpretedAccelerator(), np.random.default_rng(0)

    def random(*shape: int) -> DeviceArray:
        array = accelerator.allocate(2 * shape[0] * shape[1]).part(0, shape, DTYPES["bf16"])
        accelerator.write(array, rng.standard_normal(shape).astype(DTYPES["bf16"]))
        return array

    x, gate, up = random(ROWS, INPUTS), random(OUTPUTS, INPUTS), random(OUTPUTS, INPUTS)
    bias = accelerator.allocate(4 * OUTPUTS).part(0, (OUTPUTS,), np.dtype(np.float32))
    accelerator.write(bias, rng.standard_normal(OUTPUTS).astype(np.float32))
    name = "gated_product" if gated else "product"
    how: dict[str, Constant] = {"ACTIVATION": "silu"} if gated else {"BIAS": True}
    found = []
    for rows, outputs in ((64, OUTPUTS), (65, OUTPUTS), (65, 1 << 20)):  # by which the tile is chosen
        out = accelerator.allocate(4 * ROWS * OUTPUTS).part(0, (ROWS, OUTPUTS), np.dtype(np.float32))
        tile = (gated_tile if gated else product_tile)(rows, outputs, "bf16")
        grid = product_grid(-(-ROWS // int(tile["BLOCK_M"])), OUTPUTS, tile)
        args = (out, x, gate, up if gated else bias, ROWS, OUTPUTS, INPUTS)
        accelerator.launch(Launch(name, grid, args, {"PRECISION": "stored", **how, **tile}))
        found.append((tile["BLOCK_M"], tile["BLOCK_N"], view_of(out).tobytes()))
    tiles = [(64, 64), (128, 64), (128, 128)] if gated else [(64, 64), (128, 128), (128, 256)]
    assert [one[:2] for one in found] == tiles
    assert len({one[2] for one in found}) == 1
