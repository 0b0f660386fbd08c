"""A model folder: configuration, tokenizer files and weights beside each other, all of them data.

Code in a model folder (`auto_map` and *.py files) is never run, imported or looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.json_file import read_json
from quire.regular_file import present, read_limited
from quire.weights.safetensors import INDEX_NAME, PICKLES, Checkpoint, read_index, weight_files
from quire.weights.source import TokenizerData
from quire.weights.templates import read_templates

TOKENIZER_LIMIT_BYTES = 128 << 20  # the largest published vocabularies take some 35 MB
_CONFIG_LIMIT_BYTES = 8 << 20  # a config with the ids and labels of a large vocabulary still fits


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Where a model lies: its folder, and the weights in it (the folder, or one file given by name)."""

    path: Path
    weights: Path

    @property
    def where(self) -> str:
        """Its path."""
        return str(self.path)

    @classmethod
    def at(cls, path: Path) -> ModelFolder:
        """`path` is a folder, or a weights file in it."""
        return cls(path, path) if path.is_dir() else cls(path.parent, path)

    def config(self) -> dict[str, Any]:
        """config.json, with the `quantization_config` that may stand in hf_quant_config.json instead.

        Raises ConfigError: missing, too large, not a JSON object.
        """
        path = self.path / "config.json"
        if not present(path):
            raise ConfigError(f"{path}: no such file", "a model folder holds config.json")
        config, beside = read_json(path, _CONFIG_LIMIT_BYTES), self.path / "hf_quant_config.json"
        if not config.get("quantization_config") and present(beside):  # as NVIDIA's ModelOpt writes it
            stated = read_json(beside, _CONFIG_LIMIT_BYTES).get("quantization")
            if isinstance(stated, dict) and (method := stated.get("quant_algo")):
                config["quantization_config"] = {**stated, "quant_method": method}
        return config

    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, or nothing where the model has none."""
        path = self.path / "generation_config.json"
        return read_json(path, _CONFIG_LIMIT_BYTES) if present(path) else {}

    def tokenizer(self) -> TokenizerData | None:
        """tokenizer.json, with tokenizer_config.json over special_tokens_map.json; both are optional."""
        path = self.path / "tokenizer.json"
        if present(path):
            text = read_limited(path, TOKENIZER_LIMIT_BYTES)
            return TokenizerData(str(path), text, self._tokenizer_settings())
        if any(present(self.path / name) for name in ("tokenizer.model", "vocab.json")):
            call = f"AutoTokenizer.from_pretrained({str(self.path)!r}, use_fast=True)"
            hint = f"make one with transformers: {call}.save_pretrained({str(self.path)!r})"
            raise ConfigError(f"{self.path} has no tokenizer.json", hint)
        return None

    def _tokenizer_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if present(self.path / name):
                found = read_json(self.path / name)
                settings |= {key: value for key, value in found.items() if value is not None}
        return settings

    def chat_templates(self) -> dict[str, str]:
        """chat_template.jinja and those beside it, else the templates of tokenizer_config.json."""
        return read_templates(self.path)

    @property
    def has_weights(self) -> bool:
        """Whether all of them are here. What the model is, its small files say without them.

        Raises ConfigError for an index that cannot be read: it is here, and says nothing.
        """
        if self.weights != self.path:
            return present(self.weights)
        try:
            (chosen,) = weight_files([file.name for file in self.path.iterdir()], str(self.path))
        except (ConfigError, OSError):
            return False
        shards = read_index(self.path / chosen).values() if chosen == INDEX_NAME else (chosen,)
        return all(present(self.path / shard) for shard in set(shards))

    def without_weights(self) -> str:
        """Say in words which files are there in place of safetensors weights."""
        kinds = {path.suffix for path in self.path.iterdir()}
        if ".safetensors" in kinds:
            return "not all are here"
        if kinds.intersection(PICKLES):
            return "only pickled files here, which are never opened"
        return "only GGUF here, which is not read yet" if ".gguf" in kinds else "none here"

    def tensors(self) -> Checkpoint:
        """The weights by name; headers only. Raises ConfigError."""
        return Checkpoint.open(self.weights)
