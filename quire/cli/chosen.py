"""What was chosen for a model, in words."""

from __future__ import annotations

from collections.abc import Mapping

# LLM.chosen in words, in this order; what is not here follows under its own name
_WORDS = {
    "model": "{}",
    "architecture": "{}",
    "backend": "{} backend",
    "weights": "weights {}",
    "max_model_len": "context of {} tokens",
    "kv_cache_tokens": "cache of {} tokens",
    "kv_cache_dtype": "cached as {}",
    "kv_cache_memory": "cached in {}",
    "memory": "{} of memory",
}


def in_words(chosen: Mapping[str, str]) -> list[str]:
    """Each choice as a few words."""
    order = [*(name for name in _WORDS if name in chosen), *(name for name in chosen if name not in _WORDS)]
    return [_WORDS.get(name, name.replace("_", " ") + " {}").format(chosen[name]) for name in order]
