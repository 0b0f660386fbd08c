"""The ModelSource protocol: a model in a folder, or in a single file.

Only sources open the files of a model. Each validates what it reads, since the files are untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quire.weights.tensors import Tensors


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """A tokenizer: the text of its tokenizer.json, the place it was read from, and its settings.

    `settings` are those of tokenizer_config.json: named special tokens, and which are added to texts.
    """

    where: str
    text: bytes
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
