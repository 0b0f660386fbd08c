"""Tiny models for vectors as GGUF files: names, keys and changes as llama.cpp's converters have them."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf_converted import in_f32
from gguf_files import text, write
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
_BERT = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
}
GEMMA = {
    **QWEN3,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Architecture in config.json -> that of the file, and its names
ENCODERS: dict[str, tuple[str, dict[str, str]]] = {
    "Bert": (
        "bert",
        {
            **_BERT,
            "attention.self.query": "attn_q",
            "attention.self.key": "attn_k",
            "attention.self.value": "attn_v",
            "attention.output.dense": "attn_output",
            "attention.output.LayerNorm": "attn_output_norm",
            "intermediate.dense": "ffn_up",
            "output.dense": "ffn_down",
            "output.LayerNorm": "layer_output_norm",
            "classifier.dense": "cls",
            "classifier.out_proj": "cls.output",
        },
    ),
    "DistilBert": (
        "bert",
        {
            **_BERT,
            **{f"attention.{part}_lin": f"attn_{part}" for part in "qkv"},
            "attention.out_lin": "attn_output",
            "sa_layer_norm": "attn_output_norm",
            "ffn.lin1": "ffn_up",
            "ffn.lin2": "ffn_down",
            "output_layer_norm": "layer_output_norm",
            "pre_classifier": "cls",
            "classifier": "cls.output",
        },
    ),
}
ENCODERS["NomicBert"] = (
    "nomic-bert",
    {
        "embeddings.word_embeddings": "token_embd",
        "embeddings.token_type_embeddings": "token_types",
        "emb_ln": "token_embd_norm",
        "attn.Wqkv": "attn_qkv",
        "attn.out_proj": "attn_output",
        "norm1": "attn_output_norm",
        "mlp.fc11": "ffn_up",
        "mlp.fc12": "ffn_gate",
        "mlp.fc2": "ffn_down",
        "norm2": "layer_output_norm",
    },
)
ENCODERS["ModernBert"] = (
    "modern-bert",
    {
        "embeddings.tok_embeddings": "token_embd",
        "embeddings.norm": "token_embd_norm",
        "attn_norm": "attn_norm",
        "attn.Wqkv": "attn_qkv",
        "attn.Wo": "attn_output",
        "mlp_norm": "ffn_norm",
        "mlp.Wi": "ffn_up",
        "mlp.Wo": "ffn_down",
        "final_norm": "output_norm",
    },
)
ENCODERS |= dict.fromkeys(("Roberta", "XLMRoberta", "Camembert"), ENCODERS["Bert"])
_LAYER = re.compile(r"(?:model\.layers|encoder\.layers?|transformer\.layer|layers)\.(\d+)\.(.+)")


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
        **_sizes(config),
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
        "pooling_type": pooling,
    }
    if answers is not None:
        head = tensors["output.weight" if "output.weight" in tensors else "token_embd.weight"]
        tensors.pop("output.weight", None)
        tensors["cls.output.weight"] = head[[answers[1], answers[0]]]
        keys["classifier.output_labels"] = ["yes", "no"]
    return written("qwen3", keys | more, {"tokenizer.ggml.model": "no_vocab"}, tensors, path, kinds)


def write_encoder_file(
    folder: Path, path: Path, pooling: int | None, *, kinds: Kinds = in_f32, **more: Any
) -> Path:
    """Write an encoder of a folder, with its tokenizer; `more` are other keys."""
    config = json.loads((folder / "config.json").read_text())
    family = re.split("Model|For", config["architectures"][0])[0]
    architecture, names = ENCODERS[family]
    arrays = {name: array for name, array in arrays_of(folder).items() if not name.startswith("pooler.")}
    first = config["pad_token_id"] + 1 if family in ("Roberta", "XLMRoberta", "Camembert") else 0
    if (positions := "embeddings.position_embeddings.weight") in arrays:
        arrays[positions] = arrays[positions][first:]

    def stated(*keys: str) -> Any:
        return next(config[key] for key in keys if key in config)

    keys = {
        "context_length": stated("max_trained_positions", "max_position_embeddings") - first,
        "embedding_length": stated("hidden_size", "dim", "n_embd"),
        "block_count": stated("num_hidden_layers", "n_layers", "n_layer"),
        "feed_forward_length": stated("intermediate_size", "hidden_dim", "n_inner"),
        "attention.head_count": stated("num_attention_heads", "n_heads", "n_head"),
        "attention.layer_norm_epsilon": config.get("norm_eps", 1e-12),
        "attention.sliding_window": config.get("local_attention"),
        "attention.sliding_window_pattern": config.get("global_attn_every_n_layers"),
        "hidden_activation": config.get("hidden_activation"),
        "rope.freq_base": config.get("rotary_emb_base"),
        "attention.causal": False,
        "pooling_type": pooling,
    }
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    segments = {"tokenizer.ggml.token_type_count": config.get("type_vocab_size", 1)}
    others = tokens_of(tokenizer, settings) | segments
    return written(architecture, keys | more, others, renamed(arrays, names), path, kinds)


def written(
    architecture: str, keys: dict[str, Any], others: dict[str, Any], tensors: Arrays, path: Path, kinds: Kinds
) -> Path:
    """Write a file; None as a value leaves a key out."""
    every = {"general.architecture": architecture, **{f"{architecture}.{key}": v for key, v in keys.items()}}
    metadata = {key: value for key, value in (every | others).items() if value is not None}
    return write(path, metadata, {name: (array, kinds(name, array)) for name, array in tensors.items()})


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return what the metadata of every decoder state."""
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-6),
    }


def write_gemma_file(folder: Path, path: Path, *, dense: bool = True, **more: Any) -> Path:
    """Write EmbeddingGemma, with its modules after pooling unless they were left out."""
    config = json.loads((folder / "config.json").read_text())
    arrays = {f"model.{name}": array for name, array in arrays_of(folder).items()}
    arrays = {name: array + 1 if "norm" in name else array for name, array in arrays.items()}
    tensors = renamed(arrays, GEMMA)
    keys: dict[str, Any] = {
        **_sizes(config),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": config["sliding_window_pattern"],
        "rope.freq_base": float(config.get("rope_theta", 1e6)),
        "pooling_type": 1,
    }
    for number in (2, 3) if dense else ():
        (array,) = arrays_of(folder / f"{number}_Dense").values()
        tensors[f"dense_{number}.weight"] = array
        keys |= {f"dense_{number}_feat_in": array.shape[1], f"dense_{number}_feat_out": array.shape[0]}
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    others = tokens_of(tokenizer, json.loads((folder / "tokenizer_config.json").read_text()))
    return written("gemma-embedding", keys | more, others, tensors, path, in_f32)


def tokens_of(tokenizer: Config, settings: dict[str, str]) -> dict[str, Any]:
    """The metadata of a tokenizer.json of BERT's kind, or of SentencePiece's Unigram."""
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    vocab = model["vocab"]
    texts = [one for one, _ in vocab] if isinstance(vocab, list) else sorted(vocab, key=vocab.__getitem__)
    control = {entry["id"] for entry in added if entry["special"]}
    found: dict[str, Any] = {}
    if model["type"] == "WordPiece":
        kinds = [3 if number in control else 1 for number in range(len(texts))]
        texts = [
            one if kind == 3 else one.removeprefix("##") if one.startswith("##") else f"\u2581{one}"
            for one, kind in zip(texts, kinds, strict=True)
        ]
        found |= {"model": "bert", "pre": "default", "token_type_count": 2}
    elif model["type"] == "BPE":
        kinds = [3 if number in control else 1 for number in range(len(texts))]
        merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
        found |= {"model": "gpt2", "pre": "roberta-bpe", "merges": strings(merges), "token_type_count": 1}
    else:
        unknown = model["unk_id"]
        kinds = [2 if number == unknown else 3 if number in control else 1 for number in range(len(texts))]
        found |= {"model": "t5", "pre": "default", "scores": [float(score) for _, score in vocab]}
        found |= {"add_space_prefix": True, "remove_extra_whitespaces": True, "token_type_count": 1}
        found |= {"add_bos_token": True, "add_eos_token": True}
        if tokenizer["normalizer"]:
            charsmap = base64.b64decode(tokenizer["normalizer"]["precompiled_charsmap"])
            found["precompiled_charsmap"] = struct.pack("<IIQ", 9, 0, len(charsmap)) + charsmap
    found |= {"tokens": strings(texts), "token_type": kinds}
    named = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
    for name, token in settings.items():
        short = name.removesuffix("_token")
        found[f"{named.get(short, short)}_token_id"] = texts.index(token)
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def strings(texts: list[str]) -> bytes:
    """A list of texts, which may be empty."""
    return struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(text(one) for one in texts)


def charsmap_of(replaced: dict[str, str]) -> bytes:
    """A precompiled_charsmap of these replacements: a double array of the bytes before, and the texts after.

    Each node has a block of 256 units: that of byte c is c further, and its value is at 0.
    """
    units, texts, nodes = [0] * 512, b"", {b"": (0, 256)}
    for before, after in replaced.items():
        key = before.encode()
        for end in range(1, len(key) + 1):
            if key[:end] not in nodes:
                place = nodes[key[: end - 1]][1] + key[end - 1]
                nodes[key[:end]] = (place, len(units))
                units += [0] * 256
                units[place] = key[end - 1] | (place ^ nodes[key[:end]][1]) << 10
        place, block = nodes[key]
        units[place] |= 1 << 8
        units[block] = 1 << 31 | len(texts)
        texts += after.encode() + b"\0"
    units[0] = 256 << 10
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + texts
