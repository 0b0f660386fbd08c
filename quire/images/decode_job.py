"""The job of the process that decodes images: from a file to pixels of the size that a model takes.

It runs in a sandbox: decoders of pictures are large, and files come from anybody. Nothing is decoded before
the size of the picture is known and allowed.
"""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image, ImageOps

from quire.images.sizes import RULES
from quire.sandbox.job import Job

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
Image.MAX_IMAGE_PIXELS = None  # the limit of the request holds


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Decode one image, the first of a film; resize it, and cut it into parts."""
    data, most = base64.b64decode(request["data"]), request["max_pixels"]
    try:
        opened = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:
        raise ValueError(f"not a picture in one of the formats {', '.join(FORMATS)}") from error
    width, height = opened.size
    if width * height > most:
        raise ValueError(f"a picture of {width} x {height} pixels has more than {most:,}")
    try:
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I;16"):  # of which `convert` would make white all but the darkest shades
            image = image.point(lambda shade: shade / 256)
        image = _on_white(image) if image.has_transparency_data else image.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError("the file of the picture is damaged") from error
    rule, numbers = request["size"]
    size, rows, columns, overview, before, middle, canvas = RULES[rule](*numbers).cut(
        image.height, image.width
    )
    first = image if before is None else _resized(image, before, request["resample"])
    resized = _resized(first, size, request["resample"])
    resized = resized if middle is None else _middle(resized, middle)
    if canvas is not None:
        resized = resized.crop((0, 0, canvas[1], canvas[0]))  # beyond it all is black
    height, width = resized.height // rows, resized.width // columns
    corners = [(x * width, y * height) for y in range(rows) for x in range(columns)]
    parts = [resized.crop((x, y, x + width, y + height)) for x, y in corners]
    if overview is not None:
        whole = image if before is None else resized
        parts.append(_resized(whole, overview, request["resample"]))
    return {"rows": rows, "columns": columns, "parts": [_pixels(part) for part in parts]}


def _resized(image: Image.Image, size: tuple[int, int], resample: Any) -> Image.Image:
    return image.resize((size[1], size[0]), resample)


def _middle(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    top, left = (image.height - size[0]) // 2, (image.width - size[1]) // 2
    return image.crop((left, top, left + size[1], top + size[0]))


def _pixels(image: Image.Image) -> dict[str, Any]:
    pixels = base64.b64encode(image.tobytes()).decode()
    return {"height": image.height, "width": image.width, "pixels": pixels}


def _on_white(image: Image.Image) -> Image.Image:
    """Return an image without its transparency: what lies under that is black mostly, as is much writing."""
    image = image.convert("RGBA")
    found = Image.new("RGB", image.size, "white")
    found.paste(image, mask=image)
    return found


def _describe(error: Exception) -> str:
    if isinstance(error, ValueError):
        return str(error)
    return f"the picture could not be decoded ({type(error).__name__})"


def _warm_up() -> dict[str, Any]:
    """Return a request with a small picture, once the decoders of all formats are loaded."""
    file = io.BytesIO()
    Image.init()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"data": data, "max_pixels": 64, "size": ["OneSquare", [4]], "resample": 3}


JOB = Job(run, _describe, _warm_up())
