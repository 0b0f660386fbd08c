"""The one configuration of an engine, listed once: LLM keywords and CLI flags are generated from it.

Also the only place that reads the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, did_you_mean

QUANTIZATIONS = ("int8", "int4")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("auto", "reference", "null")
POLICIES = ("fcfs", "priority", "fair")
BLOCK_SIZES = (8, 16, 32, 64)


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that decides how an engine behaves. Frozen: what is chosen at load is kept elsewhere."""

    model: str = _option("demo", "checkpoint folder, hub id, or 'demo' for the embedded model")
    revision: str | None = _option(None, "branch, tag or commit of a hub model, used for every file")
    quantization: str | None = _option(
        None, "store weights in fewer bits, rounded while loading", choices=QUANTIZATIONS
    )
    max_model_len: int | None = _option(
        None, "longest prompt plus output, in tokens (default: what the model was made for)", low=1
    )
    max_num_seqs: int = _option(64, "requests computed together at most", low=1, high=65536)
    max_num_batched_tokens: int = _option(512, "tokens computed in one step at most", low=1, high=1 << 20)
    block_size: int = _option(16, "token positions in one block of the KV cache", choices=BLOCK_SIZES)
    kv_cache_dtype: str = _option("auto", "number format of cached keys and values", choices=KV_CACHE_DTYPES)
    kv_cache_memory_bytes: int | None = _option(
        None, "size of the KV cache (default: what fits, bounded by what max_num_seqs can use)", low=1
    )
    enable_prefix_caching: bool = _option(True, "share the cache of equal prompt beginnings")
    scheduling_policy: str = _option("fcfs", "who is admitted first when requests wait", choices=POLICIES)
    num_threads: int | None = _option(None, "threads for computing (default: 1)", low=1, high=1024)
    seed: int = _option(0, "seed for requests that bring none", low=0, high=(1 << 63) - 1)
    device: str = _option(
        "auto", "what computes: 'reference' (NumPy) or 'null' (counts only)", choices=DEVICES
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            _check(f.name, getattr(self, f.name), f.default, f.metadata)

    @classmethod
    def from_keywords(cls, **keywords: Any) -> EngineConfig:
        """Build from keywords; an unknown one is an error that suggests the nearest name."""
        known = [f.name for f in fields(cls)]
        for name in keywords:
            if name not in known:
                hint = did_you_mean(name, known) or f"known options: {', '.join(known)}"
                raise ConfigError(f"unknown option {name!r}", hint)
        return cls(**keywords)


def _check(name: str, value: Any, default: Any, rule: Any) -> None:
    """Raise ConfigError unless `value` has the type and lies in the range that the field states."""
    if value is None and default is None:
        return
    if choices := rule.get("choices"):
        if value not in choices or isinstance(value, bool):
            options = ", ".join(repr(c) for c in choices)
            raise ConfigError(f"{name} = {value!r} is not possible", f"choose one of {options}")
        return
    kind = bool if isinstance(default, bool) else int if "low" in rule else str
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{name} = {value!r}: expected {kind.__name__}, got {type(value).__name__}")
    low, high = rule.get("low"), rule.get("high")
    if (low is not None and value < low) or (high is not None and value > high):
        bound = f"from {low:,} to {high:,}" if high is not None else f"at least {low:,}"
        raise ConfigError(f"{name} = {value:,} is out of range", f"give a number {bound}")


def hub_offline() -> bool:
    """True when the user asked for no network (HF_HUB_OFFLINE=1 or QUIRE_OFFLINE=1)."""
    return any(
        os.environ.get(name, "") in ("1", "true", "TRUE") for name in ("HF_HUB_OFFLINE", "QUIRE_OFFLINE")
    )


def cache_dir() -> Path:
    """The user's cache folder for Quire: $QUIRE_CACHE, else $XDG_CACHE_HOME/quire, else ~/.cache/quire."""
    if chosen := os.environ.get("QUIRE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"
