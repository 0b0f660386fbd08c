"""What the comparisons of images share: pictures, and prompts with them."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import numpy as np
from driver import Driver
from oracle import torch
from PIL import Image

from quire.backends.reference import ReferenceBackend
from quire.images.prompt import PromptImages, Source
from quire.images.vision import Vision
from quire.models import Model
from quire.program.passes import fuse
from quire.types import PromptImage
from quire.weights.folder import ModelFolder
from quire.weights.load import load
from quire.weights.plan import plan
from quire.weights.renamed import under_own_names

MARK, IMAGE, START, END, BREAK = 200, 250, 252, 253, 254  # tokens
MARKS = re.compile(r"<[^<>]+>|\n+")


def picture(height: int, width: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def prompt(images: list[Image.Image], vision: Vision) -> tuple[list[int], list[PromptImage]]:
    """Return tokens around these images, and them as the sandbox resizes them."""
    ids, files = [1, 2, 3], list[Source]()
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        files.append(Source(file.getvalue(), "image"))
        ids += [START, vision.token, END, 7, 8]
    ends = None if vision.row_ends is None else (BREAK, END)
    marks, known = vision.marks, dict[str, int]()

    def around(*numbers: int) -> list[list[int]]:
        """Tokens from MARK on, one for each mark."""
        texts = [] if marks is None else marks.around(*numbers)
        return [[known.setdefault(one, MARK + len(known)) for one in MARKS.findall(text)] for text in texts]

    placing = PromptImages(
        vision.patching,
        vision.token,
        len(images),
        None,
        vision.whole,
        ends,
        None if marks is None else around,
        work=lambda tokens: 0,
    )
    try:
        placed = placing.place(ids, files)
    finally:
        placing.close()
    return list(placed.token_ids), list(placed.images)


def check_answers(
    theirs: Any,
    given: Mapping[str, Any],
    source: ModelFolder,
    model: Model,
    ids: list[int],
    images: Sequence[PromptImage],
    chunkings: Sequence[tuple[int, ...]],
    rest: int = 1,
) -> None:
    """Check the logits of a prompt and a greedy answer against those of transformers, which takes `given`.

    The prompt is computed at once and in these chunks, then in such of `rest` tokens, with the same bits.
    """
    tokens = torch.tensor([ids])
    greedy = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        expected = theirs(input_ids=tokens, **given).logits[0].log_softmax(dim=-1).numpy()
        answer = theirs.generate(tokens, **given, attention_mask=torch.ones_like(tokens), **greedy)

    program, vision = fuse(model.program), model.vision
    assert vision is not None
    specs = replace(program, ops=(*program.ops, *vision.program.ops)).weights()
    weights = load(plan(specs, under_own_names(specs, source.tensors())))
    size = {"num_blocks": [64] * len(program.cache_groups), "block_size": 16, "num_slots": 1}
    scores = []
    for chunks in ((len(ids),), *chunkings):
        run = Driver(program, ReferenceBackend(program, weights, **size, vision=vision))
        sequence, counts = run.admit(0, ids, images=tuple(images)), chain(chunks, repeat(rest))
        while len(sequence.tokens) < len(ids) + 16:
            run.step((sequence, min(next(counts), len(sequence.tokens) - sequence.computed)))
        assert sequence.tokens == answer[0].tolist()
        scores.append(sequence.scores())
    assert all(one == scores[0] for one in scores), "chunks change bits"
    for position in range(1, len(ids)):
        apart = [one.logprob - expected[position - 1][one.token_id] for one in scores[0][position]]
        assert np.abs(apart).max() < 1e-4, position
