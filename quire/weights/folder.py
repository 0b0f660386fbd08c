"""A model folder: configuration, tokenizer files and weights, all treated as data.

Code in a model folder (`auto_map` and *.py files) is never run, imported or read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.json_file import read_json
from quire.regular_file import present, read_limited
from quire.weights.formats.registry import open_tensors
from quire.weights.safetensors import INDEX_NAME, PICKLES, Checkpoint, read_index, weight_files
from quire.weights.sentence import SentenceSettings, read_settings
from quire.weights.source import TokenizerData
from quire.weights.templates import read_templates
from quire.weights.tensors import Tensors
from quire.weights.vocabularies.conversations import read_conversation
from quire.weights.vocabularies.files import read_vocabulary
from quire.weights.vocabularies.tekken import TEKKEN, tekken_images

TOKENIZER_LIMIT_BYTES = 128 << 20  # the largest published vocabularies have about 35 MB
_CONFIG_LIMIT_BYTES = 8 << 20  # enough for a config with the ids and labels of a large vocabulary
# Files that say how weights are quantized, where config.json does not, and the format that they are of
_QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": "gptq",
}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on disk: its folder, and its weights (those of the folder, or one named file)."""

    path: Path
    weights: Path

    @property
    def where(self) -> str:
        """The path."""
        return str(self.path)

    @classmethod
    def at(cls, path: Path) -> ModelFolder:
        """Return the model at `path`, a folder or a weights file in it."""
        return cls(path, path) if path.is_dir() else cls(path.parent, path)

    def config(self) -> dict[str, Any]:
        """Read config.json, with the `quantization_config` that a file of its own may have instead.

        Raises ConfigError: missing, too large, not a JSON object.
        """
        path = self.path / "config.json"
        if not present(path):
            problem, hint = f"{path}: no such file", "a model folder holds config.json"
            if present(self.path / "adapter_config.json"):
                hint = "it is an adapter: name its model, and the folder around the adapter in adapter_dir"
            elif self.weights != self.path:
                problem = f"{self.weights}: not a model: there is no config.json beside it"
                hint = "give a model's folder, a file of weights in one, or a GGUF file"
            raise ConfigError(problem, hint)
        config = read_json(path, _CONFIG_LIMIT_BYTES)
        if not config.get("quantization_config") and not config.get("quantization"):
            for name, method in _QUANTIZATION_FILES.items():
                if present(self.path / name):
                    beside = read_json(self.path / name, _CONFIG_LIMIT_BYTES)
                    modelopt = method == "modelopt"
                    stated = beside.get("quantization") if modelopt else beside
                    if isinstance(stated, dict) and (stated.get("quant_algo") if modelopt else stated):
                        config["quantization_config"] = {"quant_method": method, **stated}
                        break
        return config

    def generation_config(self) -> dict[str, Any]:
        """Read generation_config.json; {} if the model has none."""
        path = self.path / "generation_config.json"
        return read_json(path, _CONFIG_LIMIT_BYTES) if present(path) else {}

    def tokenizer(self) -> TokenizerData | None:
        """Read tokenizer.json, else a file that says as much; with tokenizer_config.json over
        special_tokens_map.json. All are optional.
        """
        path, settings = self.path / "tokenizer.json", self._tokenizer_settings()
        if present(path):
            return TokenizerData(str(path), read_limited(path, TOKENIZER_LIMIT_BYTES), settings)
        return read_vocabulary(self.path, settings)

    def _tokenizer_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if present(self.path / name):
                found = read_json(self.path / name)
                settings |= {key: value for key, value in found.items() if value is not None}
        return settings

    def chat_templates(self) -> dict[str, str]:
        """Read chat_template.jinja and additional templates, else those of tokenizer_config.json.

        Without any, a tekken.json implies one.
        """
        return read_templates(self.path) or read_conversation(self.path)

    def sentence_settings(self) -> SentenceSettings | None:
        """Read the settings of sentence-transformers; None if the model has none."""
        return read_settings(self.path)

    def image_processor(self) -> dict[str, Any]:
        """Read that part of processor_config.json, else preprocessor_config.json, else that of tekken.json;
        {} if there is none.

        What is null there is not stated.
        """
        found: Any = None
        if present(path := self.path / "processor_config.json"):
            found = read_json(path, _CONFIG_LIMIT_BYTES).get("image_processor")
        if found is None and present(path := self.path / "preprocessor_config.json"):
            found = read_json(path, _CONFIG_LIMIT_BYTES)
        if found is None and present(path := self.path / TEKKEN):
            found = tekken_images(path)
        stated = found if isinstance(found, dict) else {}
        return {key: value for key, value in stated.items() if value is not None}

    def module_tensors(self, folder: str) -> Tensors:
        """Open the weights of a module that has them in a folder of its own."""
        return Checkpoint.open(self.path / folder)

    @property
    def has_weights(self) -> bool:
        """True if all weight files are present. Without them the model can still be described.

        Raises ConfigError for an index that cannot be read.
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
        """Describe which files are present instead of safetensors weights."""
        kinds = {path.suffix for path in self.path.iterdir()}
        if ".safetensors" in kinds:
            return "not all are here"
        if kinds.intersection(PICKLES):
            return "only pickled files here, which are never opened"
        return "only GGUF here: give the path of the file" if ".gguf" in kinds else "none here"

    def tensors(self) -> Tensors:
        """Open the weights by name, reading only headers, also quantized ones. Raises ConfigError."""
        checkpoint = Checkpoint.open(self.weights)
        return open_tensors(checkpoint, self.config()) if present(self.path / "config.json") else checkpoint
