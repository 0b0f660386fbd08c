"""What the comparisons of images share: pictures, and prompts with them."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from quire.images.reader import ImageReader
from quire.images.vision import Vision
from quire.types import PromptImage

IMAGE, START, END = 250, 252, 253  # tokens


def picture(height: int, width: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def prompt(images: list[Image.Image], vision: Vision) -> tuple[list[int], list[PromptImage]]:
    """Return tokens around these images, and them as the sandbox resizes them."""
    reader, ids, found = ImageReader(vision.patching), [1, 2, 3], list[PromptImage]()
    try:
        for image in images:
            file = io.BytesIO()
            image.save(file, "PNG")
            pixels = reader.read(file.getvalue(), "image")
            height, width = pixels.height, pixels.width
            ids.append(START)
            grid = vision.patching.grid(height, width)
            found.append(PromptImage(len(ids), *grid, height, width, pixels.values))
            ids += [vision.token] * found[-1].num_tokens + [END, 7, 8]
    finally:
        reader.close()
    return ids, found
