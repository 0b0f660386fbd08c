"""FP8 as DeepSeek, Qwen, GLM and others publish it (`quant_method: fp8`), and FBGEMM's.

weight            f8 [out, in], or of experts [experts, out, in]
weight_scale_inv  f32 or bf16 [ceil(out / 128), ceil(in / 128)], of blocks; multiplied, despite its name
weight_scale      scalar (not FBGEMM's), [out, 1], or one for each matrix joined in qkv_proj or gate_up_proj
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.weights.formats.floats8 import block_of, float8_weights
from quire.weights.formats.raw import RawTensors, Reading
from quire.weights.formats.settings import Settings
from quire.weights.formats.unused import notes_on, unused_scales


def read_fp8(settings: Settings, raw: RawTensors, config: Mapping[str, Any]) -> Reading:
    """Read every tensor of 8-bit floats."""
    settings.one_of("activation_scheme", "dynamic", "static", default="dynamic")
    block = block_of(settings)
    single = block is None and settings.get("quant_method") != "fbgemm_fp8"
    weights = tuple(float8_weights("fp8", raw, block, config, single))
    unused = unused_scales(raw)
    return Reading("FP8", weights, notes_on(unused), unused)
