"""Embeddings of short texts next to sentence-transformers: ratio of texts a second, from interleaved runs.

    python benchmarks/embeddings.py --peer /path/to/python-with-sentence-transformers

The model has the shape of all-MiniLM-L6-v2 (22.7 M parameters, float32) and random weights: its speed is that
of the real one. Both sides get the same texts in one call and return float32 vectors, which are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, HIDDEN, LAYERS, INNER, POSITIONS = 30522, 384, 6, 1536, 512
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_model(folder: Path) -> list[str]:
    """Write the checkpoint; return the words of its vocabulary."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    rng, draw = np.random.default_rng(0), random.Random(0)
    words = sorted({"".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(2 * VOCAB)})
    words = words[: VOCAB - len(SPECIAL)]
    vocab = {token: i for i, token in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    settings = {**names, "mask_token": "[MASK]", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config: dict[str, Any] = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 12,
        "intermediate_size": INNER,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    save_file(
        {name: _random(rng, name, shape) for name, shape in _tensors().items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return words


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    mean = 1.0 if name.endswith("LayerNorm.weight") else 0.0
    return (mean + 0.05 * rng.standard_normal(shape)).astype(np.float32)


def _tensors() -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor."""
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
    }
    norms, linears = ["embeddings.LayerNorm"], {"pooler.dense": (HIDDEN, HIDDEN)}
    for i in range(LAYERS):
        p = f"encoder.layer.{i}"
        linears |= {f"{p}.attention.self.{name}": (HIDDEN, HIDDEN) for name in ("query", "key", "value")}
        linears[f"{p}.attention.output.dense"] = (HIDDEN, HIDDEN)
        linears[f"{p}.intermediate.dense"] = (INNER, HIDDEN)
        linears[f"{p}.output.dense"] = (HIDDEN, INNER)
        norms += [f"{p}.attention.output.LayerNorm", f"{p}.output.LayerNorm"]
    for name, shape in linears.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        found |= {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
    return found


# Runs in the environment of the peer: reads "run" lines, answers with seconds; "end" writes the vectors.
PEER = """
import sys, time, json
import numpy as np
import torch
from sentence_transformers import SentenceTransformer
folder, threads = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(threads)
model = SentenceTransformer(folder, device="cpu")
texts = json.load(open(folder + "/texts.json"))
for line in sys.stdin:
    began = time.perf_counter()
    vectors = model.encode(texts, batch_size=int(sys.argv[3]))
    print(time.perf_counter() - began, flush=True)
    np.save(folder + "/peer.npy", vectors)
"""


def main() -> None:
    """Measure both sides in turn and print the ratio of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", default=sys.executable, help="a Python that has sentence-transformers")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--words", type=int, nargs=2, default=(6, 26), help="least and most in a text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch-size", type=int, default=32, help="of the peer; 32 is its default")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    asked = parser.parse_args()
    from quire import LLM

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = write_model(folder)
        draw = random.Random(1)
        texts = [" ".join(draw.choices(words, k=draw.randint(*asked.words))) for _ in range(asked.texts)]
        (folder / "texts.json").write_text(json.dumps(texts))
        options = [name, str(asked.threads), str(asked.batch_size)]
        with (
            subprocess.Popen(
                [asked.peer, "-c", PEER, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as peer,
            LLM(
                name,
                num_threads=asked.threads,
                quantization=asked.quantization,
                max_num_batched_tokens=asked.max_num_batched_tokens,
            ) as llm,
        ):
            times: dict[str, list[float]] = {"quire": [], "peer": []}
            for _ in range(asked.rounds + 2):
                began = time.perf_counter()
                found = llm.embed(texts, use_tqdm=False)
                times["quire"].append(time.perf_counter() - began)
                times["peer"].append(_peer_s(peer))
        vectors = np.array([one.outputs.embedding for one in found])
        apart = float(np.abs(vectors - np.load(folder / "peer.npy")).max())
        num_tokens = sum(len(one.prompt_token_ids) for one in found)
    medians = {name: statistics.median(own[2:]) for name, own in times.items()}
    print(f"{asked.texts} texts, {num_tokens:,} tokens, {asked.threads} threads, rounds: {asked.rounds}")
    for name, own in medians.items():
        print(
            f"{name}: {asked.texts / own:,.0f} texts/s, {num_tokens / own:,.0f} tokens/s ({own * 1e3:.1f} ms)"
        )
    print(f"ratio {medians['peer'] / medians['quire']:.2f}, largest difference of a number {apart:.1e}")


def _peer_s(peer: subprocess.Popen[str]) -> float:
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write("run\n")
    peer.stdin.flush()
    return float(peer.stdout.readline())


if __name__ == "__main__":
    main()
