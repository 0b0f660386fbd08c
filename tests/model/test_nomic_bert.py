"""NomicBERT against its definition in NumPy, and what its configuration may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_pooled import arrays_of, write_encoder_file
from tiny_encoders import write_encoder, write_modules

from quire import LLM
from quire.errors import ConfigError, QuireError

IDS = [2, 7, 30, 9, 12, 45, 45, 8, 3]
Arrays = dict[str, np.ndarray]


def expected(arrays: Arrays, ids: list[int], heads: int, base: float) -> np.ndarray:
    """The mean of the last hidden states, in float64."""
    w = {name: array.astype(np.float64) for name, array in arrays.items()}
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][0]
    x = normed(x, w, "emb_ln")
    count, dim = len(ids), x.shape[1] // heads
    angles = np.arange(count)[:, None] * base ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    layer = 0
    while (p := f"encoder.layers.{layer}.") + "norm1.weight" in w:
        q, k, v = (x @ w[f"{p}attn.Wqkv.weight"].T).reshape(count, 3, heads, dim).swapaxes(0, 1)
        q, k = (
            np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
            for a, b in (np.split(part, 2, axis=-1) for part in (q, k))
        )
        scores = np.einsum("qhd,khd->hqk", q, k) / dim**0.5
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        h = np.einsum("hqk,khd->qhd", shares, v).reshape(count, -1) @ w[f"{p}attn.out_proj.weight"].T
        x = normed(h + x, w, f"{p}norm1")
        up, gate = (x @ w[f"{p}mlp.{name}.weight"].T for name in ("fc11", "fc12"))
        h = (up * gate / (1 + np.exp(-gate))) @ w[f"{p}mlp.fc2.weight"].T
        x = normed(h + x, w, f"{p}norm2")
        layer += 1
    assert layer == 2
    return x.mean(axis=0)


def normed(x: np.ndarray, w: Arrays, name: str) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


@pytest.mark.parametrize("device", ["reference", "native"])
def test_the_definition(device: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "NomicBertModel", "embed")
    known = expected(arrays_of(folder), IDS, 2, 1000.0)
    np.testing.assert_allclose(embedding(folder, device), known, atol=2e-6)
    assert np.abs(known - expected(arrays_of(folder), IDS, 2, 10_000.0)).max() > 1e-3


def test_a_scaled_rope(tmp_path: Path) -> None:
    """Of a folder and of a file: positions count a quarter."""
    folder = write_encoder(tmp_path / "model", "NomicBertModel", "embed")
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = write_encoder_file(folder, tmp_path / "m.gguf", None, **scaling)
    plain = embedding(folder)
    scaled = embedding(changed(folder, rope_scaling={"rope_type": "linear", "factor": 4.0}))
    assert plain != scaled == embedding(path)


def embedding(path: Path, device: str = "reference") -> list[float]:
    with LLM(str(path), device=device) as llm:
        (output,) = llm.embed({"prompt_token_ids": IDS}, use_tqdm=False)
        return output.outputs.embedding


def changed(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "longest"),
    [({}, 40), ({"max_trained_positions": 2048}, 160), ({"max_position_embeddings": 32}, 32)],
)
def test_texts_are_as_long_as_those_of_training(fields: dict[str, Any], longest: int, tmp_path: Path) -> None:
    """Whatever sentence_bert_config.json says: the published ones state 8,192."""
    folder = changed(write_encoder(tmp_path, "NomicBertModel", "embed"), **fields)
    write_modules(folder, 16, "mean")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8192}))
    with LLM(str(folder), device="reference") as llm:
        llm.embed({"prompt_token_ids": [5] * longest}, use_tqdm=False)
        with pytest.raises(QuireError, match=f"at most {longest} tokens"):
            llm.embed({"prompt_token_ids": [5] * (longest + 1)})


@pytest.mark.parametrize(
    "fields",
    [
        {"causal": True},
        {"prenorm": True},
        {"parallel_block": True},
        {"use_rms_norm": True},
        {"rotary_emb_fraction": 0.5},
        {"rotary_emb_interleaved": True},
        {"rotary_emb_scale_base": 512},
        {"moe_every_n_layers": 2},
        {"activation_function": "gelu"},
    ],
)
def test_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = changed(write_encoder(tmp_path, "NomicBertModel", "embed"), **fields)
    with pytest.raises(ConfigError, match=f"{next(iter(fields))} = .* is not supported"):
        LLM(str(folder), device="reference")
