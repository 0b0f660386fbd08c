"""Products of one value, recorded one after the other, which few rows launch as one (kernels.joined)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.backends.cuda.accelerator import Constant, DeviceArray, Launch
from quire.backends.cuda.launch_list import product_grid
from quire.backends.cuda.segments import NOTHING
from quire.program.program import Value

if TYPE_CHECKING:
    from quire.backends.cuda.launch_list import Arrays, At, LaunchList
    from quire.backends.cuda.step_arrays import StepArrays

MOST = 3  # products of a launch


@dataclass(frozen=True, slots=True)
class Product:
    """A product: what it reads and how; `sizes` are what its kernel takes after the number of outputs."""

    x: Value
    kernel: str
    rows: Arrays
    sizes: tuple[int, ...]
    tile: Callable[[int, int], Mapping[str, Constant]]  # by rows and outputs
    constants: Mapping[str, Constant]
    out: At
    arrays: tuple[DeviceArray, ...]  # of the weight and the bias, or of the gate and what it gates
    outputs: int

    @property
    def shared(self) -> tuple[object, ...]:
        """The value and the kernel, its sizes and constants: equal for products of one launch."""
        return self.x.index, self.kernel, self.sizes, *self.tile(1, 1).items(), *self.constants.items()


@dataclass(slots=True)
class ProductGroup:
    """Products that are launched as one, and the number of launches after the last of them."""

    products: list[Product] = field(default_factory=list)
    end: int = 0


def add_product(product: Product, joined_rows: int, to: LaunchList) -> None:
    """Record a product; with those recorded just before, if they read the same.

    Steps of at most `joined_rows` rows launch them together: 0 for products that have no kernel for that.
    """
    before, group = to.joined, ProductGroup()
    if joined_rows and before is not None and before.end == len(to.launches) and len(before.products) < MOST:
        group = before if before.products[0].shared == product.shared else group
    group.products.append(product)
    is_first, count = len(group.products) == 1, product.x.count

    def launch(step: StepArrays) -> Launch:
        rows = step.counts[count]
        if len(group.products) > 1 and rows <= joined_rows:
            return _launch(group.products, step, rows) if is_first else NOTHING
        return _launch([product], step, rows)

    to.launches.append(launch)
    group.end, to.joined = len(to.launches), group if joined_rows else None


def _launch(products: Sequence[Product], step: StepArrays, rows: int) -> Launch:
    """Return the launch of one product, or of several."""
    first, several = products[0], len(products) > 1
    members = [*products, *([first] * (MOST - len(products)) if several else ())]
    outputs = [one.outputs for one in products] + [0] * (len(members) - len(products))
    tile = first.tile(rows, sum(outputs))
    row_tiles, width = -(-rows // int(tile["BLOCK_M"])), int(tile["BLOCK_N"])
    grid = product_grid(row_tiles, width * sum(-(-number // width) for number in outputs), tile)
    weights = (array for one in members for array in one.arrays)
    args = (*(one.out(step) for one in members), *first.rows(step), *weights, rows, *outputs, *first.sizes)
    return Launch(
        f"joined_{first.kernel}" if several else first.kernel, grid, args, {**first.constants, **tile}
    )
