"""A cache of the Hugging Face hub that holds tiny random checkpoints under the ids of real models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 128, 4, 2, 16


def fill(home: Path, ids: Iterable[str], demo_folder: Path) -> list[Path]:
    """Lay out HF_HOME as huggingface_hub does, and return the folder of each model."""
    folders = []
    for number, name in enumerate(ids):
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        folder = repository / "snapshots" / COMMIT
        folder.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        _write_checkpoint(folder, demo_folder, np.random.default_rng(number))
        folders.append(folder)
    return folders


def _write_checkpoint(folder: Path, demo_folder: Path, random: np.random.Generator) -> None:
    """Write a Qwen3 model of random weights that reads and writes the demo model's tokens."""
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / file).write_bytes((demo_folder / file).read_bytes())
    demo = json.loads((demo_folder / "config.json").read_text())
    kept = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    config = {name: demo[name] for name in kept if name in demo} | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: (0.3 * random.standard_normal(shape)).astype(ml_dtypes.bfloat16)
        for name, shape in _shapes(demo["vocab_size"])
    }
    save_file(tensors, folder / "model.safetensors")


def _shapes(vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the weights, as Qwen3's checkpoints have them."""
    yield "model.embed_tokens.weight", (vocab_size, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{layer}.self_attn.q_norm.weight", (HEAD_DIM,)
        yield f"{layer}.self_attn.k_norm.weight", (HEAD_DIM,)
        yield f"{layer}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{layer}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (HIDDEN, INNER)
