"""The choice of one GGUF model among the files of a repository: by the end of its name, such as Q4_K_M."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.errors import ConfigError, did_you_mean, quoted

_PREFERRED = "Q4_K_M"
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_. -]{0,200}/)?[A-Za-z0-9_][A-Za-z0-9_.+() -]{0,200}", re.ASCII)
_PART = re.compile(r"-(\d{5})-of-(\d{5})$", re.ASCII)
_TOWER, _TOWER_KINDS = "mmproj", ("bf16", "f16", "f32")
_NO_MODEL = re.compile(rf"{_TOWER}|^imatrix|imatrix$")  # before ".gguf", in small letters
_MOST_SHOWN = 8
_ENDING = ".gguf"


def choose_gguf(names: Sequence[str], ending: str | None, where: str) -> list[str]:
    """Return the files of one model, the one to open first.

    `ending` is how the name ends before ".gguf" and the number of a part, in any case: Q4_K_M, or more of the
    name. Without one it is Q4_K_M, or the only model. Raises ConfigError if none fits, or several do.
    """
    models = _models(names)
    if not models:
        raise ConfigError(f"{where}: no GGUF files", "leave out the ending after the colon")
    if ending is None:
        found = _ending_in(_PREFERRED, models) or ([*models] if len(models) == 1 else [])
        problem = f"{len(models)} GGUF models, none of them {_PREFERRED}"
    else:
        found = _ending_in(ending, models)
        problem = f"no GGUF file ends in {quoted(ending)}"
    if len(found) == 1:
        return _whole(found[0], models[found[0]], where)
    if found:
        problem = f"{len(found)} GGUF files end in {quoted(ending or _PREFERRED)}"
        raise ConfigError(f"{where}: {problem}", _among(found))
    near = None if ending is None else did_you_mean(ending, [_last(model) for model in models])
    raise ConfigError(f"{where}: {problem}", " ".join(filter(None, (near, _among([*models])))))


def names_model(file: str) -> bool:
    """Return True for the name of a GGUF file that may hold a language model, by what converters name.

    Others hold projectors for images (X-mmproj-F16.gguf), or statistics for quantization (X.imatrix.gguf).
    """
    stem = file.lower().removesuffix(_ENDING)
    return stem != file.lower() and _NO_MODEL.search(stem) is None


def towers_by_preference(names: Sequence[str]) -> list[str]:
    """Return the files that may hold a vision tower, by their names; those in published precision first."""

    def rank(name: str) -> tuple[int, str]:
        kinds = [number for number, kind in enumerate(_TOWER_KINDS) if kind in name.lower()]
        return min(kinds, default=len(_TOWER_KINDS)), name

    files = (name for name in names if _NAME.fullmatch(name) and name.lower().endswith(_ENDING))
    return sorted((name for name in files if _TOWER in name.rpartition("/")[2].lower()), key=rank)


def _models(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each model, in the order of their parts, by its name without number and ending."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if _NAME.fullmatch(name) and names_model(name.rpartition("/")[2]):
            found.setdefault(_PART.sub("", name[: -len(_ENDING)]), []).append(name)
    return found


def _ending_in(ending: str, models: dict[str, list[str]]) -> list[str]:
    whole = re.compile(rf"(?:^|[-._/]){re.escape(ending.lower())}$")
    return [model for model in models if whole.search(model.lower())]


def _whole(model: str, files: list[str], where: str) -> list[str]:
    """Return the files of a model. Raises ConfigError if parts are missing."""
    numbers = _PART.search(files[0][: -len(_ENDING)])
    if len(files) != (1 if numbers is None else int(numbers[2])):
        raise ConfigError(f"{where}: parts of {quoted(model)} are missing: {len(files)} are there")
    return files


def _last(model: str) -> str:
    return re.split(r"[-./]", model)[-1]


def _among(models: Sequence[str]) -> str:
    more = ", ..." if len(models) > _MOST_SHOWN else ""
    return "give the end of one name after a colon: " + ", ".join(models[:_MOST_SHOWN]) + more
