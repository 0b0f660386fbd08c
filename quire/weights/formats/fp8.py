"""FP8 as DeepSeek, Qwen, GLM and others publish it (`quant_method: fp8`), and FBGEMM's.

weight            f8 [out, in], or of experts [experts, out, in]
weight_scale_inv  f32 or bf16 [ceil(out / 128), ceil(in / 128)], of blocks; multiplied, despite its name
weight_scale      scalar (not FBGEMM's), [out, 1], or one for each matrix joined in qkv_proj or gate_up_proj

In DeepSeek-V4 scales are e8m0 and named .scale. Its experts are 4-bit floats, .weight i8 [out, in / 2] with
.scale e8m0 [out, in / 32], or NVFP4 as ModelOpt has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.weights.formats.floats8 import BESIDE, block_of, float8_weights
from quire.weights.formats.fp4 import mxfp4_weight, nvfp4_modules
from quire.weights.formats.raw import WEIGHT, RawTensors, Reading
from quire.weights.formats.settings import Settings
from quire.weights.formats.unused import notes_on, unused_scales


def read_fp8(settings: Settings, raw: RawTensors, config: Mapping[str, Any]) -> Reading:
    """Read every tensor of 8-bit floats, and those of 4-bit floats beside."""
    settings.one_of("activation_scheme", "dynamic", "static", default="dynamic")
    block = block_of(settings)
    single = block is None and settings.get("quant_method") != "fbgemm_fp8"
    weights = [*float8_weights("fp8", raw, block, config, single), *nvfp4_modules(raw)]
    for module in raw.modules(BESIDE):
        weight = module + WEIGHT
        if weight in raw and raw.need(weight).dtype == "I8":
            weights.append(mxfp4_weight(raw, weight, weight, module + BESIDE))
    unused = unused_scales(raw)
    return Reading("FP8", tuple(weights), notes_on(unused), unused)
