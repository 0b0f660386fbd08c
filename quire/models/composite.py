"""Composite checkpoints: a text model beside towers for images and audio, described by one config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import ConfigError, did_you_mean, quoted
from quire.images.vision import Vision
from quire.models.left_out import VISION
from quire.program import LeftOut

Tower = Callable[
    [Mapping[str, Any], Mapping[str, Any]], Vision
]  # of config.json and preprocessor_config.json
TEXT, _VISION = "text_config", "vision_config"
# Steps that are done for every image, or for none
_ONLY = {"do_resize": True, "do_pan_and_scan": False}
_TIED = "tie_word_embeddings"
# Fields of the whole model, which take precedence over those of the text model
_OF_THE_WHOLE = (_TIED, "eos_token_id")


@dataclass(frozen=True, slots=True)
class Composite:
    """A composite architecture.

    `texts` are the architectures of its text model, by the `model_type` in text_config, the first if there is
    none; that under "" is meant by any other. `tied` is the default of tie_word_embeddings. `left_out` are
    the parts that are not computed, by the fields that describe them. `tower` records the one for images.
    Of a `flat` one, older files have the fields of the text model beside the others. Files of one that is
    `tied_within`, and newer ones of a flat one, may tie its embeddings in text_config.
    """

    texts: Mapping[str, str]
    tied: bool
    left_out: Mapping[str, LeftOut] = field(default_factory=lambda: {_VISION: VISION})
    tower: Tower | None = None
    flat: bool = False
    tied_within: bool = False

    def vision(self, raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision | None:
        """Record the vision tower that config.json describes.

        Return None if there is none that is supported, or no file says how images are resized.
        Raises ConfigError for images that are handled in a way that is not supported.
        """
        stated = raw.get(_VISION)
        if self.tower is None or not isinstance(stated, Mapping) or not processor:
            return None
        for name, done in _ONLY.items():
            if (other := processor.get(name, done)) is not done:
                problem = f"preprocessor_config.json: {name} = {quoted(other)} is not supported"
                hint = f"give {str(done).lower()}, or move the file away: without it the model reads text"
                raise ConfigError(problem, hint)
        return self.tower(raw, processor)

    def parts(self, raw: Mapping[str, Any], vision: Vision | None = None) -> tuple[LeftOut, ...]:
        """Return the parts not computed, each noting whether this config.json describes it."""
        left = {key: part for key, part in self.left_out.items() if vision is None or key != _VISION}
        return tuple(replace(part, stated=raw.get(key) is not None) for key, part in left.items())

    def text(self, raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the text model's architecture and its own config.json. Raises ConfigError if unknown."""
        text = raw if self.flat and TEXT not in raw else raw.get(TEXT)
        if not isinstance(text, Mapping):
            problem = f"config.json: {TEXT} = {quoted(text)} is not an object"
            raise ConfigError(problem, "a composite checkpoint describes its text model there")
        kind = text.get("model_type", next(iter(self.texts)))
        architecture = self.texts.get(str(kind)) or self.texts.get("")
        if architecture is None:
            known = "known are " + ", ".join(sorted(self.texts))
            near = did_you_mean(str(kind), self.texts)
            problem = f"config.json: the text model {quoted(kind)} of {TEXT} is not supported"
            raise ConfigError(problem, f"{near} {known}" if near else known)
        whole = {name: raw[name] for name in _OF_THE_WHOLE if name in raw}
        if (self.flat or self.tied_within) and text.get(_TIED):
            whole[_TIED] = text[_TIED]
        return architecture, {**text, _TIED: self.tied, **whole}
