"""Configuration of engine and server: the one list behind LLM keywords, CLI flags and config files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quire.config_option import check_value, option
from quire.errors import ConfigError, did_you_mean
from quire.vllm_options import (
    FROM_TEXTS,
    OTHER_METHODS,
    VLLM_NAMES,
    VLLM_OPTIONS,
    check_elsewhere,
    read_overrides,
)

QUANTIZATIONS = ("int8", "int4")
TASKS = ("auto", "generate", "embed", "score")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")
_FLOAT8 = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")  # names of vLLM
DEVICES = ("auto", "native", "cuda", "cuda-interpreted", "reference", "null")
ROLES = ("both", "prefill", "decode")
POLICIES = ("fcfs", "priority", "fair")
BLOCK_SIZES = (8, 16, 32, 64)
STEP_TOKENS = 512  # of a step, unless the operator says otherwise
LOG_FORMATS = ("text", "json")
# What might be given for `speculative` and would be read as the name of a model
NO_DRAFTERS = ("", "true", "false", "on", "none", "no", "yes", *FROM_TEXTS, *OTHER_METHODS)
# Streams wait while a prompt is computed, so a server computes chunks of it that take not much longer than
# their own tokens do.
SERVED_PREFILL_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Configuration of an engine. Frozen: values chosen while loading are kept elsewhere."""

    model: str = option("demo", "checkpoint folder, Hugging Face Hub id, or 'demo' for the embedded model")
    revision: str | None = option(None, "branch, tag or commit of a Hub model")
    hf_overrides: str | None = option(
        None, """fields in place of config.json's, as JSON: '{"rope_theta": 1e6}'""", metavar="JSON"
    )
    task: str = option(
        "auto",
        "use of the model: 'generate' text, 'embed' texts or 'score' pairs of texts; auto takes what its "
        "files say. Texts to embed or score are computed whole: with the default of max_num_batched_tokens "
        "a step then has as many tokens as the model reads, up to 8,192",
        choices=TASKS,
    )
    quantization: str | None = option(
        None,
        "quantize weights to this format while loading",
        unset="weights as stored",
        choices=QUANTIZATIONS,
    )
    max_model_len: int | None = option(
        None,
        "maximum tokens per request, prompt and output together",
        unset="the model's context length",
        low=1,
    )
    max_num_seqs: int = option(64, "maximum sequences computed together", low=1, high=65536)
    max_num_batched_tokens: int = option(STEP_TOKENS, "maximum tokens per step", low=1, high=1 << 20)
    max_num_prefill_tokens: int | None = option(
        None, "maximum prefill tokens per step while other requests decode", unset="no limit", low=1
    )
    itl_goal: float | None = option(
        None,
        "seconds that may pass between two tokens of a sequence in 99 of 100 cases: prompts are computed in "
        "chunks, and sequences together, as that allows",
        unset="no goal",
        duration=True,
    )
    max_steps_in_flight: int | None = option(
        None,
        "steps planned and launched before the results of the first are processed; 2 hides the time that "
        "Python takes between steps",
        unset="1",
        low=1,
        high=2,
    )
    block_size: int = option(16, "tokens per block of the KV cache", choices=BLOCK_SIZES)
    kv_cache_dtype: str = option(
        "auto",
        "number format of the KV cache; auto takes the model's",
        choices=KV_CACHE_DTYPES,
        misread=_FLOAT8,
        instead="choose 'int8': it takes the same memory and changes answers less",
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "size of the KV cache",
        unset="enough for max_num_seqs requests of up to 8,192 tokens and for one of max_model_len, within "
        "half of the remaining memory, or 9/10 for that one",
        low=1,
    )
    enable_prefix_caching: bool = option(True, "reuse the KV cache of prompts with a common prefix")
    prefix_cache_dir: str | None = option(
        None,
        "folder of files in which computed blocks are kept beyond the KV cache, to be found after a restart; "
        "whoever can read the files can infer prompts and answers from them",
        unset="nothing is kept in files",
        metavar="DIR",
    )
    prefix_cache_bytes: int = option(
        10_000_000_000,
        "maximum size of all files in prefix_cache_dir; what was used least recently is removed",
        low=64 << 20,
    )
    prefix_cache_memory_bytes: int | None = option(
        None,
        "memory in which computed blocks are kept beyond the KV cache",
        unset="none",
        low=1 << 20,
    )
    scheduling_policy: str = option(
        "fcfs",
        "order in which waiting requests start: first come first served, by priority, or fair between "
        "tenants",
        choices=POLICIES,
    )
    adapter_dir: str | None = option(
        None,
        "folder of adapters (LoRA, as PEFT saves them): each of its sub-folders is loaded, and requests name "
        "it as their model; adapters are never loaded from elsewhere",
        unset="no adapters",
        metavar="DIR",
    )
    max_images: int = option(
        8,
        "maximum images of a request, for models that see; 0 leaves out what encodes them, to save memory",
        low=0,
        high=256,
    )
    max_image_tokens: int = option(
        1280,
        "maximum tokens of an image: larger ones are resized further than their model asks",
        low=16,
        high=1 << 16,
    )
    allowed_local_media_path: str | None = option(
        None,
        "folder whose files requests may name as images, by file:// URLs",
        unset="no files",
        metavar="DIR",
    )
    max_lora_rank: int = option(64, "maximum rank of an adapter", low=1, high=1024)
    max_adapters: int = option(64, "maximum adapters loaded together", low=1, high=65536)
    num_threads: int | None = option(
        None,
        "compute threads, each pinned to a core; the reference backend uses one",
        unset="one per available core",
        low=1,
        high=1024,
    )
    packed_cache: bool = option(
        True, "keep packed quantized weights in the user's cache directory, for faster starts"
    )
    speculative: str = option(
        "auto",
        "where drafts come from, tokens that one step verifies together; no output changes. 'auto': the text "
        "of each request, earlier answers and grammars, wherever that is predicted to be faster; 'off': "
        "nowhere; also 'mtp': the model's prediction layer; or the name of a model with the same vocabulary "
        "(a folder, a Hub id or 'demo-draft')",
        metavar="{auto,off,mtp,MODEL}",
        misread=NO_DRAFTERS,
        instead="choose 'auto', which drafts from texts, 'off', or the name of a draft model, or 'mtp'",
    )
    seed: int = option(0, "seed for requests without one", low=0, high=(1 << 63) - 1)
    device: str = option(
        "auto",
        "backend: 'native' (C++ on the CPU), 'cuda' (an NVIDIA GPU, untried so far; 'cuda:1' is the second "
        "one; auto selects the first if it passes a check and has kernels and memory for the model, else "
        "'native'), 'reference' (NumPy), 'null' (counts operations only) or, for tests, 'cuda-interpreted' "
        "(the kernels of 'cuda' on the CPU, extremely slow)",
        choices=DEVICES,
        numbered=("cuda",),
    )
    tensor_parallel_size: int = option(
        1,
        "GPUs that compute the model together, 'device' and those after it: each has a part of the weights "
        "and of the KV cache; no output changes",
        low=1,
        high=64,
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            check_value(f, getattr(self, f.name))
        _ = self.overrides  # raises for invalid ones
        kept = self.prefix_cache_dir is not None or self.prefix_cache_memory_bytes is not None
        if kept and not self.enable_prefix_caching:
            raise ConfigError(
                "blocks cannot be kept while enable_prefix_caching is off",
                "leave out prefix_cache_dir and prefix_cache_memory_bytes, or turn it on",
            )

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields of `hf_overrides`. Raises ConfigError unless it is a JSON object."""
        return read_overrides(self.hf_overrides or "{}")

    @property
    def drafts(self) -> str:
        """The sources of drafts in words, without the path of the draft model."""
        if self.speculative == "auto":
            return "from texts and grammars"
        if self.speculative == "off":
            return "off"
        if self.speculative == "mtp":
            return "from texts, grammars and the prediction layer"
        return f"from texts, grammars and {Path(self.speculative).name}"

    @classmethod
    def from_keywords(cls, **keywords: Any) -> EngineConfig:
        """Build from keywords, some of vLLM's among them.

        Raises ConfigError for an unknown one, suggesting the nearest name.
        """
        known = [f.name for f in fields(cls)]
        for theirs, (name, read) in VLLM_NAMES.items():
            if (asked := keywords.pop(theirs, None)) is None:
                continue
            if name in keywords:
                raise ConfigError(f"{name} and {theirs} contradict each other", "give one of them")
            if (value := read(asked)) is not None:
                keywords[name] = value
        if isinstance(overrides := keywords.get("hf_overrides"), Mapping):
            keywords["hf_overrides"] = json.dumps(overrides)
        own = {name: value for name, value in keywords.items() if name not in VLLM_OPTIONS}
        for name in keywords.keys() - own.keys():
            check_elsewhere(name, keywords[name])
        for name in own:
            if name not in known:
                hint = did_you_mean(name, known) or f"known options: {', '.join(known)}"
                raise ConfigError(f"unknown option {name!r}", hint)
        return cls(**own)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Configuration of the HTTP server. It never contains API keys."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 listens on every network interface")
    port: int = option(8000, "port to listen on; 0 picks a free one", low=0, high=65535)
    served_model_name: tuple[str, ...] = option(
        (),
        "model name that clients may request; '*' in it matches any characters, so 'claude-*' serves every "
        "name with that prefix and '*' every name; repeatable",
        unset="the model's own name",
        many=True,
    )
    replicas: int | tuple[int, int] = option(
        1,
        "engines that serve the model, each in a process with its own share of the cores and of the memory; "
        "more than one get requests by a router that knows what each has cached; (MIN, MAX): as "
        "many as are predicted to keep ttft_goal and itl_goal",
        low=1,
        high=1024,
        range=True,
    )
    load_adapters: bool = option(
        False,
        "let clients with an API key load adapters from folders in adapter_dir, and unload them: POST "
        "/v1/load_lora_adapter and /v1/unload_lora_adapter",
    )
    max_loaded_memory: int | None = option(
        None,
        "maximum memory of all loaded models together, such as 12G: the one used least recently is unloaded "
        "for one that is asked for",
        unset="what is free at the start",
        low=1,
        size=True,
    )
    idle_unload: float = option(
        300.0,
        "seconds without a request after which one of several models is unloaded",
        duration=True,
    )
    load_wait: float = option(
        300.0, "seconds that a request waits at most until its model is loaded", duration=True
    )
    page: bool = option(True, "serve the page, a chat and live pictures of the engine's steps, at /")
    api_key_file: str | None = option(
        None, "file with one API key per line, in addition to the one in QUIRE_API_KEY"
    )
    ssl_certfile: str | None = option(None, "certificate chain (PEM); enables HTTPS")
    ssl_keyfile: str | None = option(None, "private key (PEM), unless the certificate file contains it")
    allowed_origins: tuple[str, ...] = option(
        (), "origin of web pages that may call the server; repeatable", unset="none", many=True
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "additional host name under which clients may reach the server; repeatable", many=True
    )
    max_queued_requests: int = option(
        256, "maximum requests waiting for their first token; more are answered with a 503", low=1
    )
    max_queued_tokens: int = option(1 << 18, "maximum prompt tokens waiting", low=1)
    ttft_goal: float | None = option(
        None,
        "seconds until the first token of a request; one that would come later is refused with a 503",
        unset="no goal",
        duration=True,
    )
    drain_timeout_s: int = option(
        30, "seconds that open requests have to finish after SIGTERM", low=0, high=86400
    )
    tool_call_parser: str = option(
        "auto", "format in which the model writes tool calls; auto detects it from the chat template"
    )
    reasoning_parser: str = option(
        "auto", "format in which the model marks its reasoning; auto detects it from the chat template"
    )
    log_format: str = option("text", "format of log lines", choices=LOG_FORMATS)
    log_prompts: bool = option(False, "log prompts and answers")
    record: str | None = option(
        None,
        "record the engine's steps in memory, without contents; write incident files to this folder if a "
        "request fails or the engine dies, and on request",
        unset="nothing is recorded",
        metavar="DIR",
    )
    record_contents: bool = option(
        False, "record prompts and answers as well, so that tokens can be replayed"
    )
    record_max_bytes: int = option(64 << 20, "maximum memory of the recording", low=1 << 20, high=1 << 30)
    record_max_age: float = option(3600.0, "maximum age of what is recorded, such as 3600s", duration=True)
    otlp_traces_endpoint: str | None = option(
        None,
        "URL of an OpenTelemetry collector that receives a span for each request, without prompts and "
        "answers, such as http://127.0.0.1:4318/v1/traces; needs quire[otel]",
        unset="none",
    )
    role: str = option(
        "both",
        "'prefill' also computes prompts for other servers, at --link; 'decode' has long prompts computed by "
        "the servers at --link and generates the answers",
        choices=ROLES,
    )
    link: tuple[str, ...] = option(
        (),
        "address at which a prefill server listens for decode servers: HOST:PORT or, for processes of one "
        "host, unix:PATH; a decode server may have several; prompts pass unencrypted",
        unset="none",
        many=True,
        metavar="ADDRESS",
    )
    link_key_file: str | None = option(
        None, "file with the secret that both ends of a link share, readable by its owner only"
    )
    cache_per_key: bool = option(
        False, "share cached prompt prefixes only between requests with the same API key"
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            check_value(f, getattr(self, f.name))
        self._check_role()
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile without ssl_certfile", "give the certificate as well")
        if self.record_contents and self.record is None:
            raise ConfigError("record_contents without record", "name the folder of incident files in record")

    def _check_role(self) -> None:
        if self.role == "both":
            if self.link or self.link_key_file is not None:
                raise ConfigError("link without role", "give --role prefill or --role decode")
            return
        if not self.link or self.link_key_file is None:
            hint = "for example --link unix:/run/quire/prefill.sock --link-key-file link.key"
            raise ConfigError(f"role {self.role!r} needs an address and a key", hint)
        if self.replicas != 1:
            raise ConfigError(f"role {self.role!r} with several replicas", "start a server for each engine")
        if self.role == "prefill" and len(self.link) > 1:
            raise ConfigError("a prefill server has one link", "decode servers may have several")


def served(given: dict[str, Any]) -> dict[str, Any]:
    """Return fields of EngineConfig as given, with a server's default for chunks of prompts."""
    default = {} if given.get("itl_goal") is not None else {"max_num_prefill_tokens": SERVED_PREFILL_TOKENS}
    return default | given
