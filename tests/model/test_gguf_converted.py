"""GGUF files of families whose converters change more than names: they must give the program and the weights
of the checkpoint they were made of, or its published logits where factors are in the weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_converted import FOLDERS, MADE, converted, in_f32, read, written
from gguf_files import F32, Q8_0, write
from safetensors.numpy import save_file
from test_goldens import check_tiny_random
from tiny import CONFIGS, Paged
from tiny import Dense as Numbers

from quire.models import Model, read_model
from quire.program.passes import fuse
from quire.quantize.coded import Coded
from quire.quantize.kinds import StoredWeight
from quire.weights.gguf.changes import Alteration
from quire.weights.gguf.model import GgufModel
from quire.weights.hub import open_model
from quire.weights.load import load
from quire.weights.plan import plan

# What a file cannot state: llama.cpp knows these of the published models.
UNSTATED = {"llama4": ("attention_chunk_size", "floor_scale"), "minicpm3": ("dim_model_base",)}
# Falcon-H1's multipliers and Llama 4's rope are in the tensors of a file.
BY_LOGITS = ("falcon_h1", "llama4")


def checkpoint(name: str, shared_data: Path) -> tuple[Path, dict[str, Any]]:
    folder = shared_data / "models" / "tiny-random-2" / name
    return folder, json.loads((folder / "config.json").read_text())


KINDS = ("linear_attention", "full_attention", "full_attention")
OF_KIMI: dict[str, Any] = {
    "linear_attn_config": None,
    "linear_head_dim": 6,
    "linear_num_heads": 4,  # as many as the layers with attention have
    "linear_conv_kernel_dim": 3,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
}
OF_SPARSE = {
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
# What the checkpoints of random numbers state beside the config of their family
STATED: dict[str, tuple[dict[str, Any], ...]] = {
    "arcee": ({"rope_scaling": None, "mlp_bias": False}, {"rope_scaling": None, "tie_word_embeddings": True}),
    "cohere": ({"logit_scale": 0.25}, {"logit_scale": 0.25, "use_qk_norm": False}),
    "granite_moe_shared": (
        {"num_experts_per_tok": 2, "attention_multiplier": 0.25},
        {"num_experts_per_tok": 2, "attention_multiplier": 0.25, "shared_intermediate_size": 0},
    ),
    "olmo": ({}, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "kimi_linear": tuple(
        {
            **OF_KIMI,
            "layer_types": [*types],
            "q_lora_rank": rank,
            "norm_topk_prob": normed,
            "first_k_dense_replace": dense,
        }
        for types, rank, normed, dense in ((KINDS, None, True, 1), (KINDS[::-1], 10, True, 2))
    ),
    "bailing2": (
        {"partial_rotary_factor": 0.5, "norm_topk_prob": True},
        {"partial_rotary_factor": 1.0, "use_qk_norm": False, "use_qkv_bias": True, "norm_topk_prob": False},
    ),
    "exaone3": tuple(
        {"rope_scaling": None, "layer_norm_epsilon": 1e-6, "tie_word_embeddings": tied}
        for tied in (False, True)
    ),
    "deci": (
        {
            "block_configs": [
                {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 2.0}},
                {"attention": {"no_op": True}, "ffn": {"ffn_mult": 24.5}},
                {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 2.0}},
                {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
            ]
        },
    ),
    "phi": ({"qk_layernorm": False, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},),
    "nemotron": (
        {"norm_eps": 1e-5, "partial_rotary_factor": 0.5, "mlp_bias": False},
        {"norm_eps": 1e-5, "partial_rotary_factor": 1.0, "mlp_bias": True, "attention_bias": True},
    ),
    "deepseek_v32": ({"rope_scaling": None, "norm_topk_prob": True, **OF_SPARSE},),
    "glm_moe_dsa": (
        {**OF_SPARSE, "index_topk_freq": 1},
        {**OF_SPARSE, "indexer_types": ["full", "shared", "shared"]},
    ),
    "hunyuan_moe": ({"moe_topk": [2, 2], "rope_theta": 11158839.0},),
    "minicpm": (
        # numbers that a file has exactly
        {"num_hidden_layers": 4, "scale_depth": 1.5},
        {"num_hidden_layers": 4, "scale_depth": 1.5, "tie_word_embeddings": False},
    ),
    "phimoe": tuple(
        {
            "architectures": ["PhiMoEForCausalLM"],
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.01,
            "rope_scaling": scaling,
        }
        for scaling in (
            None,
            {
                "type": "longrope",
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.25],
                "long_factor": [1.5, 4.0],
                "short_mscale": 1.243163121016122,
                "long_mscale": 1.243163121016122,
            },
        )
    ),
    "stablelm": (
        {"use_parallel_residual": False},
        {"use_parallel_residual": True, "num_key_value_heads": 1},
        {"use_parallel_residual": False, "qk_layernorm": False, "use_qkv_bias": False},
    ),
}
PLAIN = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-5}


def made(name: str, stated: dict[str, Any], folder: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of random numbers."""
    raw = {**PLAIN, **CONFIGS[name], **stated}
    rng, tensors = np.random.default_rng(0), {}
    for spec in read_model(raw).program.weights().values():
        shape = spec.stored or (spec.shape if len(spec.sources) == 1 else spec.shape[1:])
        if spec.by_head is not None:
            heads, rows, width = shape if spec.by_head == "outputs" else (shape[0], shape[2], shape[1])
            shape = (heads * rows, width)
        if spec.rows is not None:  # a part of what is stored
            shape = (*shape[:-2], shape[-2] // spec.rows.taken * spec.rows.period, shape[-1])
        for source in spec.sources:
            array = rng.standard_normal(shape).astype(np.float32)
            if "norm" in source:  # such that one more, and less, is itself
                array = array.astype(np.float16).astype(np.float32)
            tensors[source] = array
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder, raw


@pytest.mark.parametrize(("name", "stated"), [(name, each) for name in MADE for each in STATED[name]])
def test_program_and_weights_of_random_checkpoints(name: str, stated: dict[str, Any], tmp_path: Path) -> None:
    folder, raw = made(name, stated, tmp_path / name)
    source = GgufModel(written(folder, tmp_path / "tiny.gguf", in_f32))
    model, expected = read_model(source.config()), read_model(raw)
    assert repr([*model.program]) == repr([*expected.program])
    weights, known = loaded(source, model), loaded(open_model(str(folder)), expected)
    assert weights.keys() == known.keys()
    for key, weight in weights.items():
        close = 1e-6 if key.endswith("A_log") else 0
        np.testing.assert_allclose(weight.dense(), known[key].dense(), rtol=close, atol=close, err_msg=key)


@pytest.mark.parametrize("stored", [(1, 6, 1, 3), (6, 1, 3), (6, 3)], ids=str)
def test_a_kernel_has_one_axis_of_one_channel(stored: tuple[int, ...]) -> None:
    """Converters write four axes for Kimi Linear, and programs that quantize a file leave out the first."""
    assert Alteration(form="kernel").shaped(stored) == (6, 1, 3)


def loaded(source: Any, model: Model) -> dict[str, StoredWeight]:
    program = model.program
    ignored, left_out = program.ignored, program.left_out
    return load(plan(program.weights(), source.tensors(), ignored=ignored, left_out=left_out))


def model_of(source: GgufModel, name: str, raw: dict[str, Any]) -> Model:
    return read_model(source.config() | {key: raw[key] for key in UNSTATED.get(name, ())})


@pytest.mark.parametrize("name", FOLDERS)
def test_program_and_weights(name: str, shared_data: Path, tmp_path: Path) -> None:
    folder, raw = checkpoint(name, shared_data)
    source = GgufModel(written(folder, tmp_path / "tiny.gguf", in_f32))
    model, weights = model_of(source, name, raw), {}
    if name in BY_LOGITS:
        program = fuse(model.program)
        weights = {key: Numbers(weight.dense()) for key, weight in loaded(source, model).items()}
        check_tiny_random(folder, model, Paged(program, weights, num_blocks=300))
        return
    expected = read_model(raw)
    assert repr([*model.program]) == repr([*expected.program])
    weights, known = loaded(source, model), loaded(open_model(str(folder)), expected)
    assert weights.keys() == known.keys()
    for key, weight in weights.items():
        close = 1e-6 if key.endswith(("A_log", "norm.weight")) else 0
        np.testing.assert_allclose(weight.dense(), known[key].dense(), rtol=close, atol=close, err_msg=key)


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3", "granite4_h", "gemma4_moe"])
def test_codes(name: str, shared_data: Path, tmp_path: Path) -> None:
    """Blocks move with their rows, and those of a reordered matrix keep their place: the numbers are near."""

    def kinds(name: str, array: np.ndarray) -> int:
        floats = array.ndim < 2 or array.shape[-1] % 32 or "conv" in name or "norm" in name
        return F32 if floats else Q8_0

    folder, raw = checkpoint(name, shared_data)
    exact = GgufModel(written(folder, tmp_path / "exact.gguf", in_f32))
    rounded = GgufModel(written(folder, tmp_path / "rounded.gguf", kinds))
    model = model_of(exact, name, raw)
    numbers, codes = loaded(exact, model), loaded(rounded, model)
    assert sum(weight.storage.kind == "q8_0" for weight in codes.values()) > 10
    for key, weight in codes.items():
        known = numbers[key].dense()
        assert np.abs(weight.dense() - known).max() <= np.abs(known).max() / 250, key


@pytest.mark.parametrize("kind", [F32, Q8_0])
def test_inputs_in_the_order_of_keys(kind: int, shared_data: Path, tmp_path: Path) -> None:
    """Blocks of a matrix keep their place; its inputs, heads of values, are those of the model."""
    folder, _ = checkpoint("qwen3_5", shared_data)
    keys, of_key, dim, hidden = 2, 2, 32, 64
    metadata = {**converted(folder)[0], "qwen35.ssm.inner_size": keys * of_key * dim}
    draw = np.random.default_rng(0)
    needed = draw.standard_normal((hidden, keys, of_key, dim)).astype(np.float32)
    tiled = needed.swapaxes(1, 2).reshape(hidden, -1)
    tensors = {"token_embd.weight": (np.zeros((4, 64)), F32), "blk.0.ssm_out.weight": (tiled, kind)}
    source = GgufModel(write(tmp_path / "m.gguf", metadata, tensors))
    weight = source.tensors().pull("model.layers.0.linear_attn.out_proj.weight")
    assert weight.storage == source.tensors()["model.layers.0.linear_attn.out_proj.weight"].storage
    needed = needed.reshape(hidden, -1)
    assert np.abs(weight.dense() - needed).max() <= (0 if kind == F32 else 4 / 127)
    if isinstance(weight, Coded):
        x = draw.standard_normal((3, needed.shape[1])).astype(np.float32)
        assert np.abs(weight.product(x) - x @ needed.T).max() < 1


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "glm4_moe"])
def test_prediction_layers_have_the_names_of_the_checkpoint(
    name: str, shared_data: Path, tmp_path: Path
) -> None:
    folder, _ = checkpoint(name, shared_data)
    tensors = GgufModel(written(folder, tmp_path / "m.gguf", in_f32)).tensors()
    last = "mtp." if name.startswith("qwen") else "model.layers.3."
    known = {key: value for key, value in read(folder).items() if key.startswith(last)}
    assert {key for key in tensors if key.startswith(last)} == set(known)
    for key, value in known.items():
        np.testing.assert_allclose(tensors.pull(key).dense(), value, rtol=1e-6, atol=1e-6, err_msg=key)
