"""Checkpoints of random weights in the shapes of published models: speed does not depend on the values.

Used by the driver and, to read tensors, by the worker of llama.cpp in its own environment: NumPy only.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

CHUNK = 1 << 24  # numbers drawn at a time
END = 256  # the id of the end token, after the 256 bytes
FIRST_WORD = 300  # ids from here on are words without a meaning
WORK = "~/.cache/quire-peers"


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

    @property
    def cached_numbers(self) -> int:
        """Numbers that all layers cache of a token."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states of a fixed size."""
        return 0

    @property
    def pair_macs(self) -> int:
        """Multiply-adds of all layers for a token that sees another."""
        return self.layers * 2 * self.heads * self.head_dim


@dataclass(frozen=True)
class LatentShape(Shape):
    """The sizes of a GLM-4.7-Flash: latent attention; a dense layer, then experts beside a shared one."""

    query_rank: int = 768
    rank: int = 512
    plain: int = 192  # numbers of a query head that are not rotated
    rotated: int = 64
    values: int = 256
    dense: int = 10_240

    def layer(self) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer with experts."""
        mlp = self._mlp(self.intermediate)
        numbered = ((index, name) for index in range(self.experts) for name in mlp)
        return (
            self._attention()
            | {"mlp.gate": (self.experts, self.hidden)}
            | {f"mlp.experts.{index}.{name}": mlp[name] for index, name in numbered}
            | {f"mlp.shared_experts.{name}": shape for name, shape in mlp.items()}
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """All tensors of the checkpoint, in the order of the file."""
        dense = self._attention() | {f"mlp.{name}": shape for name, shape in self._mlp(self.dense).items()}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for index in range(self.layers):
            layer = self.layer() if index else dense
            shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
            if index:
                shapes[f"model.layers.{index}.mlp.gate.e_score_correction_bias"] = (self.experts,)
        return shapes | {"model.norm.weight": (self.hidden,)}

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers that a token is multiplied with."""
        attention = sum(math.prod(shape) for shape in self._attention().values())
        experts = (self.chosen + 1) * 3 * self.intermediate + self.experts
        return self.layers * attention + self.hidden * (3 * self.dense + (self.layers - 1) * experts)

    @property
    def cached_numbers(self) -> int:
        return self.layers * (self.rank + self.rotated)

    @property
    def pair_macs(self) -> int:
        return self.layers * self.heads * (2 * self.rank + self.rotated)

    def _attention(self) -> dict[str, tuple[int, ...]]:
        heads, width = self.heads, self.plain + self.rotated
        return {
            "input_layernorm": (self.hidden,),
            "self_attn.q_a_proj": (self.query_rank, self.hidden),
            "self_attn.q_a_layernorm": (self.query_rank,),
            "self_attn.q_b_proj": (heads * width, self.query_rank),
            "self_attn.kv_a_proj_with_mqa": (self.rank + self.rotated, self.hidden),
            "self_attn.kv_a_layernorm": (self.rank,),
            "self_attn.kv_b_proj": (heads * (self.plain + self.values), self.rank),
            "self_attn.o_proj": (self.hidden, heads * self.values),
            "post_attention_layernorm": (self.hidden,),
        }

    def _mlp(self, width: int) -> dict[str, tuple[int, ...]]:
        rows, columns = (width, self.hidden), (self.hidden, width)
        return {"gate_proj": rows, "up_proj": rows, "down_proj": columns}

    def config(self) -> dict[str, object]:
        """Return what config.json has instead of a Llama's."""
        return {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "intermediate_size": self.dense,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.rank,
            "qk_nope_head_dim": self.plain,
            "qk_rope_head_dim": self.rotated,
            "v_head_dim": self.values,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.intermediate,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
        }


@dataclass(frozen=True)
class NetShape(Shape):
    """The sizes of a Qwen3.5: every fourth layer has attention, the others a gated delta net."""

    net_heads: int = 16  # of keys, and of values
    net_dim: int = 128
    kernel: int = 4

    def layer(self) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer with attention, whose queries have gates beside them."""
        norms = {f"self_attn.{name}": (self.head_dim,) for name in ("q_norm", "k_norm")}
        queries = {"self_attn.q_proj": (2 * self.heads * self.head_dim, self.hidden)}
        return super().layer() | queries | norms

    def net(self) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer with a net, beside vectors."""
        width = self.net_heads * self.net_dim
        shared = {name: dims for name, dims in self.layer().items() if "self_attn" not in name}
        return shared | {
            "linear_attn.in_proj_qkv": (3 * width, self.hidden),
            "linear_attn.in_proj_z": (width, self.hidden),
            "linear_attn.in_proj_b": (self.net_heads, self.hidden),
            "linear_attn.in_proj_a": (self.net_heads, self.hidden),
            "linear_attn.conv1d": (3 * width, 1, self.kernel),
            "linear_attn.norm": (self.net_dim,),
            "linear_attn.out_proj": (self.hidden, width),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """All tensors of the checkpoint, in the order of the file."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for index in range(self.layers):
            p, has_net = f"model.layers.{index}", (index + 1) % 4 != 0
            layer = self.net() if has_net else self.layer()
            shapes |= {f"{p}.{name}.weight": shape for name, shape in layer.items()}
            if has_net:
                shapes |= {f"{p}.linear_attn.{name}": (self.net_heads,) for name in ("A_log", "dt_bias")}
        return shapes | {"model.norm.weight": (self.hidden,)}

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers that a token is multiplied with."""
        inside = (math.prod(dims) for name, dims in self.tensors().items() if ".layers." in name)
        return sum(inside)

    @property
    def cached_numbers(self) -> int:
        return super().cached_numbers // 4

    @property
    def pair_macs(self) -> int:
        return super().pair_macs // 4

    @property
    def state_bytes(self) -> int:
        """Bytes of the states, float32, of a sequence."""
        return self.layers // 4 * 3 * self.net_heads * self.net_dim**2 * 4

    def config(self) -> dict[str, object]:
        """Return what config.json has instead of a Llama's."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": self.kernel,
            "linear_key_head_dim": self.net_dim,
            "linear_value_head_dim": self.net_dim,
            "linear_num_key_heads": self.net_heads,
            "linear_num_value_heads": self.net_heads,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-6,
        }


SHAPES = {
    "q08": NetShape("Qwen3.5 0.8B", 1024, 24, 8, 2, 256, 3584, 248_320, 1e7, 262_144),
    "l1b": Shape("Llama 3.2 1B", 2048, 16, 32, 8, 64, 8192, 128_256, 500_000.0, 131_072),
    "s135": Shape("SmolLM2 135M", 576, 30, 9, 3, 64, 1536, 49_152, 100_000.0, 8192),
    "moe": Shape("a Qwen3-MoE", 1024, 16, 16, 4, 64, 512, 32_768, 1_000_000.0, 32_768, experts=48, chosen=8),
    "mla": LatentShape(
        "3 layers of GLM-4.7-Flash", 2048, 3, 20, 20, 64, 1536, 32_768, 1e6, 32_768, experts=64, chosen=4
    ),
}

# Draft models, of the vocabulary of another shape.
DRAFTS = {"l1b-draft": Shape("a draft for l1b", 512, 2, 8, 4, 64, 1536, 128_256, 500_000.0, 131_072)}


W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


def add_work_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of the folder in which benchmarks make their models."""
    help_text = f"folder in which models are made (default: {WORK})"
    parser.add_argument("--work", type=_folder, default=WORK, metavar="FOLDER", help=help_text)


def _folder(name: str) -> Path:
    return Path(name).expanduser()


def make(name: str, work: Path) -> Path:
    """The folder of a checkpoint, written if it is not there. Interrupted writing leaves nothing behind."""
    folder = work / "checkpoints" / name
    if not folder.exists():
        partial = folder.with_name(name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        shape = (SHAPES | DRAFTS)[name]
        _write_json(partial / "config.json", _config(shape))
        _write_tokenizer(partial, shape)
        with (partial / "model.safetensors").open("wb") as file:
            _write_tensors(file, shape)
        partial.rename(folder)
    return folder


def rounded(name: str, work: Path) -> Path:
    """The same checkpoint in W8A8, as compressed-tensors has it, but for its embedding, which is its head."""
    plain, folder = make(name, work), work / "checkpoints" / f"{name}-w8a8"
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        shutil.copytree(plain, partial, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        config = json.loads((plain / "config.json").read_text("utf-8"))
        _write_json(partial / "config.json", config | {"quantization_config": W8A8})
        arrays: dict[str, tuple[str, np.ndarray]] = {}
        for tensor, bits in tensors(plain):
            if bits.ndim < 2 or "embed" in tensor:
                arrays[tensor] = "BF16", bits
                continue
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            scales = np.abs(values).max(-1, keepdims=True) / np.float32(127)
            arrays[tensor] = "I8", np.rint(values / scales).astype(np.int8)
            arrays[f"{tensor}_scale"] = "F32", scales
        with (partial / "model.safetensors").open("wb") as file:
            _write_header(file, {n: (dtype, a.shape, a.nbytes) for n, (dtype, a) in arrays.items()})
            for _, array in arrays.values():
                file.write(array.tobytes())
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
    _write_header(file, {n: ("BF16", dims, 2 * math.prod(dims)) for n, dims in shape.tensors().items()})
    draw = np.random.default_rng(0)
    for dims in shape.tensors().values():
        if len(dims) == 1:
            file.write(_bf16(np.ones(dims, np.float32)).tobytes())
            continue
        for start in range(0, math.prod(dims), CHUNK):
            count = min(CHUNK, math.prod(dims) - start)
            file.write(_bf16(draw.standard_normal(count, np.float32) * np.float32(0.02)).tobytes())


def _write_header(file: BinaryIO, entries: Mapping[str, tuple[str, tuple[int, ...], int]]) -> None:
    """Write the header of safetensors: dtype, shape and bytes of each tensor, in the order of the data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, dims, nbytes) in entries.items():
        header[name] = {"dtype": dtype, "shape": dims, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _bf16(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest bf16 numbers."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _config(shape: Shape) -> dict[str, object]:
    own = shape.config() if isinstance(shape, LatentShape | NetShape) else {}
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
        **own,
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
