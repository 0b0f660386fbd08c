"""What the comparisons of images share: pictures, and prompts with them."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from quire.images.prompt import PromptImages, Source
from quire.images.vision import Vision
from quire.types import PromptImage

IMAGE, START, END, BREAK = 250, 252, 253, 254  # tokens


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
    placing = PromptImages(
        vision.patching, vision.token, len(images), None, vision.whole, ends, work=lambda tokens: 0
    )
    try:
        placed = placing.place(ids, files)
    finally:
        placing.close()
    return list(placed.token_ids), list(placed.images)
