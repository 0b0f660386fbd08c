"""Weights rounded on the accelerator: the integers and scales of the definition, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_accelerator import write_checkpoint
from safetensors.numpy import load_file, save_file

from quire.backends.cuda import quantizing
from quire.backends.cuda.interpreted import InterpretedAccelerator, view_of
from quire.backends.cuda.kernels.variants import variants
from quire.backends.cuda.packing import PackedIntegers, packed, packed_shapes
from quire.backends.cuda.quantizing import Quantizer
from quire.backends.cuda.uploads import UploadRing
from quire.backends.cuda.weights import upload
from quire.config import EngineConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.program.program import WeightSpec
from quire.quantize.kinds import DTYPES
from quire.quantize.round_to_nearest import quantize
from quire.weights.load import load


def awkward(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers of many sizes; rows and groups of zeros, of tiny numbers, and with equal largest magnitudes."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal(shape) * np.exp(rng.normal(0, 2, (*shape[:-1], 1)))
    found[..., 0, :] = 0
    found[..., 1, :] *= 1e-39
    found[..., 2, :40] = 0
    found[..., 3, 2:4] = (-9, 9)
    found[..., 4, 2:4] = (9, -9)
    found[..., 5, :] = np.round(found[..., 5, :])
    found[..., 6, 5] = 1e30
    return found.astype(np.float32)


def rounded(floats: np.ndarray, kind: str) -> tuple[Any, InterpretedAccelerator]:
    accelerator = InterpretedAccelerator()
    arrays = []
    for shape, dtype in packed_shapes(kind, floats.shape):
        size = int(np.prod(shape)) * dtype.itemsize
        arrays.append(accelerator.allocate(size).part(0, shape, dtype))
    with UploadRing(accelerator) as ring:
        quantizer = Quantizer(accelerator, ring)
        quantizer.put(WeightSpec("w", floats.shape, ("w",)), floats, kind, tuple(arrays))
        quantizer.finish()
    return [view_of(array) for array in arrays], accelerator


def assert_equal(found: list[np.ndarray], wanted: PackedIntegers, outputs: int) -> None:
    """Compare arrays bit for bit, but for what is beyond the outputs in rows of scales."""
    values, scales, channels = found
    assert values.tobytes() == wanted.values.tobytes()
    assert (scales[..., :outputs] == wanted.scales[..., :outputs]).all()
    assert channels.tobytes() == wanted.channels.tobytes()


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("format", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", [(9, 64), (8, 72), (11, 300), (3, 7, 160)], ids=str)
def test_the_bits_of_the_definition(
    kind: str, format: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of a few rows; the last group may be short, and the last span may lack groups."""
    monkeypatch.setattr(quantizing, "STAGED_BYTES", 4 * 300 * 4)
    floats = np.clip(awkward(shape, shape[-1]), -60000, 60000).astype(DTYPES[format])
    found, accelerator = rounded(floats, kind)
    wanted = packed(quantize(WeightSpec("w", shape, ("w",)), floats, kind))  # type: ignore[arg-type]
    assert_equal(found, wanted, shape[-2])
    assert accelerator.loaded <= {variant.key for variant in variants()}


def test_numbers_that_are_not_finite_are_refused_by_name() -> None:
    for number in (np.inf, -np.inf, np.nan):
        floats = awkward((2, 7, 40), 3)
        floats[1, 3, 7] = number
        with pytest.raises(ConfigError, match=r"tensor 'w' cannot be quantized.*not finite"):
            rounded(floats, "int4")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_checkpoint_is_rounded_on_the_accelerator(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are those of `load`, which is asked for floats alone."""
    model = write_checkpoint(tmp_path)
    facts = describe(EngineConfig(model=model, device="cuda-interpreted", quantization=quantization))
    wanted = load(facts.weights)
    monkeypatch.setattr("quire.weights.load.quantize", None)
    found = upload(facts.weights, InterpretedAccelerator())
    matrices = [name for name, weight in wanted.items() if weight.storage.kind == quantization]
    assert len(matrices) > 5
    for name in matrices:
        own: Any = wanted[name]
        assert_equal([view_of(array) for array in found[name].arrays], packed(own), own.shape[-2])
    assert facts.memory.loading_bytes == quantizing.STAGED_BYTES


def test_a_damaged_checkpoint_is_one_error(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][3, 3] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    facts = describe(EngineConfig(model=model, device="cuda-interpreted", quantization="int8"))
    with pytest.raises(ConfigError, match=f"tensor '{name}' cannot be quantized"):
        upload(facts.weights, InterpretedAccelerator())
