"""Checkpoints of random weights in the shapes of published models: speed does not depend on the values.

Used by the driver and, to read tensors, by the worker of llama.cpp in its own environment: NumPy only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

CHUNK = 1 << 24  # numbers drawn at a time
END = 256  # the id of the end token, after the 256 bytes
FIRST_WORD = 300  # ids from here on are words without a meaning


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes, or with experts a Qwen3-MoE's. Embedding and output matrix are one."""

    title: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float
    max_positions: int
    experts: int = 0  # of `intermediate` each
    chosen: int = 0  # experts that a token meets

    def layer(self) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "post_attention_layernorm": (self.hidden,),
        }
        mlp = {
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }
        if not self.experts:
            return layer | {f"mlp.{name}": shape for name, shape in mlp.items()}
        layer |= {f"self_attn.{name}": (self.head_dim,) for name in ("q_norm", "k_norm")}
        layer["mlp.gate"] = (self.experts, self.hidden)
        numbered = ((index, name) for index in range(self.experts) for name in mlp)
        return layer | {f"mlp.experts.{index}.{name}": mlp[name] for index, name in numbered}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """All tensors of the checkpoint, in the order of the file."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for index in range(self.layers):
            shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in self.layer().items()}
        return shapes | {"model.norm.weight": (self.hidden,)}

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers that a token is multiplied with."""
        unused = (self.experts - self.chosen) * 3 * self.intermediate * self.hidden
        return self.layers * (sum(math.prod(shape) for shape in self.layer().values()) - unused)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden


SHAPES = {
    "l1b": Shape("Llama 3.2 1B", 2048, 16, 32, 8, 64, 8192, 128_256, 500_000.0, 131_072),
    "s135": Shape("SmolLM2 135M", 576, 30, 9, 3, 64, 1536, 49_152, 100_000.0, 8192),
    "moe": Shape("a Qwen3-MoE", 1024, 16, 16, 4, 64, 512, 32_768, 1_000_000.0, 32_768, experts=48, chosen=8),
}


def make(name: str, work: Path) -> Path:
    """The folder of a checkpoint, written if it is not there. Interrupted writing leaves nothing behind."""
    folder = work / "checkpoints" / name
    if not folder.exists():
        partial = folder.with_name(name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        shape = SHAPES[name]
        _write_json(partial / "config.json", _config(shape))
        _write_tokenizer(partial, shape)
        with (partial / "model.safetensors").open("wb") as file:
            _write_tensors(file, shape)
        partial.rename(folder)
    return folder


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values, as the bits of bf16, of the tensors of a checkpoint."""
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def _write_tensors(file: BinaryIO, shape: Shape) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dims in shape.tensors().items():
        end = offset + 2 * math.prod(dims)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    draw = np.random.default_rng(0)
    for dims in shape.tensors().values():
        if len(dims) == 1:
            file.write(_bf16(np.ones(dims, np.float32)).tobytes())
            continue
        for start in range(0, math.prod(dims), CHUNK):
            count = min(CHUNK, math.prod(dims) - start)
            file.write(_bf16(draw.standard_normal(count, np.float32) * np.float32(0.02)).tobytes())


def _bf16(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest bf16 numbers."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _config(shape: Shape) -> dict[str, object]:
    experts = {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "moe_intermediate_size": shape.intermediate,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return (experts if shape.experts else {}) | {
        "architectures": ["Qwen3MoeForCausalLM" if shape.experts else "LlamaForCausalLM"],
        "model_type": "qwen3_moe" if shape.experts else "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": END,
        "eos_token_id": END,
        "use_cache": True,
    }


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    """Bytes, an end token, and words that no text gives: enough for engines that insist on a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|end|>"]
    words += [f"word{index}" for index in range(len(words), shape.vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|end|>", "eos_token": "<|end|>"}
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
