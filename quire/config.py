"""Configuration of the engine and the server: the one list behind LLM keywords, CLI flags and config files.

This is also the only module that reads the environment.
"""

from __future__ import annotations

import logging
import math
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
_KEYS = ("OPENAI_API_KEY", "QUIRE_API_KEY")  # of clients

# Options of vLLM's LLM that scripts pass: the values that match what Quire does (None: any value, with a
# warning in the log), and what to do instead.
VLLM_OPTIONS: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    "dtype": (
        ("auto", None),
        "weights keep their number format; quantization='int8' or 'int4' makes them smaller",
    ),
    "tensor_parallel_size": ((1,), "Quire runs on one device; leave it out"),
    "pipeline_parallel_size": ((1,), "Quire runs on one device; leave it out"),
    "gpu_memory_utilization": (None, "kv_cache_memory_bytes sets the size of the KV cache"),
    "swap_space": (None, "preempted requests are recomputed, not swapped"),
    "cpu_offload_gb": ((0, None), "weights are in CPU memory already"),
    "enforce_eager": ((True, False, None), "there is no compile step"),
    "enable_chunked_prefill": ((True, None), "prompts are always chunked by max_num_batched_tokens"),
    "trust_remote_code": ((True, False), "code in a model's repository is never executed"),
    "load_format": (("auto", "safetensors"), "only safetensors files are read"),
    "tokenizer": ((None,), "the tokenizer in the model's folder is used"),
    "tokenizer_mode": (("auto", "fast"), "the tokenizers library reads tokenizer.json"),
    "skip_tokenizer_init": ((False,), "pass token ids and SamplingParams(detokenize=False)"),
    "disable_log_stats": ((True, False), "no statistics are logged"),
}

_LOG = logging.getLogger(__name__)


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Configuration of an engine. Frozen: values chosen while loading are kept elsewhere."""

    model: str = _option("demo", "checkpoint folder, Hugging Face Hub id, or 'demo' for the embedded model")
    revision: str | None = _option(None, "branch, tag or commit of a Hub model")
    quantization: str | None = _option(
        None,
        "quantize weights to this format while loading",
        unset="weights as stored",
        choices=QUANTIZATIONS,
    )
    max_model_len: int | None = _option(
        None,
        "maximum tokens per request, prompt and output together",
        unset="the model's context length",
        low=1,
    )
    max_num_seqs: int = _option(64, "maximum sequences computed together", low=1, high=65536)
    max_num_batched_tokens: int = _option(512, "maximum tokens per step", low=1, high=1 << 20)
    max_num_prefill_tokens: int | None = _option(
        None, "maximum prefill tokens per step while other requests decode", unset="no limit", low=1
    )
    itl_goal: float | None = _option(
        None,
        "seconds that may pass between two tokens of a sequence in 99 of 100 cases: prompts are computed in "
        "chunks, and sequences together, as that allows",
        unset="no goal",
        duration=True,
    )
    max_steps_in_flight: int | None = _option(
        None,
        "steps planned and launched before the results of the first are processed; 2 hides the time that "
        "Python takes between steps",
        unset="1",
        low=1,
        high=2,
    )
    block_size: int = _option(16, "tokens per block of the KV cache", choices=BLOCK_SIZES)
    kv_cache_dtype: str = _option(
        "auto", "number format of the KV cache; auto takes the model's", choices=KV_CACHE_DTYPES
    )
    kv_cache_memory_bytes: int | None = _option(
        None,
        "size of the KV cache",
        unset="enough for max_num_seqs requests of up to 8,192 tokens and for one of max_model_len, within "
        "half of the remaining memory, or 9/10 for that one",
        low=1,
    )
    enable_prefix_caching: bool = _option(True, "reuse the KV cache of prompts with a common prefix")
    scheduling_policy: str = _option(
        "fcfs",
        "order in which waiting requests start: first come first served, by priority, or fair between "
        "tenants",
        choices=POLICIES,
    )
    num_threads: int | None = _option(
        None,
        "compute threads, each pinned to a core; the reference backend uses one",
        unset="one per available core",
        low=1,
        high=1024,
    )
    packed_cache: bool = _option(
        True, "keep packed quantized weights in the user's cache directory, for faster starts"
    )
    seed: int = _option(0, "seed for requests without one", low=0, high=(1 << 63) - 1)
    device: str = _option(
        "auto",
        "backend: 'native' (C++, selected by auto), 'reference' (NumPy) or 'null' (counts operations only)",
        choices=DEVICES,
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            check_value(f, getattr(self, f.name))

    @classmethod
    def from_keywords(cls, **keywords: Any) -> EngineConfig:
        """Build from keywords. Raises ConfigError for an unknown one, suggesting the nearest name."""
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
    """Configuration of the HTTP server. It never contains API keys."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 listens on every network interface")
    port: int = _option(8000, "port to listen on; 0 picks a free one", low=0, high=65535)
    served_model_name: tuple[str, ...] = _option(
        (),
        "model name that clients may request; '*' in it matches any characters, so 'claude-*' serves every "
        "name with that prefix and '*' every name; repeatable",
        unset="the model's own name",
        many=True,
    )
    api_key_file: str | None = _option(
        None, "file with one API key per line, in addition to the one in QUIRE_API_KEY"
    )
    ssl_certfile: str | None = _option(None, "certificate chain (PEM); enables HTTPS")
    ssl_keyfile: str | None = _option(None, "private key (PEM), unless the certificate file contains it")
    allowed_origins: tuple[str, ...] = _option(
        (), "origin of web pages that may call the server; repeatable", unset="none", many=True
    )
    allowed_hosts: tuple[str, ...] = _option(
        (), "additional host name under which clients may reach the server; repeatable", many=True
    )
    max_queued_requests: int = _option(
        256, "maximum requests waiting for their first token; more are answered with a 503", low=1
    )
    max_queued_tokens: int = _option(1 << 18, "maximum prompt tokens waiting", low=1)
    ttft_goal: float | None = _option(
        None,
        "seconds until the first token of a request; one that would come later is refused with a 503",
        unset="no goal",
        duration=True,
    )
    drain_timeout_s: int = _option(
        30, "seconds that open requests have to finish after SIGTERM", low=0, high=86400
    )
    tool_call_parser: str = _option(
        "auto", "format in which the model writes tool calls; auto detects it from the chat template"
    )
    reasoning_parser: str = _option(
        "auto", "format in which the model marks its reasoning; auto detects it from the chat template"
    )
    log_format: str = _option("text", "format of log lines", choices=LOG_FORMATS)
    log_prompts: bool = _option(False, "log prompts and answers")
    record: str | None = _option(
        None,
        "record the engine's steps in memory, without contents; write incident files to this folder if a "
        "request fails or the engine dies, and on request",
        unset="nothing is recorded",
        metavar="DIR",
    )
    record_contents: bool = _option(
        False, "record prompts and answers as well, so that tokens can be replayed"
    )
    record_max_bytes: int = _option(64 << 20, "maximum memory of the recording", low=1 << 20, high=1 << 30)
    record_max_age: float = _option(3600.0, "maximum age of what is recorded, such as 3600s", duration=True)
    otlp_traces_endpoint: str | None = _option(
        None,
        "URL of an OpenTelemetry collector that receives a span for each request, without prompts and "
        "answers, such as http://127.0.0.1:4318/v1/traces; needs quire[otel]",
        unset="none",
    )
    cache_per_key: bool = _option(
        False, "share cached prompt prefixes only between requests with the same API key"
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            check_value(f, getattr(self, f.name))
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile without ssl_certfile", "give the certificate as well")
        if self.record_contents and self.record is None:
            raise ConfigError("record_contents without record", "name the folder of incident files in record")


def api_keys(key_file: str | None) -> tuple[str, ...]:
    """Return the keys in QUIRE_API_KEY and in a file with one per line. Raises ConfigError if it has none."""
    keys = [os.environ.get("QUIRE_API_KEY", "").strip()]
    if key_file is not None:
        try:
            lines = Path(key_file).expanduser().read_text("utf-8").splitlines()
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


def _check_elsewhere(name: str, value: Any) -> None:
    """Accept a vLLM option that matches what Quire does; raise ConfigError for any other value."""
    harmless, instead = VLLM_OPTIONS[name]
    if harmless is None:
        _LOG.warning("%s has no effect: %s", name, instead)
    elif value not in harmless:
        raise ConfigError(f"{name} = {value!r} is not possible", instead)


def check_value(field: Field[Any], value: Any) -> None:
    """Raise ConfigError unless a value has the type and range of its field."""
    name, default, rule = field.name, field.default, field.metadata
    if value is None and default is None:
        return
    if choices := rule.get("choices"):
        if value not in choices or isinstance(value, bool):
            options = ", ".join(repr(c) for c in choices)
            raise ConfigError(f"{name} = {value!r} is not possible", f"choose one of {options}")
        return
    if rule.get("duration"):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(f"{name} = {value!r} is not a duration", "give seconds, more than 0")
        return
    if rule.get("many"):
        if not isinstance(value, tuple) or not all(isinstance(one, str) and one for one in value):
            raise ConfigError(f"{name} = {value!r}: expected a tuple of non-empty strings")
        return
    kind = bool if isinstance(default, bool) else int if "low" in rule else str
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{name} = {value!r}: expected {kind.__name__}, got {type(value).__name__}")
    low, high = rule.get("low"), rule.get("high")
    if (low is not None and value < low) or (high is not None and value > high):
        bound = f"from {low:,} to {high:,}" if high is not None else f"at least {low:,}"
        raise ConfigError(f"{name} = {value:,} is out of range", f"give a number {bound}")


def hub_offline() -> bool:
    """Return True if network access is disabled (HF_HUB_OFFLINE=1 or QUIRE_OFFLINE=1)."""
    return any(
        os.environ.get(name, "") in ("1", "true", "TRUE") for name in ("HF_HUB_OFFLINE", "QUIRE_OFFLINE")
    )


def instruction_set() -> str | None:
    """Return the instruction set requested by QUIRE_ISA, or None for the best available."""
    return os.environ.get("QUIRE_ISA") or None


def cache_folder() -> Path:
    """Return the directory for files that can be recreated: QUIRE_CACHE_DIR, or the XDG cache directory."""
    if chosen := os.environ.get("QUIRE_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "quire"
