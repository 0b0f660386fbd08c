"""The source of a model, wherever it lies: in a folder, or all in one file.

Nobody but the sources opens files of a model. Each checks what it reads: its files were written by strangers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quire.weights.tensors import Tensors


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """A tokenizer: the text of its tokenizer.json, `where` that was read, and the settings beside it.

    `settings` are those of tokenizer_config.json: named special tokens, whether texts begin with one.
    """

    where: str
    text: bytes
    settings: Mapping[str, Any]


class ModelSource(Protocol):
    """One model. Every method raises ConfigError, which says where, for what is there and not in order."""

    @property
    def where(self) -> str:
        """A name of the place of the model, for people."""
        ...

    def config(self) -> dict[str, Any]:
        """Return the configuration, under the names of config.json."""
        ...

    def generation_config(self) -> dict[str, Any]:
        """Return the model's own defaults for sampling, under the names of generation_config.json, or {}."""
        ...

    def tokenizer(self) -> TokenizerData | None:
        """Return the tokenizer; None for a model that has none at all, which is served by token ids."""
        ...

    def chat_templates(self) -> dict[str, str]:
        """Return the Jinja sources of the chat templates by name, {} where there are none."""
        ...

    @property
    def has_weights(self) -> bool:
        """True if all weights are here."""
        ...

    def without_weights(self) -> str:
        """Say for people what there is instead of weights."""
        ...

    def tensors(self) -> Tensors:
        """Return the weights by name; of their data nothing is read yet."""
        ...
