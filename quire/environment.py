"""The environment of the process: the only module that reads it, or changes it."""

from __future__ import annotations

import os
from pathlib import Path

from quire.errors import ConfigError

_KEYS = ("OPENAI_API_KEY", "QUIRE_API_KEY")  # of clients


def api_keys(key_file: str | None) -> tuple[str, ...]:
    """Return the keys in QUIRE_API_KEY and in a file with one per line. Raises ConfigError if it has none."""
    keys = [os.environ.get("QUIRE_API_KEY", "").strip()]
    if key_file is not None:
        try:
            lines = user_path(key_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file {key_file!r} cannot be read: {error}") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"api_key_file {key_file!r} contains no key", "write one key per line")
        keys += found
    return tuple(dict.fromkeys(key for key in keys if key))


def client_key() -> str:
    """Return the API key for requests to a server: OPENAI_API_KEY, or QUIRE_API_KEY, or nothing."""
    return next((key for name in _KEYS if (key := os.environ.get(name, "").strip())), "")


def hand_down(variables: dict[str, str]) -> None:
    """Set variables of the environment for the processes that a library starts."""
    os.environ.update(variables)


def hub_offline() -> bool:
    """Return True if network access is disabled (HF_HUB_OFFLINE=1 or QUIRE_OFFLINE=1)."""
    names = ("HF_HUB_OFFLINE", "QUIRE_OFFLINE")
    return any(os.environ.get(name, "") in ("1", "true", "TRUE") for name in names)


def instruction_set() -> str | None:
    """Return the instruction set requested by QUIRE_ISA, or None for the best available."""
    return os.environ.get("QUIRE_ISA") or None


def cache_folder() -> Path:
    """Return the directory for files that can be recreated: QUIRE_CACHE_DIR, or the XDG cache directory."""
    if chosen := os.environ.get("QUIRE_CACHE_DIR"):
        return user_path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else home_folder() / ".cache") / "quire"


def home_folder() -> Path:
    """Return the user's home; "/", as containers have it, if neither HOME nor the system knows one."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def user_path(name: str) -> Path:
    """Return the path that a user wrote, with a home in place of ~. Raises ConfigError if there is none."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        problem = f"{name}: no home folder of {Path(name).parts[0]} is known"
        raise ConfigError(
            problem, "write the path without ~, or put ./ before a name that begins so"
        ) from None
