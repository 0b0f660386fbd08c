"""A model family: its recording function, and how its config.json is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.images.vision import Vision
from quire.models.config import Fields, ModelConfig, Slides
from quire.program import Builder, LeftOut, Names, Value

if TYPE_CHECKING:
    from quire.models.prediction import RecordPrediction

Record = Callable[[Builder, ModelConfig, Names], Value]


@dataclass(frozen=True, slots=True)
class Family:
    """A recording function, and the rules for reading its config.json.

    `defaults` are all keys that are read, with their default values; `spelled` are the family's own names for
    common keys, `older` names of keys that take precedence if config.json has them; `slides` tells which
    layers have the window if `layer_types` is missing; `only` are keys that would change the mathematics in
    unsupported ways, with the values that are accepted; `kinds` are types of layers besides attention,
    `layers` lists those of all layers where the family has its own keys for them;
    `left_out` tells which parts of the checkpoint are not computed, `unused` are patterns of tensors that it
    may have and no part needs; `prediction` records the layer that predicts further tokens; `seeing` records
    a model that takes the embeddings of images.
    """

    record: Record
    defaults: Mapping[str, Any]
    slides: Slides = lambda fields, layer: True
    spelled: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused: Callable[[ModelConfig], tuple[str, ...]] = lambda cfg: ()
    older: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    layers: Callable[[Fields], tuple[str, ...]] | None = None
    left_out: Callable[[ModelConfig], tuple[LeftOut, ...]] = lambda cfg: ()
    prediction: RecordPrediction | None = None
    seeing: Callable[[Builder, ModelConfig, Names, Vision], Value] | None = None
