"""The chat templates of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import ConfigError, quoted
from quire.json_file import half_characters, read_json
from quire.regular_file import present, read_limited

MAX_TEMPLATE_BYTES = 1 << 20
MAX_TEMPLATES = 64  # of one model
ADDITIONAL = "additional_chat_templates"  # the folder in which transformers writes them


def read_templates(folder: Path) -> dict[str, str]:
    """Read the templates of a checkpoint by name, from all files that may contain them."""
    path = folder / "chat_template.jinja"
    if present(path):
        return {"default": read_template(path)} | {p.stem: read_template(p) for p in _additional(folder)}
    found: Any = None
    for name in ("chat_template.json", "tokenizer_config.json"):
        if found is None and present(folder / name):
            found = read_json(folder / name).get("chat_template")
    if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        named = {str(entry.get("name")): entry.get("template") for entry in found}
        if len(named) < len(found):
            raise ConfigError(f"{folder}: two chat templates have one name", "remove one of them")
        found = named
    templates = found if isinstance(found, dict) else {"default": found} if found not in (None, "") else {}
    _check_number(folder, len(templates))
    for name, source in templates.items():
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE_BYTES or half_characters(source):
            raise ConfigError(f"{folder}: the chat template {quoted(name)} is not a text of at most 1 MiB")
    return templates


def _additional(folder: Path) -> list[Path]:
    """Return the additional templates."""
    beside = folder / ADDITIONAL
    if not present(beside):
        return []
    try:
        found = sorted(path for path in beside.iterdir() if path.suffix == ".jinja")
    except OSError as error:
        raise ConfigError(f"{beside}: cannot be read: {error.strerror}") from None
    _check_number(beside, len(found))
    return found


def _check_number(where: Path, number: int) -> None:
    if number > MAX_TEMPLATES:
        raise ConfigError(f"{where}: {number:,} chat templates are more than {MAX_TEMPLATES}")


def read_template(path: Path) -> str:
    """Read one template. Raises ConfigError: too large, empty, not UTF-8."""
    try:
        if text := read_limited(path, MAX_TEMPLATE_BYTES).decode("utf-8"):
            return text
        raise ConfigError(f"{path}: the file is empty", "fetch it again")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 (byte {error.start:,})", "is it really a chat template?"
        ) from None
