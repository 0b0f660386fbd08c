"""The folder that `quire quantize` writes: whole, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quire.cli.quantize_model import Original, width_of
from quire.errors import ConfigError
from quire.json_file import read_json
from quire.memory import gigabytes
from quire.program.program import WeightSpec
from quire.quantize.grid import Grid, Rounded
from quire.regular_file import present
from quire.weights.folder import ModelFolder
from quire.weights.pack_quantized import SAFETENSORS, entries_of, quantization_config, tensors_of
from quire.weights.plan import HEAD, integer_sources
from quire.weights.safetensors_writer import SafetensorsWriter, data_bytes
from quire.weights.sentence import SETTINGS, module_files
from quire.weights.templates import ADDITIONAL
from quire.weights.vocabularies.files import FILES as VOCABULARIES

# Files of a model besides its weights and config.json, copied as they are if they are there.
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "chat_template.jinja", "chat_template.json", "preprocessor_config.json"),
    *("processor_config.json", *VOCABULARIES, *SETTINGS),
    *("LICENSE", "LICENSE.txt", "NOTICE"),
)
_REST_BYTES = 1 << 20  # of config.json, headers and the like


class QuantizedFolder:
    """A folder under construction: `write` every quantized matrix, then `finish`."""

    def __init__(
        self, path: Path, original: Original, specs: Mapping[str, WeightSpec], grids: Mapping[str, Grid]
    ) -> None:
        """Announce every tensor. Raises ConfigError if the disk has not enough space."""
        if not isinstance(original.source, ModelFolder):
            what = f"{original.source.where}: only a folder with safetensors can be quantized"
            raise ConfigError(what, "use the original checkpoint")
        self.path, self._original, self._from = path, original, original.source.path
        self._grids = {source: grids[name] for name, spec in specs.items() for source in spec.sources}
        self._width = {source: width_of(spec) for spec in specs.values() for source in spec.sources}
        entries: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._plain, self._integers = [], integer_sources(original.program.weights())
        for name, tensor in original.tensors.items():
            if name in self._grids:
                entries |= entries_of(self._module(name), tensor.shape, self._grids[name])
            elif name in self._integers:
                entries[original.tensors.name_in_files(name)] = ("I64", tensor.shape)
            elif not self._is_dropped(name):
                entries[original.tensors.name_in_files(name)] = (
                    SAFETENSORS[tensor.storage.kind],
                    tensor.shape,
                )
                self._plain.append(name)
        self.nbytes = data_bytes(entries)
        free = shutil.disk_usage(path).free
        if free < self.nbytes + _REST_BYTES:
            needed = f"{gigabytes(self.nbytes + _REST_BYTES)} are needed and {gigabytes(free)} are free"
            raise ConfigError(
                f"not enough space on the disk of {path.parent}: {needed}",
                "free some, or give another folder",
            )
        self._file = SafetensorsWriter(path / "model.safetensors", entries, {"format": "pt"})

    def _is_dropped(self, name: str) -> bool:
        """Return True for numbers that are no weights, and for a copy of an embedding that is quantized."""
        tied = self._original.model.tied_tensor
        if name == HEAD and tied is not None and tied in self._grids:
            return True
        try:
            return not self._original.tensors[name].storage.is_float
        except ConfigError:  # integers and the like, which no program uses
            return True

    def write(self, source: str, rounded: Rounded) -> None:
        """Write a quantized matrix in place of the tensor `source`."""
        for name, array in tensors_of(self._module(source), rounded).items():
            self._file.write(name, array)

    def finish(self) -> None:
        """Write the weights that are not quantized, and all other files."""
        tensors = self._original.tensors
        for name in self._plain:
            self._file.write(tensors.name_in_files(name), tensors.pull(name).floats())
            tensors.release(name)
        for name in self._integers:
            self._file.write(tensors.name_in_files(name), tensors.integers(name).astype("int64"))
        self._file.close()
        self._write_config()
        for file in (*_FILES, *module_files(self._from)):
            if present(self._from / file):
                (self.path / file).parent.mkdir(exist_ok=True)
                shutil.copyfile(self._from / file, self.path / file)
        if (self._from / ADDITIONAL).is_dir():
            shutil.copytree(self._from / ADDITIONAL, self.path / ADDITIONAL)

    def _write_config(self) -> None:
        config: dict[str, Any] = read_json(self._from / "config.json")
        modules = {self._module(name): (grid, self._width[name]) for name, grid in self._grids.items()}
        products = [op for op in self._original.program if not hasattr(op, "table")]
        used = {s for op in products for w in op.weights() if len(w.shape) > 1 for s in w.sources}
        plain = {self._module(name) for name in used - self._grids.keys()}
        plain |= {self._module(name) for name in self._plain if self._is_matrix_beside(name)}
        if self._original.model.tied_tensor is not None:
            plain.add(HEAD.removesuffix(".weight"))  # a module of its own elsewhere
        config["quantization_config"] = quantization_config(modules, plain)
        (self.path / "config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8"
        )

    def _is_matrix_beside(self, name: str) -> bool:
        """Return True for a matrix of a part that the program leaves out, as a prediction layer."""
        parts = [pattern for part in self._original.program.left_out for pattern in part.patterns]
        matrix = name.endswith(".weight") and len(self._original.tensors[name].shape) == 2
        return matrix and any(fnmatchcase(name, pattern) for pattern in parts)

    def _module(self, source: str) -> str:
        """Return the name in the files of the module that has a matrix."""
        return self._original.tensors.name_in_files(source).removesuffix(".weight")

    def abandon(self) -> None:
        """Close what is open."""
        self._file.close(complete=False)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path` that becomes `path` at the end, and is removed if anything fails.

    Raises ConfigError if `path` exists or cannot be created.
    """
    if present(path):
        raise ConfigError(f"{path} exists already", "give another folder, or remove this one first")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be created: {error.strerror}") from error
    try:
        yield begun
        begun.chmod(0o755)
        _sync(begun)
        if present(path):  # made meanwhile by somebody else
            raise ConfigError(f"{path} exists already", "give another folder, or remove this one first")
        begun.rename(path)
    except BaseException:
        shutil.rmtree(begun, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    """Wait until the files of a folder have reached the disk."""
    for path in folder.rglob("*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
