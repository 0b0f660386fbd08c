"""GTE's models: NomicBERT's layers under other names, with all biases but one, and a rope scaled by NTK."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_encoders import write_encoder

from quire import LLM
from quire.errors import ConfigError
from quire.models.encoders import read_encoder
from quire.models.purpose import Pooling

IDS = [2, 7, 30, 9, 12, 45, 45, 8, 3]
TO_NOMIC = {
    "embeddings.LayerNorm": "emb_ln",
    "encoder.layer.": "encoder.layers.",
    "attention.qkv_proj": "attn.Wqkv",
    "attention.o_proj": "attn.out_proj",
    "attn_ln": "norm1",
    "mlp_ln": "norm2",
    "mlp.down_proj": "mlp.fc2",
}


def embedding(folder: Path, device: str = "reference") -> list[float]:
    with LLM(str(folder), device=device) as llm:
        (output,) = llm.embed({"prompt_token_ids": IDS}, use_tqdm=False)
        return output.outputs.embedding


def changed(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


def of_nomic(folder: Path, base: float) -> Path:
    """Write a NomicBERT with the weights of a folder."""
    found = {}
    for name, array in load_file(folder / "model.safetensors").items():
        for old, new in TO_NOMIC.items():
            name = name.replace(old, new)
        if match := re.fullmatch(r"(.+)\.up_gate_proj\.weight", name):
            found[f"{match[1]}.fc11.weight"], found[f"{match[1]}.fc12.weight"] = np.split(array, 2)
        else:
            found[name] = array
    other = write_encoder(folder.with_name("nomic"), "NomicBertModel", "embed")
    heads = json.loads((folder / "config.json").read_text())["num_attention_heads"]
    given = {"n_head": heads, "type_vocab_size": 1, "activation_function": "geglu", "rotary_emb_base": base}
    changed(other, **given, qkv_proj_bias=True, mlp_fc2_bias=True)
    save_file(found, other / "model.safetensors")
    return other


@pytest.mark.parametrize("device", ["reference", "native"])
def test_it_is_nomic_bert_with_other_names(device: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "gte", "NewModel", "embed")
    assert embedding(folder, device) == embedding(of_nomic(folder, 1000.0), device)


def test_three_matrices_are_one(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "NewModel", "embed")
    whole, arrays = embedding(folder), load_file(folder / "model.safetensors")
    for name in [name for name in arrays if "qkv_proj" in name]:
        for part, array in zip("qkv", np.split(arrays.pop(name), 3), strict=True):
            arrays[name.replace("qkv_proj", f"{part}_proj")] = array
    save_file(arrays, folder / "model.safetensors")
    assert embedding(changed(folder, pack_qkv=False)) == whole


def test_a_rope_scaled_by_ntk(tmp_path: Path) -> None:
    """By s of d numbers: the base is s times as large, and frequencies are those divided by s**(2/d)."""
    folder = write_encoder(tmp_path / "gte", "NewModel", "embed")
    config = json.loads((folder / "config.json").read_text())
    dim = config["hidden_size"] // config["num_attention_heads"]
    scaled = embedding(changed(folder, rope_scaling={"type": "ntk", "factor": 8.0}))
    other = changed(of_nomic(folder, 8000.0), rope_scaling={"rope_type": "linear", "factor": 8 ** (2 / dim)})
    assert scaled == embedding(other)
    assert scaled != embedding(changed(folder, rope_scaling=None))


def test_segments_are_left_out_where_there_are_none(tmp_path: Path) -> None:
    program = read_encoder("GteModel", {"type_vocab_size": 0}, Pooling("embed")).program
    assert not any("token_type" in name for name in program.weights())
    folder = write_encoder(tmp_path, "GteModel", "embed")
    assert len(embedding(folder)) == 16


def test_names_beneath_a_head(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "NewForSequenceClassification", "score")
    arrays = load_file(folder / "model.safetensors")
    renamed = {n if n.startswith("classifier") else f"new.{n}": array for n, array in arrays.items()}
    with LLM(str(folder), device="reference") as llm:
        expected = llm.score("a b", "c")[0].outputs.score
    save_file(renamed, folder / "model.safetensors")
    with LLM(str(folder), device="reference") as llm:
        assert llm.score("a b", "c")[0].outputs.score == expected


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute' is not supported"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type = 'rms_norm' is not supported"),
        ({"logn_attention_scale": True}, "logn_attention_scale = True is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = .* is not supported"),
        (
            {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}},
            "rope_scaling = .* is not supported",
        ),
        ({"rope_scaling": {"type": "ntk"}}, "factor = None is not a number"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_encoder("NewModel", fields, Pooling("embed"))
