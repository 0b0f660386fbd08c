"""Values that are not float32: stored rounded, counted by their bytes, refused where no kernel has them."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from tiny import Paged, random_weights, same_bits

from quire.backends.native.lower import Lowering
from quire.errors import ConfigError
from quire.program import Builder, Load, Names, Op, Program, Value
from quire.program.passes import plan_buffers
from quire.program.program import DType, Run

W = Names("w")
LOAD = Load(((0, 10),), 4)


@dataclass(frozen=True, slots=True)
class Greatest(Op):
    """out[t] = the indices of the greatest numbers of x[t], the greatest first."""

    x: Value

    def flops(self, load: Load) -> float:
        return load.size(self.out.count) * self.x.width

    def reference(self, run: Run, *inputs: np.ndarray) -> np.ndarray:
        return np.argsort(-inputs[0], axis=-1, kind="stable")[:, : self.out.width]


@dataclass(frozen=True, slots=True)
class Pick(Op):
    """out[t] = x[t, indices[t]]."""

    x: Value
    indices: Value

    def flops(self, load: Load) -> float:
        return 0

    def reference(self, run: Run, *inputs: np.ndarray) -> np.ndarray:
        assert (inputs[0].dtype, inputs[1].dtype) == (np.float32, np.int32)
        return np.take_along_axis(*inputs, axis=-1)


@dataclass(frozen=True, slots=True)
class Copy(Op):
    """out = x, rounded to the dtype of out."""

    x: Value

    def flops(self, load: Load) -> float:
        return 0

    def reference(self, run: Run, *inputs: np.ndarray) -> np.ndarray:
        return inputs[0]


def rounded(dtype: DType) -> Program:
    """The greatest three numbers of each token's vector, its vector rounded first."""
    b = Builder()
    x = b.embed(W / "e", 7, 6)
    x = b.record(Copy(b.value((6,), dtype=dtype), x)).out
    indices = b.record(Greatest(b.value((3,), dtype="int32"), x)).out
    return b.program(b.sampled_rows(b.record(Pick(b.value((3,)), x, indices)).out))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values_are_stored_rounded_and_read_as_float32(dtype: DType) -> None:
    program = rounded(dtype)
    weights = random_weights(program)
    paged = Paged(program, weights)
    tokens = [3, 1, 6, 0]
    found = paged.prefill(paged.sequence(tokens), [3])
    kept = weights["w.e.weight"].array[tokens].astype(getattr(ml_dtypes, dtype, dtype)).astype(np.float32)
    assert same_bits(found, np.ascontiguousarray(np.sort(kept, axis=-1)[:, :-4:-1]))


def test_buffers_and_costs_count_bytes() -> None:
    """Rows of twelve bytes share a buffer whatever they hold; six numbers of two bytes are as large."""
    program = rounded("bfloat16")
    assert [v.row_bytes for op in program for v in op.outputs()] == [24, 12, 12, 12, 12]
    plan = plan_buffers(program)
    assert plan.sizes == (("T", 24), ("T", 12), ("T", 12), ("T", 12), ("L", 12))
    assert plan.nbytes(LOAD) == 10 * 60 + 4 * 12
    touched = [op.cost(LOAD, lambda spec: 0).activation_bytes for op in program]
    assert touched == [10 * 24, 10 * 36, 10 * 24, 10 * 36, 4 * 24]


def test_a_buffer_is_taken_again_by_rows_of_the_same_bytes() -> None:
    """Indices take the place of numbers that nobody reads anymore."""
    b = Builder()
    x = b.embed(W / "e", 7, 6)
    half = b.record(Copy(b.value((6,), dtype="float16"), x)).out
    y = b.record(Copy(b.value((6,)), half)).out
    indices = b.record(Greatest(b.value((3,), dtype="int32"), y)).out
    plan = plan_buffers(b.program(b.record(Pick(b.value((3,)), y, indices)).out))
    assert plan.buffer[half.index] == plan.buffer[indices.index]
    assert plan.buffer[x.index] == plan.buffer[y.index]


def test_the_native_backend_refuses_them() -> None:
    with pytest.raises(ConfigError, match="computes in float32, and this program has values of bfloat16"):
        Lowering(None, rounded("bfloat16"), {}, {}, ())  # type: ignore[arg-type]
