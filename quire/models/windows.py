"""Rules by which layers have a sliding window, where config.json does not list their types."""

from __future__ import annotations

from quire.models.config import Fields


def every_other(fields: Fields, layer: int) -> bool:
    return layer % 2 == 0


def all_but_fourth(fields: Fields, layer: int) -> bool:
    return (layer + 1) % 4 != 0


def all_but_fourth_from_first(fields: Fields, layer: int) -> bool:
    return layer % 4 != 0


def all_but_sixth(fields: Fields, layer: int) -> bool:
    return (layer + 1) % 6 != 0


def by_pattern(fields: Fields, layer: int) -> bool:
    """Return True for window layers: all but every sliding_window_pattern-th."""
    return (layer + 1) % fields.size("sliding_window_pattern") != 0


def from_max_window_layers(fields: Fields, layer: int) -> bool:
    return fields.get("max_window_layers") == 0 or layer >= fields.size("max_window_layers")


def all_but_stated(fields: Fields, layer: int) -> bool:
    """Return True for window layers: all but every global_attn_every_n_layers-th."""
    return (layer + 1) % fields.size("global_attn_every_n_layers") != 0
