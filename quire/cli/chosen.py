"""Descriptions of the settings chosen for a model."""

from __future__ import annotations

from collections.abc import Mapping

# Descriptions of LLM.chosen, in this order; other settings follow under their own names
_WORDS = {
    "model": "{}",
    "architecture": "{}",
    "backend": "{} backend",
    "weights": "weights {}",
    "checkpoint": "{}",
    "max_model_len": "context of {} tokens",
    "kv_cache_tokens": "KV cache of {} tokens",
    "kv_cache_dtype": "in {}",
    "kv_cache_memory": "{}",
    "memory": "{} in total",
    "prefix_cache": "blocks kept: {}",
    "drafts": "drafts {}",
    "isa": "{} kernels",
    "num_threads": "{} threads",
    "numa_nodes": "on {} NUMA nodes",
    "unused": "{}",
}


def in_words(chosen: Mapping[str, str]) -> list[str]:
    """Describe each setting in a few words."""
    order = [*(name for name in _WORDS if name in chosen), *(name for name in chosen if name not in _WORDS)]
    words = _WORDS | ({"num_threads": "{} thread"} if chosen.get("num_threads") == "1" else {})
    return [words.get(name, name.replace("_", " ") + " {}").format(chosen[name]) for name in order]
