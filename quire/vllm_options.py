"""Options of vLLM that scripts pass to its LLM and its commands, and what they mean here."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import ConfigError, did_you_mean, quoted

# The values that match what Quire does (None: any value, with a warning in the log), and what to do instead.
VLLM_OPTIONS: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    "dtype": (
        ("auto", None),
        "weights keep their number format; quantization='int8' or 'int4' makes them smaller",
    ),
    "pipeline_parallel_size": ((1,), "layers are not divided among devices; see tensor_parallel_size"),
    "gpu_memory_utilization": (None, "kv_cache_memory_bytes sets the size of the KV cache"),
    "swap_space": (None, "preempted requests are recomputed, not swapped"),
    "cpu_offload_gb": ((0, None), "weights are in CPU memory already"),
    "enforce_eager": ((True, False, None), "there is no compile step"),
    "enable_chunked_prefill": ((True, None), "prompts are always chunked by max_num_batched_tokens"),
    "trust_remote_code": ((True, False), "code in a model's repository is never executed"),
    "load_format": (("auto", "safetensors", "gguf"), "files tell their format"),
    "tokenizer": ((None,), "the tokenizer in the model's folder is used"),
    "tokenizer_mode": (("auto", "fast"), "the tokenizers library reads tokenizer.json"),
    "skip_tokenizer_init": ((False,), "pass token ids and SamplingParams(detokenize=False)"),
    "enable_lora": ((True, False, None), "adapter_dir, a folder of adapters, enables them"),
    "lora_modules": ((None,), "adapter_dir loads each sub-folder of a folder as the adapter of its name"),
    "max_loras": (None, "any number of the adapters that are loaded can be in one batch; see max_adapters"),
    "max_cpu_loras": (None, "adapters are in CPU memory; see max_adapters"),
    "lora_dtype": (("auto", None), "adapters keep their number format"),
    "fully_sharded_loras": ((False,), "adapters are not divided"),
    "runner": (("auto",), "task = 'generate', 'embed' or 'score' says what the model is used for"),
    "convert": (("auto", "none"), "task = 'embed' or 'score' takes vectors or scores of a decoder"),
    "disable_log_stats": ((True, False), "no statistics are logged"),
    "limit_mm_per_prompt": ((), "max_images is the maximum of a request"),
    "mm_processor_kwargs": ((None, {}), "max_image_tokens bounds the size to which images are resized"),
    "media_io_kwargs": ((None, {}), "images are read as RGB, of a film the first"),
    "mm_processor_cache_gb": (None, "what an image became is in the prefix cache"),
    "allowed_media_domains": ((None, [], ()), "nothing is fetched from the network: send images themselves"),
}
# Methods of speculative_config that draft from texts, as "auto" does.
FROM_TEXTS = ("ngram", "[ngram]", "ngram_gpu", "suffix")
OTHER_METHODS = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash", "dspark")
# Fields of speculative_config that change no answer, and what Quire does instead.
_CHOSEN = "Quire chooses the length of each draft by its predicted gain"
_BY_LOAD = "Quire drafts less, or nothing, where other requests need the time"
_LIKE_TARGET = "a draft model has the settings of the model"
_OWN = "it is a detail of vLLM's own drafting"
_UNUSED: dict[str, str] = {
    **dict.fromkeys(("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"), _CHOSEN),
    **dict.fromkeys(("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"), _CHOSEN),
    **dict.fromkeys(("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"), _CHOSEN),
    **dict.fromkeys(("disable_by_batch_size", "num_speculative_tokens_per_batch_size"), _BY_LOAD),
    **dict.fromkeys(("disable_padded_drafter_batch", "disable_logprobs", "enforce_eager"), _OWN),
    **dict.fromkeys(("draft_sample_method", "parallel_drafting"), _OWN),
    **dict.fromkeys(("draft_tensor_parallel_size", "max_model_len", "quantization"), _LIKE_TARGET),
    **dict.fromkeys(("attention_backend", "kv_cache_dtype", "moe_backend"), _LIKE_TARGET),
}
# Fields that would let drafts change the answer, with the values that do not.
_LOSSY: dict[str, tuple[Any, ...]] = {
    "rejection_sample_method": (None, "standard", "block", "strict", "probabilistic"),
    "draft_acceptance_method": (None, "rejection_sampler"),
    "acceptance_method": (None, "rejection_sampler"),
    **dict.fromkeys(("posterior_threshold", "posterior_alpha", "synthetic_acceptance_rate"), (None,)),
    **dict.fromkeys(
        ("typical_acceptance_sampler_posterior_threshold", "synthetic_acceptance_rates"), (None,)
    ),
    "typical_acceptance_sampler_posterior_alpha": (None,),
}
_KNOWN = ("method", "model", "revision", *_UNUSED, *_LOSSY)
_OTHERS = (
    "{'method': 'ngram'} drafts from texts, {'method': 'mtp'} with the prediction layer of the model, "
    "{'method': 'draft_model', 'model': ...} with a smaller model"
)

_LOG = logging.getLogger(__name__)


def check_elsewhere(name: str, value: Any) -> None:
    """Accept a vLLM option that matches what Quire does; raise ConfigError for any other value."""
    harmless, instead = VLLM_OPTIONS[name]
    if harmless is None:
        _LOG.warning("%s has no effect: %s", name, instead)
    elif value not in harmless:
        raise ConfigError(f"{name} = {value!r} is not possible", instead)


def read_overrides(text: str) -> dict[str, Any]:
    """Read the value of `hf_overrides`. Raises ConfigError unless it is a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        example = """give an object: '{"max_position_embeddings": 65536}'"""
        raise ConfigError(f"hf_overrides = {quoted(text)} is not a JSON object", example)
    return found


def max_images_of(limits: Any) -> int | None:
    """Return the value of `max_images` that vLLM's limit_mm_per_prompt asks for, None if it has no images.

    Limits of sound and films are ignored: none are read.
    """
    count = limits.get("image") if isinstance(limits, Mapping) else limits
    count = count.get("count") if isinstance(count, Mapping) else count
    if count is not None and (type(count) is not int or count < 0):
        problem = f"limit_mm_per_prompt = {quoted(limits)} states no number of images"
        raise ConfigError(problem, "max_images = 3 says the same")
    return count


def speculative_of(config: Any) -> str:
    """Return the value of `speculative` that vLLM's speculative_config asks for. Raises ConfigError.

    What would change answers, or needs another kind of draft model, is refused. Fields that set lengths of
    drafts are accepted and logged.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"speculative_config: expected a dict, got {type(config).__name__}",
            "speculative='auto', 'off' or a model's name says the same in one word",
        )
    given = {str(name): value for name, value in config.items() if value is not None}
    for name in given:
        if name not in _KNOWN:
            near = did_you_mean(name, _KNOWN) or "leave it out"
            raise ConfigError(f"speculative_config: unknown field {quoted(name)}", near)
    for name, values in _LOSSY.items():
        if given.get(name) not in values:
            raise ConfigError(
                f"speculative_config: {name} = {quoted(given[name])} would change answers",
                "leave it out: Quire accepts a drafted token only if the model itself samples it",
            )
    chosen = _drafter(given)
    ignored = [name for name in given if name in _UNUSED]
    for reason in dict.fromkeys(_UNUSED[name] for name in ignored):
        names = ", ".join(name for name in ignored if _UNUSED[name] == reason)
        _LOG.warning("speculative_config: no effect of %s: %s", names, reason)
    return chosen


def _drafter(given: Mapping[str, Any]) -> str:
    """Return "auto", or the draft model. Raises ConfigError for a method that is not supported."""
    method, model = given.get("method"), given.get("model")
    if method in FROM_TEXTS or (method is None and model in FROM_TEXTS):
        return "auto"
    if isinstance(method, str) and method.split("_")[-1] == "mtp":  # such as deepseek_mtp, too
        return "mtp"
    if method not in (None, "draft_model"):
        raise ConfigError(f"speculative_config: method {quoted(method)} is not supported", _OTHERS)
    if not isinstance(model, str) or not model:
        missing = "the model" if method else "a method or a model"
        raise ConfigError(f"speculative_config: {missing} is missing", _OTHERS)
    if "revision" in given:
        hint = "download that revision, and name its folder as the model"
        raise ConfigError("speculative_config: a revision of the draft model is not supported", hint)
    return model


# Options of vLLM that say in their own way what an option of Quire says: its name, and how they are read
VLLM_NAMES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "speculative_config": ("speculative", speculative_of),
    "limit_mm_per_prompt": ("max_images", max_images_of),
}
