"""ModelOpt, as NVIDIA publishes models: FP8 and NVFP4, or a mixture of them by module.

    FP8        weight f8, weight_scale scalar;  FP8_PB_WO: [out / 128, 1, in / 128, 1]
    NVFP4      weight u8 [out, in / 2], weight_scale e4m3 [out, in / 16], weight_scale_2 f32, multiplied
    MXFP8      weight f8, weight_scale e8m0 [out, in / 32]

The tensors tell which one a module has. `pre_quant_scale` would change activations: refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError, quoted
from quire.weights.formats.floats8 import block_of, float8_weights
from quire.weights.formats.fp4 import nvfp4_modules
from quire.weights.formats.raw import BETTER, RawTensors, Reading
from quire.weights.formats.settings import Settings
from quire.weights.formats.unused import notes_on, unused_scales

_ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
    "MXFP8",
    "MIXED_PRECISION",
)
_BLOCK = (128, 128)


def read_modelopt(settings: Settings, raw: RawTensors, config: Mapping[str, Any]) -> Reading:
    """Read every module with 8-bit or 4-bit floats."""
    algorithm, cache = settings.get("quant_algo"), settings.get("kv_cache_quant_algo", "kv_cache_scheme")
    unused = unused_scales(raw)
    if algorithm is None:  # only the KV cache is to be quantized
        return Reading("", (), notes_on(unused, cache), unused)
    if algorithm not in _ALGORITHMS:
        raise ConfigError(f"the ModelOpt algorithm {quoted(algorithm)} is not supported", BETTER)
    for name in raw:
        if name.endswith(".pre_quant_scale"):
            raise raw.fault(name, "scales activations before a product, which is not supported", BETTER)
    block = block_of(settings, *_BLOCK) if algorithm in ("FP8_PB_WO", "MIXED_PRECISION") else None
    single = algorithm not in ("FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8")
    weights = [*float8_weights("fp8", raw, block, config, single), *nvfp4_modules(raw)]
    rounded = any(weight.storage.integers for weight in weights)
    return Reading("ModelOpt", tuple(weights), notes_on(unused, cache, rounded), unused)
