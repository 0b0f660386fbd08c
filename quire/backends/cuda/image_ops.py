"""The ops of images as launches."""

from __future__ import annotations

import numpy as np

from quire.backends.cuda.accelerator import DeviceArray, OfRank
from quire.backends.cuda.image_arrays import ADDRESSES, PATCHES
from quire.backends.cuda.kernels.image_variants import HALVES, TOKEN_BLOCK
from quire.backends.cuda.launch_list import At, LaunchList
from quire.backends.cuda.scratch import carve
from quire.backends.cuda.step_arrays import StepArrays
from quire.errors import ConfigError
from quire.program import ops

TOKEN_PARTS = ((1, np.dtype(np.int32)),)  # of scratch memory: the tokens of which some were replaced


def patches(op: ops.Patches, to: LaunchList) -> None:
    """Record a copy of the patches that a step brings."""
    _copy(op, lambda step: step.texts[PATCHES], to)


def join_rows(op: ops.JoinRows, to: LaunchList) -> None:
    """Record a copy: rows are joined where they lie."""
    _copy(op, to.at(op.x), to)


def _copy(op: ops.Patches | ops.JoinRows, x: At, to: LaunchList) -> None:
    out, count, width = to.at(op.out), op.out.count, op.out.width
    to.add_by_row("take_columns", count, width, lambda step: (out(step), x(step), width, width, 0))


def mixed_rows(op: ops.MixedRows, to: LaunchList) -> None:
    """Record sums of rows of a table."""
    out, places, table = to.at(op.out), to.at(op.places), to.array(op.table)
    number, width = op.places.width // 2, op.out.width
    to.add_by_row("mixed_rows", "T", width, lambda step: (out(step), places(step), table, width, number))


def rotary_at(op: ops.RotaryAt, to: LaunchList) -> None:
    """Record a rotation by places."""
    out, x, places, frequencies = (
        *(to.at(value) for value in (op.out, op.x, op.places)),
        to.constant(op.frequencies()),
    )
    (heads, size), axes = op.x.shape, op.places.width
    half = next((half for half in HALVES if half >= size // 2), None)
    if half is None:
        problem = f"the cuda backend has no kernels for heads of {size} numbers that rotate by place"
        raise ConfigError(problem, f"they have {2 * HALVES[-1]} at most: use device='native'")
    to.add(
        "rotate_at",
        lambda step: (step.counts["T"], 1, 1),
        lambda step: (out(step), x(step), places(step), frequencies, heads, size, axes),
        HALF=half,
    )


def mean_of_rows(op: ops.MeanOfRows, to: LaunchList) -> None:
    """Record means of rows that follow one another."""
    out, x, width = to.at(op.out), to.at(op.x), op.x.width
    to.add_by_row("mean_rows", "L", width, lambda step: (out(step), x(step), width, op.number))


def place_images(op: ops.PlaceImages, to: LaunchList) -> None:
    """Record the embeddings of images in the places of their tokens."""
    out, x, width = to.at(op.out), to.at(op.x), op.x.width
    to.add_by_row(
        "place_images",
        "T",
        width,
        lambda step: (out(step), x(step), OfRank(step.texts[ADDRESSES]), width, op.first, int(op.added)),
    )


def replaced_tokens(replaced: tuple[int, int], to: LaunchList) -> At:
    """Record the token ids of a step with one in place of another; return where in scratch memory."""

    def found(step: StepArrays) -> DeviceArray:
        return carve(step.scratch, step.counts["T"], TOKEN_PARTS)[0]

    to.add(
        "replace_tokens",
        lambda step: (-(-step.counts["T"] // TOKEN_BLOCK), 1, 1),
        lambda step: (found(step), step.token_ids, step.counts["T"], *replaced),
        BLOCK=TOKEN_BLOCK,
    )
    to.rounded = None  # scratch memory is written
    return found


def clip(op: ops.Clip, to: LaunchList) -> None:
    """Record bounds that are weights."""
    _by_weights(op, "clip", to)


def standardize(op: ops.Standardize, to: LaunchList) -> None:
    """Record a difference and a factor that are weights."""
    _by_weights(op, "standardize", to)


def _by_weights(op: ops.Clip | ops.Standardize, kernel: str, to: LaunchList) -> None:
    out, x, weights = to.at(op.out), to.at(op.x), [to.array(spec) for spec in op.weights()]
    width = op.out.width
    to.add_by_row(kernel, op.out.count, width, lambda step: (out(step), x(step), *weights, width))
