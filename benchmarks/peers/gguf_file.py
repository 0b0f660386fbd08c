"""GGUF files of random blocks in the shapes of published models; Quire and llama.cpp load them as they are.

q4_k_m has the mixture of types that llama.cpp calls by this name: Q4_K, and Q6_K for the embedding and, in
half of the layers, for the values' projection and the last matrix of the MLP. q8_0 has one type.
"""

from __future__ import annotations

import itertools
import math
import string
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from peers.checkpoints import Shape
from peers.gguf_names import NAMES
from peers.hybrids import FEW, FLOAT, TABLE, HybridShape
from peers.shapes import SHAPES

ALIGNMENT = 32
VERSION = 3
POOL = 1 << 14  # different blocks of a type, repeated
F32, Q8_0, Q4_K, Q6_K = 0, 8, 12, 14
# Weights and bytes of a block.
BLOCKS = {Q8_0: (32, 34), Q4_K: (256, 144), Q6_K: (256, 210)}
NORMAL, CONTROL = 1, 3  # types of tokens
NUM_CONTROL = 256


def make(model: str, kind: str, work: Path) -> Path:
    """Return the file of a model, written if it is not there; ValueError if it cannot be had in a kind."""
    shape, path = SHAPES[model], work / "checkpoints" / f"{model}-{kind}.gguf"
    has_file = isinstance(shape, HybridShape) or (type(shape) is Shape and not shape.experts)
    if not has_file or (kind == "q4_k_m" and shape.hidden % 256):
        raise ValueError(f"{shape.title} has no {kind}")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            hybrid = isinstance(shape, HybridShape)
            tensors = list(_hybrid_tensors(shape, kind) if hybrid else _tensors(shape, kind))
            pairs = {**(shape.sizes() if hybrid else _sizes(shape)), **_tokenizer(shape.vocab)}
            file.write(_head(pairs, tensors))
            pools = {form: _pool(form) for form in BLOCKS}
            for name, dims, form in tensors:
                file.write(_padded(_decay(dims) if name.endswith("ssm_a") else _data(dims, form, pools)))
        partial.rename(path)
    return path


def _tensors(shape: Shape, kind: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield names, shapes and types of all tensors."""
    few, many = (Q4_K, Q6_K) if kind == "q4_k_m" else (Q8_0, Q8_0)
    yield "token_embd.weight", (shape.vocab, shape.hidden), many
    yield "output_norm.weight", (shape.hidden,), F32
    for index in range(shape.layers):
        eighth = shape.layers // 8
        more = index < eighth or index >= 7 * eighth or (index - eighth) % 3 == 2
        for name, dims in shape.layer().items():
            wide = more and name in ("self_attn.v_proj", "mlp.down_proj")
            form = F32 if len(dims) == 1 else many if wide else few
            yield f"blk.{index}.{NAMES[name]}.weight", dims, form


def _hybrid_tensors(shape: HybridShape, kind: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield the same of a shape with tensors of its own."""
    few, many = (Q4_K, Q6_K) if kind == "q4_k_m" else (Q8_0, Q8_0)
    eighth = max(shape.layers // 8, 1)
    for name, dims, what in shape.files_tensors():
        index = int(name.split(".")[1]) if name.startswith("blk.") else 0
        wide = index < eighth or index >= 7 * eighth or (index - eighth) % 3 == 2
        form = F32 if what == FLOAT else many if what == TABLE or (wide and what != FEW) else few
        yield name, dims, form


def _pool(form: int) -> np.ndarray:
    """Return random blocks with scales that give weights of about 0.02."""
    draw = np.random.default_rng(form)
    blocks = draw.integers(0, 256, (POOL, BLOCKS[form][1]), np.uint8)
    if form == Q4_K:
        blocks[:, :4] = np.array([0.0001, 0.0008], "<f2").view(np.uint8)
    elif form == Q6_K:
        blocks[:, 192:208] = draw.integers(10, 60, (POOL, 16))
        blocks[:, 208:] = np.array([0.00003], "<f2").view(np.uint8)
    else:
        blocks[:, :2] = np.array([0.0003], "<f2").view(np.uint8)
    return blocks


def _data(dims: tuple[int, ...], form: int, pools: dict[int, np.ndarray]) -> bytes:
    if form == F32:
        return np.ones(dims, "<f4").tobytes()
    return np.resize(pools[form], _num_bytes(dims, form)).tobytes()


def _decay(dims: tuple[int, ...]) -> bytes:
    return (-np.ones(dims, "<f4")).tobytes()


def _num_bytes(dims: tuple[int, ...], form: int) -> int:
    weights, num_bytes = BLOCKS.get(form, (1, 4))
    return math.prod(dims) // weights * num_bytes


def _sizes(shape: Shape) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.context_length": shape.max_positions,
        "llama.embedding_length": shape.hidden,
        "llama.block_count": shape.layers,
        "llama.feed_forward_length": shape.intermediate,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.rope.freq_base": shape.rope_theta,
    }


def _tokenizer(vocab: int) -> dict[str, Any]:
    """Return bytes, pairs and triples of characters with all their merges: 250,000 for l1b."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that are spelled as themselves
    single = [chr(byte) for byte in shown] + [chr(256 + place) for place in range(256 - len(shown))]
    letters = string.ascii_letters + string.digits
    pairs = ["".join(both) for both in itertools.product(letters, repeat=2)]
    triples = map("".join, itertools.product(letters, repeat=3))
    texts = [*single, *pairs, *triples][: vocab - NUM_CONTROL]
    merges = [f"{text[:at]} {text[at:]}" for text in texts[len(single) :] for at in range(1, len(text))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": texts + [f"<|{index}|>" for index in range(NUM_CONTROL)],
        "tokenizer.ggml.token_type": [NORMAL] * len(texts) + [CONTROL] * NUM_CONTROL,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(texts),
        "tokenizer.ggml.eos_token_id": len(texts) + 1,
    }


def _head(pairs: dict[str, Any], tensors: list[tuple[str, tuple[int, ...], int]]) -> bytes:
    """Return all that comes before the data of the tensors, which follows in their order."""
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(pairs))]
    for key, value in pairs.items():
        parts += [_text(key), _value(value)]
    offset = 0
    for name, dims, form in tensors:
        parts += [_text(name), struct.pack(f"<I{len(dims)}QIQ", len(dims), *reversed(dims), form, offset)]
        offset += -(-_num_bytes(dims, form) // ALIGNMENT) * ALIGNMENT
    return _padded(b"".join(parts))


def _value(value: Any) -> bytes:
    """Encode a type and its value. Integers of lists are signed: llama.cpp wants this of token types."""
    if isinstance(value, list):
        if isinstance(value[0], str):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        if isinstance(value[0], bool):
            return struct.pack("<IIQ", 9, 7, len(value)) + np.array(value, np.uint8).tobytes()
        return struct.pack("<IIQ", 9, 5, len(value)) + np.array(value, "<i4").tobytes()
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
