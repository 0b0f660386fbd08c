"""The quantized safetensors checkpoints of shared/data, and the logits of a loaded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tiny import Paged

from quire.models import Model

FOLDERS = (
    *(f"compressed-tensors/{name}" for name in ("fp8-block", "fp8-dynamic", "mxfp4a16", "nvfp4a16")),
    *(f"compressed-tensors/{name}" for name in ("w4a16", "w4a16-asym", "w8a8")),
    *(f"fp8/{name}" for name in ("block128", "block128-ragged", "tensor-static")),
    *(f"gptq-awq/{name}" for name in ("awq-g128", "gptq-3bit-g128-actorder", "gptq-4bit-g128")),
    *(f"gptq-awq/{name}" for name in ("gptq-4bit-g32-asym-actorder", "gptq-8bit-g128")),
    *(f"misc/{name}" for name in ("bitsandbytes-nf4", "bitsandbytes-nf4-double", "gpt-oss-mxfp4")),
    *("misc/modelopt-nvfp4", "mlx/mlx-4bit-g64", "mlx/mlx-6bit-g64", "mlx/mlx-mxfp4"),
)


def golden_of(folder: Path) -> Any:
    return json.loads((folder / "golden.json").read_text())


def error_of(model: Model, paged: Paged, golden: Any) -> float:
    """The largest difference from the golden logits of last tokens, in parts of the largest logit."""
    prompts = golden["prompts"]
    rows = [(paged.sequence(p["ids"], model.context_variant(len(p["ids"]))), len(p["ids"])) for p in prompts]
    found = paged.step(rows)
    expected = [np.array(prompt["last_logits"], np.float32) for prompt in prompts]
    return max(
        float(np.abs(logits[-1] - own).max() / np.abs(own).max())
        for logits, own in zip(found, expected, strict=True)
    )
