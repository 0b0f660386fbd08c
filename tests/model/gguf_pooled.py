"""Tiny models for vectors as GGUF files: names, keys and changes as llama.cpp's converters have them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf_converted import in_f32
from gguf_files import write
from safetensors import safe_open

Arrays = dict[str, np.ndarray]
Config = dict[str, Any]
Kinds = Callable[[str, np.ndarray], int]

QWEN3 = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "post_attention_layernorm": "ffn_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_LAYER = re.compile(r"(?:model\.layers)\.(\d+)\.(.+)")


def arrays_of(folder: Path) -> Arrays:
    """The tensors of a folder."""
    with safe_open(folder / "model.safetensors", framework="np") as opened:
        return {name: opened.get_tensor(name).astype(np.float32) for name in opened.keys()}  # noqa: SIM118


def renamed(arrays: Arrays, names: dict[str, str]) -> Arrays:
    """Tensors under the names of a file, and without axes of length 1, which converters drop."""
    found = {}
    for name, array in arrays.items():
        layer = _LAYER.fullmatch(name)
        module, _, suffix = (name if layer is None else layer[2]).rpartition(".")
        place = "" if layer is None else f"blk.{layer[1]}."
        squeezed = array.squeeze() if array.squeeze().ndim else array.reshape(1)
        found[f"{place}{names[module]}.{suffix}"] = squeezed
    return found


def write_decoder_file(
    folder: Path,
    path: Path,
    pooling: int | None,
    *,
    answers: tuple[int, int] | None = None,
    kinds: Kinds = in_f32,
    **more: Any,
) -> Path:
    """Write a decoder of the family of Qwen3; `answers` are the tokens "no" and "yes" of one that ranks."""
    config = json.loads((folder / "config.json").read_text())
    arrays = {
        name if name.startswith(("model.", "lm_head")) else f"model.{name}": array
        for name, array in arrays_of(folder).items()
    }
    tensors = renamed(arrays, QWEN3)
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
        "pooling_type": pooling,
    }
    if answers is not None:
        head = tensors["output.weight" if "output.weight" in tensors else "token_embd.weight"]
        tensors.pop("output.weight", None)
        tensors["cls.output.weight"] = head[[answers[1], answers[0]]]
        keys["classifier.output_labels"] = ["yes", "no"]
    return written("qwen3", keys | more, {"tokenizer.ggml.model": "no_vocab"}, tensors, path, kinds)


def written(
    architecture: str, keys: dict[str, Any], others: dict[str, Any], tensors: Arrays, path: Path, kinds: Kinds
) -> Path:
    """Write a file; None as a value leaves a key out."""
    every = {"general.architecture": architecture, **{f"{architecture}.{key}": v for key, v in keys.items()}}
    metadata = {key: value for key, value in (every | others).items() if value is not None}
    return write(path, metadata, {name: (array, kinds(name, array)) for name, array in tensors.items()})
