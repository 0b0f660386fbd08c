"""A tiny Qwen3-VL in memory: its programs, random weights, and prompts with images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from driver import DrivenSequence, Driver
from tiny import Dense, random_weights
from tiny_vision import CONFIG, PROCESSOR

from quire.images.vision import Vision
from quire.models import read_model
from quire.program import Program
from quire.program.passes import fuse
from quire.types import ImageSlice, PromptImage

Scores = dict[int, Any]
VOCAB, TOKEN = 64, 60
WORK = 40  # of each image
TEXT = [int(i) for i in np.random.default_rng(0).integers(3, TOKEN, 80)]


@dataclass(frozen=True)
class Seeing:
    """A model, its weights, and a prompt with images."""

    program: Program
    vision: Vision
    weights: dict[str, Dense]
    images: tuple[PromptImage, ...]
    ids: list[int]

    @property
    def size(self) -> dict[str, Any]:
        return {"num_blocks": [64] * len(self.program.cache_groups), "block_size": 16, "vision": self.vision}


def seeing(**changes: Any) -> tuple[Program, Vision]:
    """The program of the text model and the tower; `changes` are of its text_config."""
    text = {**CONFIG["text_config"], "vocab_size": VOCAB, **changes}
    model = read_model({**CONFIG, "text_config": text, "image_token_id": TOKEN}, PROCESSOR)
    assert model.vision is not None
    return fuse(model.program), model.vision


def whole(program: Program, vision: Vision) -> Program:
    """One program with the weights of both, none of which is transposed or the like."""
    return replace(program, ops=(*program.ops, *vision.program.ops))


def weights_of(program: Program, vision: Vision) -> dict[str, Dense]:
    return {**random_weights(program), **random_weights(vision.program)}


def mild_weights(program: Program, vision: Vision) -> dict[str, Dense]:
    """Random weights with smaller norms of heads, the only scale of scores in Gemma 4, and before others; and
    smaller matrices of heads in the towers of Qwen, which have no such norms.
    """
    weights = weights_of(program, vision)
    for name in weights:
        if any(part in name for part in ("q_norm", "k_norm", "attention_norm", "attn.qkv")):
            weights[name] = Dense(weights[name].array * np.float32(0.4))
    return weights


def compute(
    run: Driver, sequence: DrivenSequence, length: int, chunks: tuple[int, ...], other: DrivenSequence | None
) -> None:
    """Give a sequence so many tokens, its prompt in chunks and then the rest, beside another one if given."""
    left, known = list(chunks), len(sequence.tokens)
    while len(sequence.tokens) < length:
        count = min(left.pop(0) if left else known, len(sequence.tokens) - sequence.computed)
        rows = [(sequence, count)]
        if other is not None:
            rows.insert(0, (other, len(other.tokens) - other.computed))
        run.step(*rows)


def image(vision: Vision, first: int, seed: int, rows: int = 3, columns: int = 4) -> PromptImage:
    """Random pixels for so many tokens."""
    height, width = 8 * rows, 8 * columns
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    assert vision.patching.grid(height, width) == (rows, columns)
    return PromptImage(first, rows, columns, height, width, pixels.tobytes(), work=WORK)


def tokens_of(one: PromptImage, token: int) -> list[int]:
    """The tokens of an image, with others between its rows."""
    row = [*[token] * one.columns, *[token + 1] * one.gap]
    return (row * one.rows)[: one.end - one.first]


def prompt_of(*images: PromptImage, length: int = 40) -> list[int]:
    """A text with the tokens of these images in their places."""
    ids = TEXT[:length]
    for one in images:
        ids[one.first : one.end] = [TOKEN] * one.num_tokens
    return ids


def scores(run: Driver, *images: PromptImage, chunk: int = 99, beside: bool = False) -> Scores:
    """What a prompt with these images predicts at each position, and for eight tokens after it."""
    ids = prompt_of(*images)
    sequence = run.admit(0, ids, images=images)
    other = run.admit(1, TEXT[7:20]) if beside else None
    while len(sequence.tokens) < len(ids) + 8:
        rows = [(sequence, min(chunk, len(sequence.tokens) - sequence.computed))]
        if other is not None:
            rows.insert(0, (other, len(other.tokens) - other.computed))
        run.step(*rows)
    return sequence.scores()


def scores_in_slices(run: Driver, *images: PromptImage, ends: tuple[int, ...]) -> Scores:
    """The same beside a text that decodes, with the images encoded up to these parts of their work first."""
    ids = prompt_of(*images)
    other = run.admit(1, TEXT[7:20])
    run.step((other, 13))
    sequence = run.admit(0, ids, images=images)
    for number, one in enumerate(images):
        following = images[number + 1].first if number + 1 < len(images) else len(ids)
        if (count := one.first - sequence.computed) > 0:
            run.step((other, 1), (sequence, count))
        for begin, end in pairwise((0, *ends)):
            run.step((other, 1), image_slice=ImageSlice("r0", one, begin, end))
        run.step((other, 1), (sequence, following - sequence.computed))
    while len(sequence.tokens) < len(ids) + 8:
        run.step((other, 1), (sequence, len(sequence.tokens) - sequence.computed))
    return sequence.scores()
