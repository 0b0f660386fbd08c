"""Images whose tokens see each other, on the native backend, against its reference twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import Driver
from lowered import ISAS, plain, planned, scheme, tensors
from seeing import weights_of, whole
from test_native_images import apart
from tiny_vision import CONFIG3, PROCESSOR3

from quire.backends.native.backend import NativeBackend
from quire.backends.native.weights import load_packed
from quire.backends.reference import ReferenceBackend
from quire.models import read_model
from quire.program.passes import fuse
from quire.types import PromptImage
from quire.weights.load import load
from quire.weights.plan import plan

VOCAB, TOKEN, LENGTH = 64, 60, 16
MODEL = read_model(
    {**CONFIG3, "image_token_id": TOKEN, "text_config": {**CONFIG3["text_config"], "vocab_size": VOCAB}},
    PROCESSOR3,
)
PROGRAM, VISION = plain(fuse(MODEL.program)), plain(MODEL.vision)
WEIGHTS = weights_of(PROGRAM, VISION)
SIZE: dict[str, Any] = {"num_blocks": [64] * len(PROGRAM.cache_groups), "block_size": 16}


def image(first: int, seed: int) -> PromptImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)
    return PromptImage(first, 4, 4, 32, 32, pixels.tobytes(), whole=True)


IMAGES = image(5, seed=1), image(5 + LENGTH, seed=2), image(40, seed=3)
IDS = [int(i) for i in np.random.default_rng(0).integers(3, TOKEN, 70)]
for one in IMAGES:
    IDS[one.first : one.end] = [TOKEN] * LENGTH


def on(isa: str, format: str = "f32", threads: int = 1, ahead: bool = False) -> Driver:
    plans = planned(whole(PROGRAM, VISION), tensors(WEIGHTS, format), scheme(format))
    packed = load_packed(plans, isa=isa, num_threads=threads)
    how: dict[str, Any] = {"kv_cache_dtype": "float32", "isa": isa, "num_threads": threads, "ahead": ahead}
    backend = NativeBackend(
        PROGRAM, packed.matrices, packed.vectors, **SIZE, **how, max_num_seqs=3, vision=VISION
    )
    return Driver(PROGRAM, backend)


def scores(run: Driver, *chunks: int, beside: bool = False) -> dict[int, Any]:
    """What the prompt predicts at each position, in chunks and then the rest, and eight tokens after it."""
    sequence = run.admit(0, IDS, images=IMAGES)
    other = run.admit(1, IDS[60:]) if beside else None
    left = list(chunks)
    while len(sequence.tokens) < len(IDS) + 8:
        count = min(left.pop(0) if left else len(IDS), len(sequence.tokens) - sequence.computed)
        rows = [(sequence, count)]
        if other is not None:
            rows.insert(0, (other, len(other.tokens) - other.computed))
        run.step(*rows)
    return sequence.scores()


@pytest.mark.parametrize("isa", ISAS)
def test_images_as_on_the_reference_backend(isa: str) -> None:
    weights = load(plan(whole(PROGRAM, VISION).weights(), tensors(WEIGHTS, "f32"), None, ()))
    expected = scores(Driver(PROGRAM, ReferenceBackend(PROGRAM, weights, **SIZE, num_slots=3, vision=VISION)))
    assert apart(scores(on(isa)), expected) < 1e-4


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["f32", "bf16", "int8"])
def test_chunks_that_divide_no_image_give_the_same_bits(format: str, isa: str) -> None:
    expected = scores(on(isa, format))
    assert scores(on(isa, format, 2), 5, 32, 2, 1, 16, 1, beside=True) == expected
    assert scores(on(isa, format), 1, 20, 17, 2, 22) == expected
    assert scores(on(isa, format, 2, ahead=True), 21, 16, 33) == expected
