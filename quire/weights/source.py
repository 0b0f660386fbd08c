"""The ModelSource protocol: a model in a folder, or in a single file.

Only sources open the files of a model. Each validates what it reads, since the files are untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quire.weights.sentence import SentenceSettings
from quire.weights.tensors import Tensors


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """A tokenizer: its tokenizer.json, the place it was read from, and its settings.

    `content` is the text of that file, or the object that it would hold. `settings` are those of
    tokenizer_config.json: named special tokens, and which are added to texts.
    """

    where: str
    content: bytes | Mapping[str, Any]
    settings: Mapping[str, Any]


class ModelSource(Protocol):
    """One model. Every method raises ConfigError, with the place, for invalid content."""

    @property
    def where(self) -> str:
        """A readable name of the location of the model."""
        ...

    def config(self) -> dict[str, Any]:
        """Return the configuration, under the names of config.json."""
        ...

    def generation_config(self) -> dict[str, Any]:
        """Return the default sampling parameters, under the names of generation_config.json, or {}."""
        ...

    def tokenizer(self) -> TokenizerData | None:
        """Return the tokenizer; None for a model without one, which is served by token ids."""
        ...

    def chat_templates(self) -> dict[str, str]:
        """Return the Jinja sources of the chat templates by name; {} if there are none."""
        ...

    def sentence_settings(self) -> SentenceSettings | None:
        """Return how the model makes embeddings of texts, None if no file says that."""
        ...

    def image_processor(self) -> dict[str, Any]:
        """Return how images are resized, in the terms of preprocessor_config.json; {} if no file says it."""
        ...

    @property
    def has_weights(self) -> bool:
        """True if all weights are present."""
        ...

    def without_weights(self) -> str:
        """Describe what is present instead of weights."""
        ...

    def tensors(self) -> Tensors:
        """Return the weights by name, without reading their data."""
        ...

    def module_tensors(self, folder: str) -> Tensors:
        """Return those of a module that `sentence_settings` names, which has them in a folder of its own."""
        ...


@dataclass(frozen=True, slots=True)
class OverriddenSource:
    """A model with other values for some fields of its configuration; null takes a field away."""

    source: ModelSource
    overrides: Mapping[str, Any]

    @property
    def where(self) -> str:
        return self.source.where

    def config(self) -> dict[str, Any]:
        config = self._changed(self.source.config())
        if isinstance(
            text := config.get("text_config"), Mapping
        ):  # a composite: fields of its text model too
            config["text_config"] = self._changed(text)
        return config

    def _changed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        config = {**config, **self.overrides}
        return {
            name: value for name, value in config.items() if name not in self.overrides or value is not None
        }

    def generation_config(self) -> dict[str, Any]:
        return self.source.generation_config()

    def tokenizer(self) -> TokenizerData | None:
        return self.source.tokenizer()

    def chat_templates(self) -> dict[str, str]:
        return self.source.chat_templates()

    def sentence_settings(self) -> SentenceSettings | None:
        return self.source.sentence_settings()

    def image_processor(self) -> dict[str, Any]:
        return self.source.image_processor()

    @property
    def has_weights(self) -> bool:
        return self.source.has_weights

    def without_weights(self) -> str:
        return self.source.without_weights()

    def tensors(self) -> Tensors:
        return self.source.tensors()

    def module_tensors(self, folder: str) -> Tensors:
        return self.source.module_tensors(folder)
