"""Images of a prompt: taken out of the messages of callers, and put among its tokens."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import RequestError
from quire.images.patches import Patching
from quire.images.reader import ImageReader, Pixels
from quire.types import PromptImage

Around = Callable[[int, int, int], Sequence[Sequence[int]]]

NO_IMAGES = "this model reads no images"
SEEING = (
    "ask one that sees: it has preprocessor_config.json, or beside a GGUF file that of its vision tower "
    "(mmproj), and max_images is not 0"
)
DIGEST_BYTES = 16
_KINDS = ("image", "image_url")
_HINT = 'give {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'


class Source(NamedTuple):
    """An image as a caller gave it: a URL, or the bytes of a file. `where` names the field of the request."""

    value: str | bytes
    where: str


def image_part(value: str | bytes, where: str) -> dict[str, Any]:
    """Return a part of a message that is an image, for `take_images`."""
    return {"type": "image", "image": Source(value, where)}


def has_images(messages: Sequence[Any]) -> bool:
    """Return True if a part of a message is an image that `take_images` would take."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") in _KINDS for part in parts)


class Placed(NamedTuple):
    """A prompt with images: its token ids, their parts in their places, and the keys of the parts' blocks."""

    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...]
    block_keys: tuple[tuple[int, bytes], ...]


class PromptImages:
    """Reads the images of prompts for a model with this patching; `token` stands for each of their tokens.

    Prompts have at most `most`. `whole` is as in PromptImage, whose `work` is that of an image of so many
    tokens. With `row_ends` one of these follows each row of an image, the other one the last. `around` gives
    the tokens before each part of an image, and those after the last, by rows and columns of tiles and the
    number of parts.
    """

    def __init__(
        self,
        patching: Patching,
        token: int,
        most: int,
        allowed: Path | None = None,
        whole: bool = False,
        row_ends: tuple[int, int] | None = None,
        around: Around | None = None,
        *,
        work: Callable[[int], int],
    ) -> None:
        self._patching, self._token, self._most, self._whole = patching, token, most, whole
        self._work, self._row_ends, self._around = work, row_ends, around or _nothing
        self._reader = ImageReader(patching, allowed)

    def close(self) -> None:
        """End the process that decodes."""
        self._reader.close()

    def place(self, token_ids: Sequence[int], sources: Sequence[Source]) -> Placed:
        """Return a prompt in which each `token` became the tokens of the next image, part by part.

        Raises RequestError for an image that cannot be read, for more than are allowed, and unless the prompt
        has as many of these tokens as images.
        """
        if len(sources) > self._most:
            problem = f"the prompt has {len(sources)} images, and a request may have {self._most}"
            raise RequestError(problem, "send fewer, or raise max_images", sources[self._most].where)
        if (count := sum(one == self._token for one in token_ids)) != len(sources):
            raise RequestError(
                f"the prompt has {count} places for {len(sources)} images",
                "the chat template writes one for each image of a message",
                sources[0].where,
            )
        ids, placed, keys, left = list[int](), list[PromptImage](), list[tuple[int, bytes]](), iter(sources)
        for one in token_ids:
            if one != self._token:
                ids.append(one)
                continue
            read = self._reader.read(*next(left))
            *before, after = self._around(read.rows, read.columns, len(read.parts))
            for text, pixels in zip(before, read.parts, strict=True):
                ids += text
                image = self._image(len(ids), pixels)
                placed.append(image)
                keys.append((image.first, digest(pixels)))
                ids += self._tokens(image)
            ids += after
        return Placed(tuple(ids), tuple(placed), tuple(keys))

    def _image(self, first: int, pixels: Pixels) -> PromptImage:
        height, width, values = pixels.height, pixels.width, pixels.values
        grid = self._patching.grid(height, width)
        work, gap = self._work(grid[0] * grid[1]), 0 if self._row_ends is None else 1
        return PromptImage(first, *grid, height, width, values, self._whole, work, gap)

    def _tokens(self, image: PromptImage) -> list[int]:
        if self._row_ends is None:
            return [self._token] * image.num_tokens
        between, last = self._row_ends
        row = [*[self._token] * image.columns, between]
        return [*(row * image.rows)[:-1], last]


def _nothing(rows: int, columns: int, count: int) -> list[list[int]]:
    return [[]] * (count + 1)


def digest(pixels: Pixels) -> bytes:
    """Identify a part of an image by its size and pixels."""
    size = f"{pixels.height}x{pixels.width}".encode()[:16]
    return hashlib.blake2b(pixels.values, digest_size=DIGEST_BYTES, salt=size).digest()


def take_images(messages: Sequence[Any]) -> tuple[list[Any], list[Source]]:
    """Return messages with bare parts {"type": "image"} in place of their images, and these in order.

    An image is {"type": "image_url", "image_url": {"url": ...}}, as in OpenAI's API, or {"type": "image",
    "image": ...}, as templates name it, with a URL, the bytes of a file, or an image of Pillow. Other parts
    are left as they are. Raises RequestError for a part of an image that has none.
    """
    taken, found = [], list[Source]()
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            places = (f"messages[{number}].content[{at}]" for at in range(len(content)))
            parts = [_taken(part, where, found) for part, where in zip(content, places, strict=True)]
            message = {**message, "content": parts}
        taken.append(message)
    return taken, found


def _taken(part: Any, where: str, found: list[Source]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_url":
        stated = part.get("image_url")
        found.append(
            source(stated.get("url") if isinstance(stated, Mapping) else stated, f"{where}.image_url")
        )
    elif kind == "image":
        found.append(source(part.get("url", part.get("image")), where))
    else:
        return part
    return {"type": "image"}


def given(data: Any) -> list[Source]:
    """Return the images of `multi_modal_data`: {"image": one, or a list of them}. Raises RequestError."""
    where = "multi_modal_data"
    if not isinstance(data, Mapping) or set(data) != {"image"}:
        raise RequestError(f"{where} has no images, or more than images", 'give {"image": [...]}', where)
    images = data["image"]
    listed: Iterable[Any] = images if isinstance(images, list | tuple) else [images]
    return [source(one, where) for one in listed]


def source(value: Any, where: str) -> Source:
    """Return an image as a caller gave it. Raises RequestError for anything else."""
    if isinstance(value, Source):
        return value
    if hasattr(value, "save"):  # of Pillow
        file = io.BytesIO()
        value.convert("RGB").save(file, "PNG")
        value = file.getvalue()
    if not isinstance(value, str | bytes):
        raise RequestError(f"{where} has no image", _HINT, where)
    return Source(value, where)
