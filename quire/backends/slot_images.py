"""Images of slots: encoded when a row first computes a token of them, and kept until the last of these."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from quire.images.positions import RotaryPositions
from quire.images.vision import Vision
from quire.program.batch import Batch
from quire.types import PromptImage, Row, Step

Kept = TypeVar("Kept")  # how a backend keeps the embeddings [tokens, width] of an image
Given = TypeVar("Given", covariant=True)


class Encoding(NamedTuple):
    """The part of an image that a step encodes: all for a row of `slot`, or up to `share` for none yet (-1).

    If it has `begun`, an earlier step encoded a part of it, and none has encoded another image since.
    """

    slot: int
    image: PromptImage
    share: float
    begun: bool


class TowerRun(Protocol[Given]):
    """A tower that encodes an image."""

    def advance(self, share: float) -> None:
        """Compute until so large a share of the work is done, all if it is 1."""

    def output(self) -> Given:
        """Return the embeddings, when all is done."""
        ...


class SeenTokens(NamedTuple, Generic[Kept]):
    """Tokens of a step that are those of an image, and their rows of its embeddings."""

    tokens: np.ndarray
    embeddings: Kept
    rows: np.ndarray


class UnseenImages:
    """The images of slots that no row has computed a token of, and how steps encode them.

    One image at a time is encoded in parts. Whatever the parts, a row gets all of the images that it needs.
    """

    def __init__(self) -> None:
        self._slots: dict[int, list[PromptImage]] = {}
        self._begun: PromptImage | None = None

    def encodings(self, step: Step) -> list[Encoding]:
        """Return what a step encodes, in order, after what it releases and admits. Steps come in order."""
        self.apply(step)
        taken, found, part = self.take(step.rows), list[Encoding](), step.image_slice
        for slot, image in taken:
            found.append(Encoding(slot, image, 1.0, image == self._begun))
            self._begun = None
        if part is None or (part.end == part.image.work and any(image == part.image for _, image in taken)):
            return found
        found.append(Encoding(-1, part.image, part.end / part.image.work, part.image == self._begun))
        self._begun = part.image
        return found

    def apply(self, step: Step) -> None:
        """Take in which slots a step releases and admits."""
        for slot in step.released:
            self._slots.pop(slot, None)
        for admission in step.admitted:
            if admission.images:
                self._slots[admission.slot] = list(admission.images)

    def take(self, rows: Sequence[Row]) -> list[tuple[int, PromptImage]]:
        """Return the images that rows begin to compute, and the slot of each. None is returned twice."""
        taken = []
        for row in rows if self._slots else ():
            own = self._slots.get(row.slot, [])
            for image in [one for one in own if one.first < row.start + row.count and row.start < one.end]:
                own.remove(image)
                taken.append((row.slot, image))
        return taken


class SlotImages(Generic[Kept]):
    """Gives steps the embeddings of images and the positions of their tokens. `begin` runs the tower."""

    def __init__(self, vision: Vision, begin: Callable[[Batch], TowerRun[Kept]]) -> None:
        self._vision, self._begin = vision, begin
        self._unseen = UnseenImages()
        self._run: TowerRun[Kept] | None = None  # of the image begun last
        self._positions: dict[int, RotaryPositions] = {}  # by slot
        self._embedded: dict[int, list[tuple[PromptImage, Kept]]] = {}
        self.encode_s = 0.0  # of the last step

    def apply(self, step: Step) -> None:
        """Take in which slots a step releases and admits, and encode what it needs of images."""
        for slot in step.released:
            self._positions.pop(slot, None)
            self._embedded.pop(slot, None)
        for admission in step.admitted:
            if admission.images:
                self._positions[admission.slot] = RotaryPositions.of(admission.images)
                self._embedded[admission.slot] = []
        began_s, encodings = time.monotonic(), self._unseen.encodings(step)
        for encoding in encodings:
            self._encode(encoding)
        self.encode_s = time.monotonic() - began_s if encodings else 0.0

    def _encode(self, encoding: Encoding) -> None:
        slot, image, share, begun = encoding
        run, self._run = self._run, None  # what fails begins anew
        if run is None or not begun:
            windows = (
                None if (own := self._vision.windows) is None else own.offsets(image.rows, image.columns)
            )
            run = self._begin(batch_of(patches_of(self._vision, image), image.num_tokens, windows))
        run.advance(share)
        self._run = run
        if slot >= 0:
            self._embedded[slot].append((image, run.output()))

    def seen(self, rows: Sequence[Row], offsets: np.ndarray) -> list[SeenTokens[Kept]]:
        """Return the tokens of images in a step whose rows begin at `offsets`, by image."""
        found = []
        for row, offset in zip(rows, offsets.tolist(), strict=False):
            end = row.start + row.count
            for image, embedded in self._embedded.get(row.slot, ()):
                places = np.arange(max(image.first, row.start), min(image.end, end))
                y, x = np.divmod(places - image.first, image.columns + image.gap)
                own = x < image.columns
                tokens, given = places[own] - row.start + offset, (y * image.columns + x)[own]
                if (windows := self._vision.windows) is not None:
                    given = windows.places(image.rows, image.columns)[given]
                found.append(SeenTokens(tokens, embedded, given))
            if row.slot in self._embedded:
                left = [own for own in self._embedded[row.slot] if own[0].end > end]
                self._embedded[row.slot] = left
        return found

    def visible_ends(self, rows: Sequence[Row]) -> np.ndarray | None:
        """Return the ends of what the tokens of a step see, [T], if it computes images that are whole."""
        whole = [[image for image, _ in self._embedded.get(row.slot, ()) if image.whole] for row in rows]
        if not any(whole):
            return None
        ends = [np.arange(row.start, row.start + row.count) + 1 for row in rows]
        for row, own, images in zip(rows, ends, whole, strict=True):
            for image in images:
                own[image.first - row.start : image.end - row.start] = image.end
        return np.concatenate(ends)

    def positions(self, rows: Sequence[Row]) -> np.ndarray | None:
        """Return the rotary positions of all tokens of a step, [T, 3], if any slot has images."""
        if not any(row.slot in self._positions for row in rows):
            return None
        none = RotaryPositions.of(())
        found = [self._positions.get(row.slot, none) for row in rows]
        return np.concatenate(
            [own.slice(row.start, row.start + row.count) for own, row in zip(found, rows, strict=True)]
        )


def pixels_of(image: PromptImage) -> np.ndarray:
    """Return the pixels of an image, [height, width, 3] uint8."""
    return np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)


def patches_of(vision: Vision, image: PromptImage) -> np.ndarray:
    """Return the patches of an image in the order that its tower takes, [T, columns] float32."""
    found = vision.patching.patches(pixels_of(image))
    if vision.windows is None:
        return found
    by_token = found.reshape(image.num_tokens, -1, found.shape[1])
    return by_token[vision.windows.order(image.rows, image.columns)].reshape(found.shape)


def windows_of(vision: Vision, image: PromptImage) -> tuple[list[int], list[int]]:
    """Return where the windows of an image begin, and its tokens in what the tower gives; or nothing."""
    if vision.windows is None:
        return [], []
    size = image.rows, image.columns
    return vision.windows.offsets(*size).tolist(), vision.windows.places(*size).tolist()


def batch_of(patches: np.ndarray, num_tokens: int, windows: np.ndarray | None = None) -> Batch:
    """Return the batch of an image for its tower, with the offsets of its windows if it has any."""
    count, zero = len(patches), np.zeros(1, np.int64)
    return Batch(
        token_ids=np.zeros(count, np.int64),
        positions=np.arange(count),
        row_offsets=np.array([0, count]),
        block_tables=(),
        context_lens=np.array([count]),
        slots=zero,
        variants=zero,
        logit_rows=np.arange(num_tokens),
        block_size=1,
        patches=patches,
        windows=windows,
    )
