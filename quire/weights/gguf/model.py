"""A model in GGUF files: one, or the parts of a split one."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, quoted
from quire.regular_file import open_regular, present
from quire.weights.gguf.choice import names_model
from quire.weights.gguf.config import config_of, keys_of
from quire.weights.gguf.container import MAGIC, GgufFile
from quire.weights.gguf.names import sizes_of
from quire.weights.gguf.pooling import settings_of
from quire.weights.gguf.tensors import GgufTensors
from quire.weights.gguf.tokenizer import tokenizer_of
from quire.weights.gguf.tokens import FileTokens, end_tokens, read_tokens
from quire.weights.gguf.tower import Tower, tower_beside
from quire.weights.renamed import RenamedTensors
from quire.weights.sentence import SentenceSettings
from quire.weights.source import TokenizerData
from quire.weights.templates import MAX_TEMPLATE_BYTES, MAX_TEMPLATES, read_template
from quire.weights.tensors import Tensors

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.IGNORECASE)
_MAX_PARTS = 1000
_TEMPLATE = "tokenizer.chat_template"
# Sampling defaults: keys of the metadata and of generation_config.json.
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_SAMPLING |= {"penalty_repeat": "repetition_penalty"}


def is_gguf(path: Path) -> bool:
    """Return True for a file with the name of GGUF files, or with their beginning, as in Ollama's store."""
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return True
    try:
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def only_gguf(folder: Path) -> Path | None:
    """Return the GGUF model of a folder that has nothing else; None if it has other weights, or none.

    Raises ConfigError if there are several models to choose from.
    """
    if not folder.is_dir() or present(folder / "config.json") or any(folder.glob("*.safetensors")):
        return None
    found = sorted(path for path in folder.iterdir() if names_model(path.name) and not path.is_dir())
    models = [path for path in found if (part := _PART.fullmatch(path.name)) is None or int(part[2]) == 1]
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:5])
        raise ConfigError(f"{folder} has {len(models)} GGUF models", f"give the path of one: {names}")
    return models[0] if models else found[0] if found else None


class GgufModel:
    """A model in GGUF files, as a source. `path` is the file, or any part of a split one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def where(self) -> str:
        """The path."""
        return str(self.path)

    @cached_property
    def _files(self) -> tuple[GgufFile, ...]:
        """Open the file and its other parts. Raises ConfigError if one is missing or from another model."""
        paths = _parts(self.path)
        files = tuple(GgufFile.open(path) for path in paths)
        names: set[str] = set()
        for number, file in enumerate(files):
            stated = file.metadata.size("split.count", 1, least=0) or 1
            place = file.metadata.size("split.no", 0, least=0)
            if stated != len(files) or place != number:
                says = f"says that it is part {place + 1} of {stated}"
                raise ConfigError(f"{file.path}: {says}, unlike its name", "give the files their first names")
            if twice := names & file.tensors.keys():
                raise ConfigError(f"{file.path}: tensor {quoted(min(twice))} is in another part as well")
            names |= file.tensors.keys()
        expected = files[0].metadata.size("split.tensors.count", len(names))
        if expected != len(names):
            raise ConfigError(f"{self.path}: its parts have {len(names):,} tensors, not {expected:,}")
        return files

    def config(self) -> dict[str, Any]:
        text = config_of(self._files, [] if self._tokens is None else end_tokens(self._tokens))
        return text if self._tower is None else self._tower.config(text)

    @cached_property
    def _tower(self) -> Tower | None:
        keys, _ = keys_of(self._files)
        return tower_beside(self.path, keys, self._tokens)

    def generation_config(self) -> dict[str, Any]:
        metadata = self._files[0].metadata
        found: dict[str, Any] = {}
        for key, name in _SAMPLING.items():
            if (number := metadata.number(f"general.sampling.{key}")) is not None:
                found[name] = int(number) if key == "top_k" else number
        return found

    def tokenizer(self) -> TokenizerData | None:
        return None if self._tokens is None else tokenizer_of(self._tokens)

    @cached_property
    def _tokens(self) -> FileTokens | None:
        return read_tokens(self._files[0].metadata)

    def sentence_settings(self) -> SentenceSettings | None:
        return settings_of(*keys_of(self._files))

    def image_processor(self) -> dict[str, Any]:
        """Return what the file of the vision tower says; {} if there is none."""
        return {} if self._tower is None else self._tower.processor()

    def chat_templates(self) -> dict[str, str]:
        """Return the templates of the metadata, or the one in a file beside: NAME.jinja for NAME.gguf."""
        if present(beside := self.path.with_suffix(".jinja")):
            return {"default": read_template(beside)}
        metadata = self._files[0].metadata
        found: dict[str, str] = {}
        for key in metadata.values:
            if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."):
                source = metadata.text(key) or ""
                if len(source) > MAX_TEMPLATE_BYTES:
                    raise ConfigError(f"{self.path}: {quoted(key)} is longer than 1 MiB")
                found[key.removeprefix(_TEMPLATE).removeprefix(".") or "default"] = source
        if len(found) > MAX_TEMPLATES:
            raise ConfigError(f"{self.path}: {len(found):,} chat templates are more than {MAX_TEMPLATES}")
        return {name: source for name, source in found.items() if source}

    @property
    def has_weights(self) -> bool:
        """True if all parts are present."""
        return all(present(path) for path in _parts(self.path))

    def without_weights(self) -> str:
        return "not all parts are here"

    def tensors(self) -> GgufTensors:
        keys, architecture = keys_of(self._files)
        tower = self._tower
        if tower is not None:
            own = tower.kind.experts.get(keys.prefix, architecture.own)
            architecture = replace(architecture, own=own)
        found = GgufTensors.of(self.where, self._files, architecture, sizes_of(keys, architecture))
        return found if tower is None else found.beside(tower.file, tower.tensors())

    def module_tensors(self, folder: str) -> Tensors:
        """Return those of the whole file that belong to a module."""
        tensors = self.tensors()
        names = {name.removeprefix(f"{folder}."): name for name in tensors if name.startswith(f"{folder}.")}
        return RenamedTensors(tensors, names)


def _parts(path: Path) -> list[Path]:
    """Return the paths of all parts of a model, by the name of one. Raises ConfigError if one is missing."""
    if (found := _PART.fullmatch(path.name)) is None or not 0 < int(found[3]) <= _MAX_PARTS:
        return [path]
    stem, count, ending = found[1], int(found[3]), path.name[-len(MAGIC) - 1 :]
    paths = [path.with_name(f"{stem}-{number:05}-of-{count:05}{ending}") for number in range(1, count + 1)]
    if missing := [part for part in paths if not present(part)]:
        more = f" ({len(missing)} parts are missing)" if len(missing) > 1 else ""
        raise ConfigError(f"{missing[0]}: no such file{more}", "fetch the missing parts of the model")
    return paths
