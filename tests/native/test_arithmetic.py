"""In which data type ops multiply, as the device says it: what test_ops and test_attend find in results."""

from __future__ import annotations

import pytest
from lowered import BF16_ISAS, FORMATS, ISAS, plain, planned, rounds_to_bf16, scheme, tensors
from tiny import random_weights, tiny

from quire.backends.native.device import NativeDevice
from quire.backends.null import NullDevice
from quire.backends.reference import ReferenceDevice
from quire.program.ops import Attention, Embed, Experts, GatedLinear, Linear
from quire.program.passes import fuse


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_products_multiply_what_they_round_activations_to(
    format: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ISA", isa)
    program = fuse(plain(tiny("mixtral").program))
    plan = planned(program, tensors(random_weights(program), format), scheme(format))
    device = NativeDevice("test")
    quantized = format in ("int8", "int4")
    expected = "int8" if quantized else "bf16" if rounds_to_bf16(isa, format) else "f32"
    for op in program:
        found = device.arithmetic_of(op, plan.storage, "float32")
        if (
            isinstance(op, Linear | GatedLinear | Experts)
            and plan.storage[op.weights()[0].name].kind == format
        ):
            assert found == expected
        elif isinstance(op, Attention | Embed):
            assert found == "f32"
    assert sum(plan.storage[w.name].kind == format for op in program for w in op.weights()) > 5


@pytest.mark.parametrize("isa", ISAS)
def test_attention_multiplies_a_bf16_cache_in_pairs(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ISA", isa)
    op = next(op for op in tiny("llama").program if isinstance(op, Attention))
    found = {dtype: NativeDevice("test").arithmetic_of(op, {}, dtype) for dtype in NativeDevice.kv_dtypes}
    pairs = "bf16" if isa in BF16_ISAS else "f32"
    assert found == {"float32": "f32", "float16": "f32", "bfloat16": pairs, "int8": "f32"}


def test_other_devices_multiply_floats() -> None:
    for op in tiny("llama").program:
        assert ReferenceDevice().arithmetic_of(op, {}, "float32") == "f32"
        assert NullDevice().arithmetic_of(op, {}, "bfloat16") == "f32"
