"""Coded: codes of every width, scales of every form, and products, each against its definition."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.program import WeightSpec
from quire.program.numerics import fma, quantize_rows
from quire.quantize.coded import Coded, pack_codes, unpack_codes
from quire.quantize.integers import pack
from quire.quantize.kinds import FloatStorage
from quire.quantize.round_to_nearest import kind_of
from quire.quantize.scales import FORMATS, Scales
from quire.weights.load import canonical

SEEDS = st.integers(0, 2**32 - 1)
BITS = st.integers(2, 8)
TABLES = ("unsigned", "offset", "signed")
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
IQ4NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def scales_of(rng: np.random.Generator, rows: tuple[int, ...], groups: int, form: str) -> Scales:
    """Scales by chance; `form` is a number format, or "two" for codes under f16."""
    if form == "e8m0":
        return Scales(rng.integers(120, 132, (*rows, groups)).astype(np.uint8))
    if form == "two":
        together = int(rng.choice([0, 2, 8]))
        blocks = -(-groups // together) if together else min(groups, 1)
        codes = rng.integers(0, 64, (*rows, groups)).astype(np.uint8)
        return Scales(rng.random((*rows, blocks)).astype(np.float16), codes, together, 6)
    return Scales(rng.random((*rows, groups)).astype(FORMATS[form]))


def make(
    seed: int,
    rows: tuple[int, ...] = (5,),
    width: int = 160,
    bits: int = 4,
    table: str = "unsigned",
    group: int | None = 32,
    form: str = "f16",
    extra: str = "",
    ordered: bool = False,
) -> Coded:
    rng = np.random.default_rng(seed)
    groups = -(-width // (group or width))
    order = None
    if ordered:
        order = np.empty((*rows[:-1], width), np.int32)
        order[...] = rng.permutation(width)
    return Coded(
        "made",
        pack_codes(rng.integers(0, 1 << bits, (*rows, width)).astype(np.uint8), bits),
        bits,
        width,
        table,
        group,
        scales_of(rng, rows, groups, form),
        scales_of(rng, rows, groups, form) if extra == "minimums" else None,
        rng.integers(0, 1 << bits, (*rows, groups)).astype(np.uint8) if extra == "zeros" else None,
        order,
    )


@st.composite
def coded(draw: st.DrawFn, rows: tuple[tuple[int, ...], ...] = ((1,), (5,), (3, 4))) -> Coded:
    table = draw(st.sampled_from([*TABLES, "iq4nl", "fp4"]))
    return make(
        draw(SEEDS),
        draw(st.sampled_from(rows)),
        draw(st.integers(1, 200)),
        draw(BITS) if table in TABLES else 4,
        table,
        draw(st.sampled_from([16, 24, 32, 64, 128, None])),
        draw(st.sampled_from(["f16", "f32", "bf16", "e4m3", "e8m0", "two"])),
        draw(st.sampled_from(["", "minimums", "zeros"] if table == "unsigned" else ["", "minimums"])),
        draw(st.booleans()),
    )


def number(code: int, weight: Coded) -> float:
    half = 1 << (weight.bits - 1)
    if isinstance(weight.table, tuple):
        return weight.table[code]
    signed = code - 2 * half if code >= half else code
    named = {"unsigned": code, "offset": code - half, "signed": signed}
    return named[weight.table] if weight.table in named else {"fp4": FP4, "iq4nl": IQ4NL}[weight.table][code]


@given(SEEDS, BITS, st.integers(1, 70))
def test_codes_are_a_stream_of_bits(seed: int, bits: int, width: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (3, width)).astype(np.uint8)
    packed = pack_codes(codes, bits)
    stream = sum(int(code) << (bits * k) for k, code in enumerate(codes[1]))
    assert packed[1].tobytes() == stream.to_bytes(math.ceil(width * bits / 8), "little")
    np.testing.assert_array_equal(unpack_codes(packed, bits, width), codes)


def test_four_bits_are_packed_as_int4_packs_them() -> None:
    codes = np.arange(15, dtype=np.uint8)[None]
    np.testing.assert_array_equal(pack_codes(codes, 4), pack(codes))


@given(coded())
def test_planned_bytes_are_the_real_bytes(weight: Coded) -> None:
    assert weight.storage.nbytes(weight.shape) == weight.nbytes


@given(coded(rows=((3,),)))
@settings(max_examples=60)
def test_dense_is_the_written_formula(weight: Coded) -> None:
    """Against a loop over single numbers, in the order that the module documents."""
    dense, codes = weight.dense(), weight.codes()
    scales, form = weight.scales, weight.scales.form
    for j in range(weight.width):
        group = j // (weight.group or weight.width)
        if scales.values.dtype == np.uint8:
            scale = np.float32(2.0 ** (int(scales.values[2, group]) - 127))
        elif scales.codes is None:
            scale = np.float32(scales.values[2, group])
        else:
            block = group // form.together if form.together else 0
            scale = np.float32(scales.values[2, block]) * np.float32(scales.codes[2, group])
        q = np.float32(number(int(codes[2, j]), weight))
        if weight.zeros is not None:
            q -= np.float32(weight.zeros[2, group])
        expected = scale * q
        if weight.minimums is not None:
            expected += weight.minimums.floats()[2, group]
        assert dense[2, j if weight.order is None else weight.order[j]] == expected


@given(coded(), st.integers(0, 2), st.integers(1, 3))
def test_parts_of_dense_are_dense_parts(weight: Coded, first: int, step: int) -> None:
    dense = weight.dense()
    assert (dense.dtype, dense.shape) == (np.float32, weight.shape)
    part = weight.outputs(slice(first, None, step))
    np.testing.assert_array_equal(part.dense(), dense[..., first::step, :])
    assert part.storage.nbytes(part.shape) == part.nbytes
    np.testing.assert_array_equal(
        weight[0].dense() if len(dense.shape) > 2 else weight[:1].dense()[0], dense[0]
    )
    if len(dense.shape) == 2:
        ids = np.arange(len(dense))[::-2]
        np.testing.assert_array_equal(weight.rows(ids), dense[ids])


@given(coded(rows=((6,),)), st.sampled_from([1, 2, 3]))
def test_matrices_by_head(weight: Coded, heads: int) -> None:
    """Outputs are split as they are. Inputs, which share no scale then, are unpacked to bf16."""
    dense = weight.dense().reshape(heads, 6 // heads, -1)
    rows, width = dense.shape[1:]
    of_values = WeightSpec("w", (heads, rows, width), ("w",), by_head="outputs", quantizable=True)
    split = canonical(of_values, weight)
    np.testing.assert_array_equal(split.dense(), dense)
    assert split.storage.kind == weight.storage.kind
    np.testing.assert_array_equal(Coded.stack([split])[heads - 1].dense(), dense[-1])
    of_keys = WeightSpec("w", (heads, width, rows), ("w",), by_head="inputs", quantizable=True)
    turned = canonical(of_keys, weight)
    assert turned.storage == kind_of(of_keys, weight.storage, None) == FloatStorage("bf16")
    expected = dense.swapaxes(1, 2).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(turned.dense(), expected)
    assert kind_of(of_keys, weight.storage, "int8").kind == "int8"


@given(coded(rows=((5,),)), st.integers(1, 3))
def test_a_stack_is_of_its_parts(weight: Coded, count: int) -> None:
    stacked = Coded.stack([weight] * count)
    expected = weight.dense() if count == 1 else np.stack([weight.dense()] * count)
    np.testing.assert_array_equal(stacked.dense(), expected)
    assert stacked.storage == weight.storage


@pytest.mark.parametrize(
    ("table", "view"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)]
)
def test_floats_of_8_bits(table: str, view: Any) -> None:
    weight = make(0, (3,), 256, 8, table, None, "f32")
    numbers = weight.packed.view(view).astype(np.float32)
    np.testing.assert_array_equal(weight.dense(), weight.scales.values * numbers)
    x = np.random.default_rng(1).standard_normal((2, 256)).astype(np.float32)
    weight = replace(weight, packed=weight.packed & 0x3B)
    np.testing.assert_allclose(weight.product(x), x @ weight.dense().T, rtol=1e-5, atol=1e-4)


def test_a_table_of_floats() -> None:
    table = tuple(float(v) for v in np.linspace(-1, 1, 16, dtype=np.float32))
    weight = replace(make(0, group=64, width=128), table=table)
    expected = np.repeat(weight.scales.floats(), 64, -1) * np.float32(table)[weight.codes()]
    np.testing.assert_array_equal(weight.dense(), expected)
    assert not weight.storage.integers


def by_hand(x: np.ndarray, weight: Coded) -> np.ndarray:
    """Return the product of one row, by loops over single numbers."""
    if weight.order is not None:
        x = x[weight.order]
    span, double = (128 if weight.bits <= 6 else 32), weight.table == "fp4"
    q, _, x_scales = quantize_rows(x[None], block_scaled=False, span=span)
    codes, scales, group = weight.codes(), weight.scales.floats(), weight.group or weight.width
    out = np.zeros(weight.shape[0], np.float32)
    for o in range(len(out)):
        for first in range(0, weight.width, span):
            units: dict[int, list[int]] = {}
            for j in range(first, min(first + span, weight.width)):
                units.setdefault(j // group, []).append(j)
            t = np.float32(0)
            for g, inputs in units.items():
                dot = sum(int(number(int(codes[o, j]), weight) * (1 + double)) * int(q[0, j]) for j in inputs)
                scale, total = scales[o, g] * np.float32(0.5 if double else 1), int(q[0, inputs].sum())
                t = fma(np.float32([dot]), scale, t)[0]
                if weight.minimums is not None:
                    t = fma(np.float32([total]), weight.minimums.floats()[o, g], t)[0]
                if weight.zeros is not None:
                    t = fma(np.float32([total]), -(scale * np.float32(weight.zeros[o, g])), t)[0]
            out[o] = fma(t[None], x_scales[0, first // span], out[o : o + 1])[0]
    return out


@given(coded(rows=((2,),)), SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_product_is_the_written_formula(weight: Coded, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((3, weight.width)).astype(np.float32)
    product = weight.product(x)
    np.testing.assert_array_equal(product[1], by_hand(x[1], weight))


@given(coded(rows=((6,),)), SEEDS)
def test_a_product_is_near_that_of_dense(weight: Coded, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((3, weight.width)).astype(np.float32)
    dense = weight.dense()
    error = np.abs(weight.product(x) - x @ dense.T)
    assert np.all(error <= 0.02 * np.abs(x).max() * np.abs(dense).sum(-1) + 1e-6)


def test_names_for_people() -> None:
    weight = make(0, form="two", extra="minimums")
    assert str(replace(weight, kind="q4_k").storage) == (
        "q4_k (4 bits, groups of 32, two-level f16 scales and minimums)"
    )
    weight = make(0, bits=8, group=None, form="bf16", extra="zeros", ordered=True)
    assert str(weight.storage) == (
        "made (8 bits, a scale for each output, bf16 scales and zero points, inputs in another order)"
    )


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    good = make(0, extra="zeros", ordered=True)
    assert good.zeros is not None
    assert good.order is not None
    wrong: list[dict[str, Any]] = [
        {"bits": 9},
        {"bits": 1},
        {"width": 158},
        {"table": "nf5"},
        {"table": (0.0, 1.0)},
        {"table": "e4m3"},
        {"bits": 8, "table": "iq4nl"},
        {"table": "iq4nl"},
        {"packed": good.packed.view(np.int8)},
        {"scales": Scales(good.scales.values[:, 1:])},
        {"minimums": good.scales},
        {"zeros": good.zeros[:, 1:]},
        {"zeros": good.zeros.astype(np.int8)},
        {"order": good.order[1:]},
        {"order": good.order.astype(np.int64)},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match=r".+"):
            replace(good, **change)
    for form in (
        lambda: Scales(np.zeros((2, 4), np.float64)),
        lambda: Scales(np.zeros((2, 4), np.float16), together=2),
        lambda: Scales(np.zeros((2, 4), np.float16), np.zeros((2, 4), np.int16)),
        lambda: Scales(np.zeros((2, 4), np.float16), np.zeros((2, 4), np.uint8), 2),
    ):
        with pytest.raises(ValueError, match="scales"):
            form()
    with pytest.raises(ValueError, match="along the inputs"):
        good.transposed()
    with pytest.raises(ValueError, match="axis -1"):
        good.outputs(slice(0, None, 2), -1)
    with pytest.raises(ValueError, match="different storage"):
        Coded.stack([good, replace(good, order=None)])
