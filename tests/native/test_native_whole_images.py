"""Images of several families on the native backend, against its reference twin: those whose tokens see each
other, those that are causal, towers with windows, and images with text between their rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from driver import Driver
from lowered import ISAS, plain, planned, scheme, tensors
from seeing import Seeing, compute, mild_weights, tokens_of, whole
from test_native_images import apart
from tiny_vision import (
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

from quire.backends.native import _core
from quire.backends.native.backend import NativeBackend
from quire.backends.native.weights import load_packed
from quire.backends.reference import ReferenceBackend
from quire.models import read_model
from quire.program.passes import fuse
from quire.types import ImageSlice, PromptImage
from quire.weights.load import load
from quire.weights.plan import plan

VOCAB, TOKEN, LENGTH, WORK = 64, 60, 16, 40


@cache
def model(name: str) -> Seeing:
    """A model, and a prompt of 70 tokens with three images, each `side` pixels high and wide."""
    config, processor, side = MODELS[name]
    text = {**config["text_config"], "vocab_size": VOCAB}
    read = read_model({**config, "image_token_id": TOKEN, "text_config": text}, processor)
    program, vision = plain(fuse(read.program)), plain(read.vision)
    images = []
    for seed, first in enumerate((5, 5 + LENGTH, 40), start=1):
        pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
        rows, columns = vision.patching.grid(side, side)
        gap, data = 0 if vision.row_ends is None else 1, pixels.tobytes()
        images.append(PromptImage(first, rows, columns, side, side, data, vision.whole, WORK, gap))
    ids = [int(i) for i in np.random.default_rng(0).integers(3, TOKEN, 70)]
    for one in images:
        ids[one.first : one.end] = tokens_of(one, TOKEN)
    return Seeing(program, vision, mild_weights(program, vision), tuple(images), ids)


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "qwen 2": (CONFIG2, PROCESSOR, 32),
    "qwen 2.5": (CONFIG25, PROCESSOR, 32),
    "gemma 3": (CONFIG3, PROCESSOR3, 32),
    "gemma 4": (CONFIG4, PROCESSOR4, 48),
    "gemma 4, small": (CONFIG4E, PROCESSOR4, 48),
    "glm 4.1": (CONFIG_GLM4V, PROCESSOR_GLM, 32),
    "glm ocr": (CONFIG_GLM_OCR, PROCESSOR_GLM, 32),
    "lfm2": (CONFIG_LFM2, PROCESSOR_LFM2, 24),
    "llama 4": (CONFIG_LLAMA4, PROCESSOR_LLAMA4, 16),
    "paddleocr": (CONFIG_PADDLE, PROCESSOR_PADDLE, 32),
    "smolvlm": (CONFIG_SMOLVLM, PROCESSOR_SMOLVLM, 18),
    "internvl": (CONFIG_INTERNVL, PROCESSOR_INTERNVL, 16),
    "lighton ocr": (CONFIG_LIGHTON, PROCESSOR_LIGHTON, 20),
    "aya": (CONFIG_AYA, PROCESSOR_COHERE, 18),
    "llava": (CONFIG_LLAVA, PROCESSOR_LLAVA, 16),
    "mistral 3": (CONFIG_PIXTRAL, PROCESSOR_PIXTRAL, 24),
}


def on(of: Seeing, isa: str, format: str = "f32", threads: int = 1, ahead: bool = False) -> Driver:
    plans = planned(whole(of.program, of.vision), tensors(of.weights, format), scheme(format))
    packed = load_packed(plans, isa=isa, nodes=_core.Nodes(threads))
    how: dict[str, Any] = {
        "kv_cache_dtype": "float32",
        "isa": isa,
        "nodes": _core.Nodes(threads),
        "ahead": ahead,
    }
    backend = NativeBackend(of.program, packed.matrices, packed.vectors, **of.size, **how, max_num_seqs=3)
    return Driver(of.program, backend)


def on_reference(of: Seeing) -> Driver:
    weights = load(plan(whole(of.program, of.vision).weights(), tensors(of.weights, "f32"), None, ()))
    return Driver(of.program, ReferenceBackend(of.program, weights, **of.size, num_slots=3))


def scores(of: Seeing, run: Driver, *chunks: int, beside: bool = False) -> dict[int, Any]:
    """What the prompt predicts at each position, in chunks and then the rest, and eight tokens after it."""
    sequence = run.admit(0, of.ids, images=of.images)
    other = run.admit(1, of.ids[60:]) if beside else None
    compute(run, sequence, len(of.ids) + 8, chunks, other)
    return sequence.scores()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", MODELS)
def test_images_as_on_the_reference_backend(name: str, isa: str) -> None:
    of = model(name)
    assert apart(scores(of, on(of, isa)), scores(of, on_reference(of))) < 1e-4


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_that_divide_no_image_give_the_same_bits(name: str, format: str, isa: str) -> None:
    of = model(name)
    expected = scores(of, on(of, isa, format))
    assert scores(of, on(of, isa, format, 2), 5, 32, 2, 1, 16, 1, beside=True) == expected
    assert scores(of, on(of, isa, format), 1, 20, 17, 2, 22) == expected
    assert scores(of, on(of, isa, format, 2, ahead=True), 21, 16, 33) == expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["gemma 4, small", "qwen 2.5"])
def test_causal_images_may_be_divided(name: str, isa: str) -> None:
    of = model(name)
    expected = scores(of, on(of, isa))
    assert scores(of, on(of, isa, threads=2), 9, 7, 3, 40, beside=True) == expected
    assert scores(of, on(of, isa), *[1] * 70) == expected


@pytest.mark.parametrize("isa", ISAS)
def test_any_slices_of_windows_give_the_same_bits(isa: str) -> None:
    """They end within the attention of windows too, and that of the whole image."""
    of = model("qwen 2.5")
    expected = scores(of, on(of, isa))
    for threads, ahead in ((1, False), (2, True)):
        run = on(of, isa, threads=threads, ahead=ahead)
        text, sequence = run.admit(1, of.ids[60:]), run.admit(0, of.ids, images=of.images)
        run.step((text, 10), (sequence, 5))
        for end in range(1, 41):
            run.step((text, 1), image_slice=ImageSlice("r0", of.images[0], end - 1, end))
        run.step((text, 1), (sequence, len(of.ids) - 5))
        found = sequence.scores()
        assert len(found) == len(of.ids)
        assert found == {position: expected[position] for position in found}
