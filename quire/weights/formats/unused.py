"""Tensors of quantized checkpoints that Quire does not need: scales of activations and of a KV cache."""

from __future__ import annotations

from quire.weights.formats.raw import RawTensors

_ACTIVATIONS = ("input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "activation_scale")
_CACHE = (
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".k_zero_point",
    ".v_zero_point",
    ".prob_output_scale",
    ".output_scale",
)


def unused_scales(raw: RawTensors) -> frozenset[str]:
    """Return the names of such tensors."""
    return frozenset(name for name in raw if name.endswith((*_ACTIVATIONS, *_CACHE)))


def notes_on(unused: frozenset[str], cache: object = None, rounded: bool = False) -> tuple[str, ...]:
    """Return what to say about tensors that are not used, and about a KV cache format that was asked for.

    `rounded` tells that activations are rounded by Quire.
    """
    notes = []
    if any(name.endswith(_ACTIVATIONS) for name in unused):
        instead = "each row gets scales of its own" if rounded else "activations are not rounded to 8 bits"
        notes.append(f"static scales of activations are not used: {instead}")
    if cache or any(name.endswith(_CACHE) for name in unused):
        notes.append(
            "the KV cache is stored as --kv-cache-dtype says, not in 8 bits with the scales of the checkpoint"
        )
    return tuple(notes)
