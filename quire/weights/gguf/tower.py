"""The vision tower of a model in GGUF files, which is in a file beside them (mmproj-F16.gguf): its part of
config.json, and its tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.weights.gguf.changes import PLAIN, Order
from quire.weights.gguf.choice import towers_by_preference
from quire.weights.gguf.container import GgufFile, TensorHeader
from quire.weights.gguf.keys import Keys
from quire.weights.gguf.tensors import GgufTensor
from quire.weights.gguf.tokens import FileTokens
from quire.weights.gguf.tower_kinds import KINDS, TowerKind, deep_layers

_OF_LAYER = re.compile(r"(v\.(blk|deepstack)\.)(\d{1,4})(\..+)", re.ASCII)
_PAIRED = re.compile(r"v\.blk\.\d{1,4}\.attn_[qk]\.weight", re.ASCII)  # queries and keys
_JOINED = re.compile(r"(v\.blk\.\d{1,4}\.attn_)([qkv])(\.(?:weight|bias))", re.ASCII)
_BOUNDS = (".input_min", ".input_max", ".output_min", ".output_max")  # of what a matrix takes and gives
_SOUND = ("a.", "mm.a.")  # begin the names of tensors for sound, which is not computed
_SECOND_FRAME = "v.patch_embd.weight.1"
_EXCHANGED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


@dataclass(frozen=True, slots=True)
class Tower:
    """The vision tower in a file, for the text model with the metadata `text` and these tokens."""

    file: GgufFile
    kind: TowerKind
    keys: Keys
    text: Keys
    tokens: FileTokens

    def config(self, text: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration of the whole model, with that of its text model."""
        fields = self.kind.fields(self.keys, self.text)
        if sections := self.text.metadata.numbers(f"{self.text.prefix}.rope.dimension_sections"):
            scaling = text.get("rope_scaling") or {"rope_type": "default"}
            text = {**text, "rope_scaling": {**scaling, "mrope_section": sections[:3]}}
        return {
            **{name: text[name] for name in ("tie_word_embeddings", "eos_token_id") if name in text},
            "architectures": [self.kind.composites[self.text.prefix]],
            **fields,
            "image_token_id": self.tokens.vocabulary[self.kind.token],
            "text_config": {**text, **fields["text_config"]},
        }

    def processor(self) -> dict[str, Any]:
        """Return how images are resized, in the terms of preprocessor_config.json."""
        metadata, prefix = self.keys.metadata, self.keys.prefix
        stated = {
            **{f"{end}_pixels": self.keys.optional_size(f"image_{end}_pixels") for end in ("min", "max")},
            **{name: metadata.numbers(f"{prefix}.{name}") for name in ("image_mean", "image_std")},
        }
        known = {name: value for name, value in stated.items() if value}
        return {"do_resize": True, **self.kind.processor(self.keys), **known}

    def tensors(self) -> dict[str, GgufTensor]:
        """Return the tensors by their names in the model; unknown ones keep theirs."""
        found = dict[str, GgufTensor]()
        for header in self.file.tensors.values():
            joined = _JOINED.fullmatch(header.name) if "v.blk.*.attn_qkv" in self.kind.names else None
            if joined:  # to one matrix in the model
                if joined[2] == "q":
                    name = self._named(f"{joined[1]}qkv{joined[3]}")
                    found[name] = self._like(header, *(f"{joined[1]}{part}{joined[3]}" for part in "kv"))
            elif not header.name.startswith(_SOUND) and header.name not in (_SECOND_FRAME, *self.kind.unused):
                found[self._named(header.name)] = self._tensor(header)
        return found

    def _named(self, name: str) -> str:
        plain, number = name, ""
        if found := _OF_LAYER.fullmatch(name):
            plain, number = f"{found[1]}*{found[4]}", found[3]
            if found[2] == "deepstack" and (deep := deep_layers(self.keys)).count(int(number)):
                number = str(deep.index(int(number)))
        if self._is_exchanged:
            plain = re.sub("ffn_up|ffn_down", lambda part: _EXCHANGED[part[0]], plain)
        if (whole := self.kind.names.get(plain)) is None:
            part, _, end = plain.rpartition(".")
            if (module := self.kind.names.get(part)) is None:
                return name
            whole = f"{module.removesuffix('.linear') if plain.endswith(_BOUNDS) else module}.{end}"
        return whole.replace("*", number)

    @property
    def _is_exchanged(self) -> bool:
        """True in files of the first converters, which call each matrix of an MLP as the other one."""
        down, hidden = self.file.tensors.get("v.blk.0.ffn_down.weight"), self.keys.size("embedding_length")
        return down is not None and down.shape[-1] == hidden != down.shape[0]

    def _tensor(self, header: TensorHeader) -> GgufTensor:
        change = self.kind.changes.get(header.name, PLAIN)
        if header.name.endswith(_BOUNDS):
            change = replace(change, form="scalar")
        if self.kind.paired and _PAIRED.fullmatch(header.name):
            change = replace(change, rows=Order(2, outer=self.keys.heads))
        if change.form == "pixels" and len(header.shape) != 4:
            raise ConfigError(f"{self.file.path}: {header.name} is no kernel over pixels: {header.shape}")
        if change.form != "frames":
            return GgufTensor((header,), change=change)
        return replace(self._like(header, _SECOND_FRAME), change=change)

    def _like(self, header: TensorHeader, *names: str) -> GgufTensor:
        """Return a tensor and others of its shape and type as one."""
        parts = [header]
        for name in names:
            other = self.file.tensors.get(name)
            if other is None or other.shape != header.shape or other.type != header.type:
                raise ConfigError(f"{self.file.path}: has no {name} like {header.name}")
            parts.append(other)
        return GgufTensor(tuple(parts))


def _names_in(folder: Path) -> list[str]:
    """Return the names of what is in a folder; none if it cannot be read."""
    try:
        return [found.name for found in folder.iterdir()]
    except OSError:
        return []


def tower_beside(path: Path, text: Keys, tokens: FileTokens | None) -> Tower | None:
    """Return the tower in a file beside that of a model; None if none there is of its kind and width.

    Of several that fit, it is the first by preference. It may be in the folder above, as in repositories that
    have models in folders by their types. Raises ConfigError for a file that cannot be read, if none fits.
    """
    if tokens is None or not any(text.prefix in kind.composites for kind in KINDS.values()):
        return None
    folders = path.absolute().parents[:2]
    names = [towers_by_preference(_names_in(folder)) for folder in folders]
    unreadable: ConfigError | None = None
    for place in (folder / name for folder, found in zip(folders, names, strict=True) for name in found):
        try:
            file = GgufFile.open(place)
        except ConfigError as error:
            hint = f"it may be the vision tower of {path.name}: fetch it again, or move it to read text alone"
            unreadable = unreadable or ConfigError(error.message, hint)
            continue
        keys = Keys(file.metadata, "clip.vision", file.tensors)
        kind = KINDS.get(keys.text("projector_type") or file.metadata.text("clip.projector_type") or "")
        if kind is None or text.prefix not in kind.composites or kind.token not in tokens.vocabulary:
            continue
        last, axis = kind.last
        shape = file.tensors[last].shape if last in file.tensors else ()
        if len(shape) == 2 and shape[axis] == text.size("embedding_length"):
            return Tower(file, kind, keys, text, tokens)
    if unreadable is not None:
        raise unreadable
    return None
