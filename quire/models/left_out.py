"""Parts of checkpoints that are not computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quire.models.config import ModelConfig
from quire.program import LeftOut

_PROJECTIONS = (
    "multi_modal_projector.*",
    "mm_projector.*",
    "connector.*",
    "projector.*",
    "mlp_AR.*",
    "resampler_model.*",
)
_TOWERS = ("visual.*", "vision_*.*", "embed_vision.*", *_PROJECTIONS)
_AUDIO = ("audio_tower.*", "embed_audio.*")
_MOST_LATER = 4  # prediction layers after the others

VISION = LeftOut("the vision tower", (*_TOWERS, *(f"model.{name}" for name in _TOWERS)))
AUDIO = LeftOut("the audio tower", (*_AUDIO, *(f"model.{name}" for name in _AUDIO)))
_PREDICTION = "the prediction layer"
_REST = "the rest of the prediction layer"


def mtp(cfg: ModelConfig) -> tuple[LeftOut, ...]:
    """Return the layer that predicts further tokens, where its names begin with mtp."""
    return (LeftOut(_PREDICTION, ("mtp.*", "model.mtp.*"), text_only=False),)


def later_layers(cfg: ModelConfig) -> tuple[LeftOut, ...]:
    """Return the same where it is stored as a layer after the last."""
    last = cfg.num_hidden_layers
    patterns = tuple(f"model.layers.{layer}.*" for layer in range(last, last + _MOST_LATER))
    return (LeftOut(_PREDICTION, patterns, text_only=False),)


def usable(parts: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    """Return the parts of a family whose prediction layer can draft."""
    return tuple(replace(part, use="speculative = 'mtp' drafts with it") for part in parts)


def in_use(parts: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    """Return the parts if the prediction layer drafts: what is left of it then."""
    return tuple(replace(part, part=_REST, use="") if part.part == _PREDICTION else part for part in parts)


def prediction_patterns(parts: Iterable[LeftOut]) -> tuple[str, ...]:
    """Return the patterns of the tensors of a prediction layer."""
    return tuple(pattern for part in parts if part.part == _PREDICTION for pattern in part.patterns)
