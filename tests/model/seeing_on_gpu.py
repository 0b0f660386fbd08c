"""Tiny models that see, in sizes that kernels for GPUs take, and prompts with images on several backends."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from driver import ALL, Driver
from seeing import Seeing, compute, mild_weights, tokens_of, whole
from tiny import plain
from tiny_vision import (
    CONFIG,
    CONFIG2,
    CONFIG3,
    CONFIG4,
    CONFIG4E,
    CONFIG25,
    CONFIG_AYA,
    CONFIG_GLM4V,
    CONFIG_GLM_OCR,
    CONFIG_INTERNVL,
    CONFIG_LFM2,
    CONFIG_LIGHTON,
    CONFIG_LLAMA4,
    CONFIG_LLAVA,
    CONFIG_PADDLE,
    CONFIG_PIXTRAL,
    CONFIG_SMOLVLM,
    PROCESSOR,
    PROCESSOR3,
    PROCESSOR4,
    PROCESSOR_COHERE,
    PROCESSOR_GLM,
    PROCESSOR_INTERNVL,
    PROCESSOR_LFM2,
    PROCESSOR_LIGHTON,
    PROCESSOR_LLAMA4,
    PROCESSOR_LLAVA,
    PROCESSOR_PADDLE,
    PROCESSOR_PIXTRAL,
    PROCESSOR_SMOLVLM,
)

from quire.backends.backend import Capacity
from quire.backends.cuda.accelerator import Accelerator
from quire.backends.cuda.backend import CudaBackend
from quire.backends.cuda.divided import divide, divided_axes
from quire.backends.cuda.interpreted import InterpretedAccelerator
from quire.backends.cuda.weights import place_weights
from quire.backends.reference import ReferenceBackend
from quire.models import read_model
from quire.program.passes import fuse
from quire.quantize import kinds
from quire.types import PromptImage

Json = dict[str, Any]
TOKEN, WORK = 60, 40
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
_WIDE = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}


def _with(config: Json, text: Json, tower: Json, **more: Any) -> Json:
    """Return a config with changes of its parts."""
    text = {"head_dim": 16, "vocab_size": 64, "intermediate_size": 16, "num_hidden_layers": 2} | text
    found = copy.deepcopy(config | more)
    return found | {
        "image_token_id": TOKEN,
        "text_config": found["text_config"] | text,
        "vision_config": found["vision_config"] | tower,
    }


# Heads of 8 numbers, which are padded; patches of 108 numbers; whole images beside windows and without;
# three positions of tokens, and what is added behind layers; clipped matrices.
QWEN = _with(
    CONFIG,
    {"rope_parameters": _ROPE, "num_hidden_layers": 1},
    {"num_heads": 4, "depth": 1, "intermediate_size": 16},
)
# Windows of two tokens a side, whose heads are padded, beside a layer without; and sections in chunks.
QWEN2 = _with(CONFIG2, {"num_hidden_layers": 1}, {"depth": 1, "mlp_ratio": 0.5})
QWEN25 = _with(
    CONFIG25,
    {"num_hidden_layers": 1},
    {"num_heads": 4, "depth": 2, "intermediate_size": 20, "window_size": 16},
)
GEMMA3 = _with(
    CONFIG3,
    {"query_pre_attn_scalar": 16, "sliding_window": 7},
    _WIDE | {"image_size": 24, "patch_size": 6},
    mm_tokens_per_image=4,
)
GEMMA4 = _with(
    CONFIG4,
    {"num_hidden_layers": 4, "num_kv_shared_layers": 2},
    _WIDE | {"num_attention_heads": 4},
)
GEMMA4_SMALL = _with(
    CONFIG4E,
    {
        "hidden_size_per_layer_input": 16,
        "num_hidden_layers": 1,
        "num_kv_shared_layers": 0,
        "layer_types": ["full_attention"],
        "pad_token_id": 5,
    },
    _WIDE | {"num_attention_heads": 4},
)
# Cubic positions and joined patches; norms of heads and biases in the tower.
GLM4V = _with(
    CONFIG_GLM4V,
    {"num_hidden_layers": 1},
    {"num_heads": 4, "depth": 1, "intermediate_size": 16},
)
GLM_OCR = _with(
    CONFIG_GLM_OCR,
    {"num_hidden_layers": 1},
    {"num_heads": 4, "depth": 1, "intermediate_size": 16},
)
LLAMA4 = _with(
    CONFIG_LLAMA4,
    {"intermediate_size_mlp": 16},
    {
        **_WIDE,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "projector_input_dim": 48,
        "projector_output_dim": 48,
    },
)
PADDLE = _with(
    CONFIG_PADDLE,
    {"num_hidden_layers": 1, "rope_scaling": _ROPE},
    _WIDE | {"num_attention_heads": 4},
)
PIXTRAL = _with(CONFIG_PIXTRAL, {"num_hidden_layers": 1}, _WIDE | {"num_attention_heads": 4})
LFM2 = _with(
    CONFIG_LFM2,
    {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    _WIDE | {"num_attention_heads": 4},
)
SMOLVLM = _with(CONFIG_SMOLVLM, {"num_hidden_layers": 1}, _WIDE | {"num_attention_heads": 4})
INTERNVL = _with(CONFIG_INTERNVL, {"num_hidden_layers": 1}, _WIDE | {"num_attention_heads": 4})
LIGHTON = _with(CONFIG_LIGHTON, {"num_hidden_layers": 1}, _WIDE | {"num_attention_heads": 4})
AYA = _with(
    CONFIG_AYA,
    {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    _WIDE | {"num_attention_heads": 4},
    alignment_intermediate_size=64,
)
LLAVA = _with(CONFIG_LLAVA, {"num_hidden_layers": 1}, _WIDE | {"num_attention_heads": 4})
SMALL_IMAGES: Json = PROCESSOR3 | {"size": {"height": 24, "width": 24}}
MODELS: dict[str, tuple[Json, Json, tuple[int, int]]] = {  # and the height and width of images
    "qwen2_vl": (QWEN2, PROCESSOR, (16, 16)),
    "qwen2_5_vl": (QWEN25, PROCESSOR, (24, 8)),
    "qwen3_vl": (QWEN, PROCESSOR, (16, 16)),
    "gemma3": (GEMMA3, SMALL_IMAGES, (24, 24)),
    "gemma4": (GEMMA4, PROCESSOR4, (12, 24)),
    "gemma4_small": (GEMMA4_SMALL, PROCESSOR4, (12, 24)),
    "glm4v": (GLM4V, PROCESSOR_GLM, (16, 16)),
    "glm_ocr": (GLM_OCR, PROCESSOR_GLM, (16, 16)),
    "lfm2_vl": (LFM2, PROCESSOR_LFM2, (16, 16)),
    "llama4": (LLAMA4, PROCESSOR_LLAMA4, (16, 16)),
    "paddleocr_vl": (PADDLE, PROCESSOR_PADDLE, (16, 16)),
    "smolvlm": (SMOLVLM, PROCESSOR_SMOLVLM, (18, 18)),
    "internvl": (INTERNVL, PROCESSOR_INTERNVL, (16, 16)),
    "lighton_ocr": (LIGHTON, PROCESSOR_LIGHTON, (20, 12)),
    "aya_vision": (AYA, PROCESSOR_COHERE, (18, 18)),
    "llava": (LLAVA, PROCESSOR_LLAVA, (16, 16)),
    "mistral3": (PIXTRAL, PROCESSOR_PIXTRAL, (16, 16)),
}


@cache
def model(name: str) -> Seeing:
    config, processor, (height, width) = MODELS[name]
    read = read_model(config, processor)
    program, vision = plain(fuse(read.program)), plain(read.vision)
    images, ids = [], np.random.default_rng(0).integers(3, TOKEN, 15).tolist()
    for seed, first in ((1, 3), (2, 8)):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
        rows, columns = vision.patching.grid(height, width)
        gap, data = 0 if vision.row_ends is None else 1, pixels.tobytes()
        one = PromptImage(first, rows, columns, height, width, data, vision.whole, WORK, gap)
        ids[first : one.end] = tokens_of(one, TOKEN)
        images.append(one)
    return Seeing(program, vision, mild_weights(program, vision), tuple(images), ids)


def chunks_of(of: Seeing) -> tuple[int, ...]:
    """Chunks of the prompt: through an image, or around one that must be whole."""
    return (2, 5) if of.vision.whole else (4, 1, 2, 3)


def on_gpu(
    of: Seeing, kv_dtype: str = "float32", format: str = "f32", accelerator: Accelerator | None = None
) -> Driver:
    """Return sequences on an accelerator, by default a new interpreted one."""
    accelerator = InterpretedAccelerator() if accelerator is None else accelerator
    stored = {n: kinds.Dense(w.array.astype(kinds.DTYPES[format])) for n, w in of.weights.items()}
    capacity, ranks = Capacity([64] * len(of.program.cache_groups), 16, kv_dtype, 3), accelerator.num_ranks
    axes = divided_axes(both := whole(of.program, of.vision), ranks)
    placed = place_weights(divide(both, ranks, axes), stored, accelerator, axes)
    program, tower = (divide(own, ranks, axes) for own in (of.program, of.vision.program))
    vision = replace(of.vision, program=tower)
    return Driver(of.program, CudaBackend(program, placed, accelerator, capacity, vision=vision))


def on_reference(of: Seeing) -> Driver:
    return Driver(of.program, ReferenceBackend(of.program, of.weights, **of.size, num_slots=3))


def scores(of: Seeing, run: Driver, *chunks: int, beside: bool = False) -> dict[int, Any]:
    """What the prompt predicts at each position, in chunks and then the rest, and for three tokens after it.

    Of these, the last two are decoded in steps of one token, the second of them by a graph. `beside` a text
    only those three are found, so few tokens need logits.
    """
    params = replace(ALL, prompt_logprobs=None) if beside else ALL
    sequence = run.admit(0, of.ids, params, images=of.images)
    other = run.admit(1, of.ids[12:]) if beside else None
    compute(run, sequence, len(of.ids) + 3, chunks, other)
    found = sequence.scores()
    return {at + len(of.ids) - 1: entry for at, entry in found.items()} if beside else found
