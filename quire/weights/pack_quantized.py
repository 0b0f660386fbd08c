"""Quantized matrices as the format compressed-tensors stores them ("pack-quantized"), which others read too.

A module M has M.weight_packed, int32 [out, ceil(in * bits / 32)]: code + 2^(bits - 1) of input k at bit
bits * k of a row's little-endian stream; M.weight_scale [out, groups]; M.weight_shape, int64 [2]. The bits
and groups of modules are in `quantization_config` of config.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from quire.quantize.coded import pack_codes
from quire.quantize.grid import Grid, Rounded
from quire.quantize.kinds import DTYPE_NAMES, Array
from quire.weights.safetensors_writer import Entries

SAFETENSORS = {"bf16": "BF16", "f16": "F16", "f32": "F32"}  # names of number formats


def entries_of(module: str, shape: tuple[int, ...], grid: Grid) -> Entries:
    """Return the tensors of a module with a matrix [out, in]: name -> (number format, shape)."""
    rows, width = shape
    scale = SAFETENSORS[DTYPE_NAMES[grid.scale_dtype]]
    return {
        f"{module}.weight_packed": ("I32", (rows, -(-width * grid.bits // 32))),
        f"{module}.weight_scale": (scale, (rows, width // grid.group)),
        f"{module}.weight_shape": ("I64", (2,)),
    }


def tensors_of(module: str, rounded: Rounded) -> dict[str, Array]:
    """Return the data of the tensors of a module."""
    grid = rounded.grid
    return {
        f"{module}.weight_packed": pack(rounded.codes, grid.bits),
        f"{module}.weight_scale": rounded.scales.astype(grid.scale_dtype),
        f"{module}.weight_shape": np.array(rounded.codes.shape, np.int64),
    }


def pack(codes: Array, bits: int) -> Array:
    """Pack signed codes int8 [out, in] to int32 [out, ceil(in * bits / 32)]."""
    stream = pack_codes((codes.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8), bits)
    padded = np.zeros((len(codes), -(-codes.shape[1] * bits // 32) * 4), np.uint8)
    padded[:, : stream.shape[1]] = stream
    return padded.view("<i4")


def quantization_config(modules: Mapping[str, tuple[Grid, int]], plain: Iterable[str]) -> dict[str, Any]:
    """Return `quantization_config` for modules with (grid, inputs); `plain` linear modules are not quantized.

    A single group targets every linear module that is not ignored; of several each lists its modules.
    """
    by_scheme: dict[tuple[int, int | None], list[str]] = {}
    for module, (grid, width) in modules.items():
        key = (grid.bits, grid.group if grid.group < width else None)
        by_scheme.setdefault(key, []).append(module)
    groups = {}
    for number, ((bits, group), names) in enumerate(by_scheme.items()):
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(by_scheme) == 1 else names,
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": True,
                "strategy": "channel" if group is None else "group",
                "group_size": group,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(plain),
        "kv_cache_scheme": None,
    }
