"""The configuration of an engine and of a server, listed once: LLM keywords and CLI flags come from it.

Also the only place that reads the environment.
"""

from __future__ import annotations

import logging
import os
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, did_you_mean

QUANTIZATIONS = ("int8", "int4")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")
DEVICES = ("auto", "native", "reference", "null")
POLICIES = ("fcfs", "priority", "fair")
BLOCK_SIZES = (8, 16, 32, 64)
LOG_FORMATS = ("text", "json")

# Options of vLLM's LLM that scripts pass: the values that ask for what happens here anyway (None: any value,
# named in the log), and what to do instead.
VLLM_OPTIONS: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    "dtype": (("auto", None), "weights keep their number format; quantization='int8' or 'int4' takes less"),
    "tensor_parallel_size": ((1,), "one device computes; leave it out"),
    "pipeline_parallel_size": ((1,), "one device computes; leave it out"),
    "gpu_memory_utilization": (None, "kv_cache_memory_bytes sets the size of the KV cache"),
    "swap_space": (None, "preempted requests are computed again, nothing is swapped"),
    "cpu_offload_gb": ((0, None), "weights lie in the memory of the CPU"),
    "enforce_eager": ((True, False, None), "there is no compile step"),
    "enable_chunked_prefill": ((True, None), "prompts are always chunked by max_num_batched_tokens"),
    "trust_remote_code": ((True, False), "code of a model's repository is never run, nor needed"),
    "load_format": (("auto", "safetensors"), "weights are read from safetensors"),
    "tokenizer": ((None,), "the tokenizer is the one in the model's folder"),
    "tokenizer_mode": (("auto", "fast"), "tokenizer.json is read by the tokenizers library"),
    "skip_tokenizer_init": ((False,), "give token ids and SamplingParams(detokenize=False)"),
    "disable_log_stats": ((True, False), "nothing is logged"),
}

_LOG = logging.getLogger(__name__)


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
    max_num_prefill_tokens: int | None = _option(
        None, "tokens of prompts in a step in which others generate, at most (default: all)", low=1
    )
    max_steps_in_flight: int | None = _option(
        None,
        "steps planned and launched before the results of the first are taken in (default: 1); 2 spares the "
        "device the wait for Python between steps",
        low=1,
        high=2,
    )
    block_size: int = _option(16, "token positions in one block of the KV cache", choices=BLOCK_SIZES)
    kv_cache_dtype: str = _option("auto", "number format of cached keys and values", choices=KV_CACHE_DTYPES)
    kv_cache_memory_bytes: int | None = _option(
        None,
        "size of the KV cache (default: room for max_num_seqs requests of at most 8,192 tokens and for one "
        "of max_model_len, within half of the memory left, or 9/10 for that one)",
        low=1,
    )
    enable_prefix_caching: bool = _option(True, "share the cache of equal prompt beginnings")
    scheduling_policy: str = _option("fcfs", "who is admitted first when requests wait", choices=POLICIES)
    num_threads: int | None = _option(
        None,
        "threads that compute (default: one for each core the process may use, and each keeps to its own); "
        "the reference takes one",
        low=1,
        high=1024,
    )
    packed_cache: bool = _option(
        True, "keep the packed form of quantized weights in the user's cache directory"
    )
    seed: int = _option(0, "seed for requests that bring none", low=0, high=(1 << 63) - 1)
    device: str = _option(
        "auto",
        "what computes: 'native' (C++, what auto takes), 'reference' (NumPy) or 'null' (counts only)",
        choices=DEVICES,
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            check_value(f, getattr(self, f.name))

    @classmethod
    def from_keywords(cls, **keywords: Any) -> EngineConfig:
        """Build from keywords; an unknown one is an error that suggests the nearest name."""
        known = [f.name for f in fields(cls)]
        own = {name: value for name, value in keywords.items() if name not in VLLM_OPTIONS}
        for name in keywords.keys() - own.keys():
            _check_elsewhere(name, keywords[name])
        for name in own:
            if name not in known:
                hint = did_you_mean(name, known) or f"known options: {', '.join(known)}"
                raise ConfigError(f"unknown option {name!r}", hint)
        return cls(**own)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that decides how the server behaves towards its clients. API keys are never in it."""

    host: str = _option("127.0.0.1", "address to listen at; 0.0.0.0 is every network of this machine")
    port: int = _option(8000, "port to listen at; 0 takes a free one", low=0, high=65535)
    served_model_name: tuple[str, ...] = _option(
        (),
        "name that clients call the model by (default: its own); may be given several times; '*' in it "
        "stands for any characters: 'claude-*' serves every name that begins so, '*' any name",
        many=True,
    )
    api_key_file: str | None = _option(
        None, "file with one API key a line; QUIRE_API_KEY in the environment holds another"
    )
    ssl_certfile: str | None = _option(None, "certificate chain (PEM): the server then speaks HTTPS")
    ssl_keyfile: str | None = _option(None, "private key (PEM), unless the certificate's file holds it")
    allowed_origins: tuple[str, ...] = _option(
        (), "origin of web pages that may call the server (default: none); several times for more", many=True
    )
    allowed_hosts: tuple[str, ...] = _option(
        (), "name by which clients may call this machine beside its own; several times for more", many=True
    )
    max_queued_requests: int = _option(
        256, "requests that wait for their first token at most; more are told to come back", low=1
    )
    max_queued_tokens: int = _option(1 << 18, "prompt tokens that wait at most", low=1)
    drain_timeout_s: int = _option(
        30, "seconds that open requests are given to end after SIGTERM", low=0, high=86400
    )
    tool_call_parser: str = _option("auto", "how the model writes tool calls (auto: found by its template)")
    reasoning_parser: str = _option("auto", "how the model marks its reasoning (auto: found by its template)")
    log_format: str = _option("text", "form of log lines", choices=LOG_FORMATS)
    log_prompts: bool = _option(False, "write prompts and answers to the log")
    cache_per_key: bool = _option(False, "share cached prompt beginnings only within one API key")

    def __post_init__(self) -> None:
        for f in fields(self):
            check_value(f, getattr(self, f.name))
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile without ssl_certfile", "give the certificate, too")


def api_keys(key_file: str | None) -> tuple[str, ...]:
    """The keys of QUIRE_API_KEY and of a file with one a line. Raises ConfigError when the file has none."""
    keys = [os.environ.get("QUIRE_API_KEY", "").strip()]
    if key_file is not None:
        try:
            lines = Path(key_file).expanduser().read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file {key_file!r} cannot be read: {error}") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"api_key_file {key_file!r} holds no key", "write one key a line into it")
        keys += found
    return tuple(dict.fromkeys(key for key in keys if key))


def _check_elsewhere(name: str, value: Any) -> None:
    """Accept a vLLM option that asks for what happens anyway; refuse one that asks for something else."""
    harmless, instead = VLLM_OPTIONS[name]
    if harmless is None:
        _LOG.warning("%s has no effect: %s", name, instead)
    elif value not in harmless:
        raise ConfigError(f"{name} = {value!r} is not possible", instead)


def check_value(field: Field[Any], value: Any) -> None:
    """Raise ConfigError unless `value` has the type and lies in the range that the field states."""
    name, default, rule = field.name, field.default, field.metadata
    if value is None and default is None:
        return
    if choices := rule.get("choices"):
        if value not in choices or isinstance(value, bool):
            options = ", ".join(repr(c) for c in choices)
            raise ConfigError(f"{name} = {value!r} is not possible", f"choose one of {options}")
        return
    if rule.get("many"):
        if not isinstance(value, tuple) or not all(isinstance(one, str) and one for one in value):
            raise ConfigError(f"{name} = {value!r}: expected a tuple of strings that are not empty")
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


def instruction_set() -> str | None:
    """The instruction set whose kernels the user asked for (QUIRE_ISA), or None for the best."""
    return os.environ.get("QUIRE_ISA") or None


def cache_folder() -> Path:
    """Where files of the user that can be made again are kept: QUIRE_CACHE_DIR, or as the system has it."""
    if chosen := os.environ.get("QUIRE_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "quire"
