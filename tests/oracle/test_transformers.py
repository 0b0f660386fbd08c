"""Small random models made by transformers on the fly, loaded from the folder it writes, logits compared.

The families of the goldens in settings that those lack. Needs torch and transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import architecture, config_class, model_class, ours, randomize, theirs, token_ids, torch
from safetensors.numpy import load_file, save_file

from quire.config import EngineConfig
from quire.description import describe
from quire.models.registry import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 1.7, 3.0, 8.0]}
ORIGINAL = {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
MOE = {"num_experts": 6, "num_experts_per_tok": 3}

# (name, class, config)
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("mqa", "Llama", {"num_key_value_heads": 1}),
    ("head-dim", "Llama", {"head_dim": 10, "attention_bias": True}),
    ("tied", "Llama", {"tie_word_embeddings": True, "mlp_bias": True}),
    ("relu", "Llama", {"hidden_act": "relu"}),
    ("gelu", "Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("llama3-old-key", "Llama", {"rope_scaling": {"type": "llama3", **LLAMA3, **ORIGINAL}}),
    ("linear", "Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    ("dynamic-short", "Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    (
        "dynamic-long",
        "Llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32},
    ),
    ("yarn", "Llama", {"rope_scaling": YARN}),
    ("yarn-mscale", "Llama", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    ("yarn-attention-factor", "Llama", {"rope_scaling": {**YARN, "attention_factor": 1.25}}),
    ("yarn-betas", "Llama", {"rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5}}),
    ("yarn-no-original", "Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("plain", "Mistral", {"sliding_window": None}),
    ("window", "Mistral", {"sliding_window": 9, "head_dim": 10}),
    ("window-layers", "Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("window-unused", "Qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 1}),
    (
        "window-layers",
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "head_dim": 12},
    ),
    ("bias", "Qwen3", {"attention_bias": True, "head_dim": 12, "rope_scaling": YARN}),
    ("window", "Qwen3Moe", {**MOE, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    ("sparse-step", "Qwen3Moe", {**MOE, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    ("pattern", "Gemma2", {"sliding_window": 9, "head_dim": 8, "query_pre_attn_scalar": 20}),
    ("yarn", "Gemma2", {"head_dim": 8, "final_logit_softcapping": None, "rope_scaling": YARN}),
    ("pattern", "Gemma3", {"sliding_window": 9, "sliding_window_pattern": 2, "head_dim": 8}),
    ("final-cap", "Gemma3", {"head_dim": 8, "final_logit_softcapping": 4.0, "rope_local_base_freq": 200.0}),
    ("window", "Phi3", {"sliding_window": 9}),
    ("longrope-short", "Phi3", {"rope_scaling": {"type": "longrope", **LONG}, **ORIGINAL}),
    ("scaled", "Olmo2", {"rope_scaling": {"type": "linear", "factor": 2.0}, "attention_bias": True}),
    ("no-rope-interval", "SmolLM3", {"no_rope_layer_interval": 2}),
    ("bias", "Granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.2}),
    ("pattern", "Cohere2", {"sliding_window": 9, "sliding_window_pattern": 2, "attention_bias": True}),
    ("no-bias", "Glm4", {"head_dim": 8, "partial_rotary_factor": 1.0}),
    ("tied", "Glm4", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    ("window", "Mixtral", {"sliding_window": 9, "num_local_experts": 3, "hidden_act": "gelu_pytorch_tanh"}),
    ("normed", "Olmoe", {**MOE, "norm_topk_prob": True}),
    ("no-scaling", "GptOss", {"head_dim": 8, "num_local_experts": 5, "rope_scaling": None}),
    ("window", "GptOss", {"head_dim": 8, "num_local_experts": 5, "sliding_window": 9}),
    ("inverse-layers", "GPT2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 70}),
    ("unscaled", "GPT2", {"scale_attn_weights": False, "activation_function": "relu"}),
]


def make(kind: str, changes: dict[str, Any], folder: Path) -> Any:
    """A random model of transformers, saved to the folder."""
    torch.manual_seed(0)
    foreign = ("intermediate_size", "num_key_value_heads") if kind == "GPT2" else ()
    sizes = {name: size for name, size in SIZES.items() if name not in foreign}
    config = config_class(kind)(**{**sizes, **changes}, attn_implementation="eager")
    model = model_class(kind)(config).float().eval()
    randomize(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("name", "kind", "changes"), CASES, ids=[f"{kind}-{name}" for name, kind, _ in CASES]
)
def test_logits(name: str, kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = make(kind, changes, tmp_path)
    ids = token_ids(SIZES["vocab_size"])
    expected = theirs(model, ids)
    assert np.abs(ours(tmp_path, ids) - expected).max() <= 1e-4 * np.abs(expected).max()
    assert expected.std() > 0.05


@pytest.mark.parametrize(("change", "own"), [(0.0, False), (0.5, True)])
def test_a_tied_head_that_differs(change: float, own: bool, tmp_path: Path) -> None:
    """Both sides take the head of the checkpoint where it is another one than the embedding."""
    make("Qwen2", {"tie_word_embeddings": True}, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(change)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = model_class("Qwen2").from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is not loaded.model.embed_tokens.weight) is own
    assert describe(EngineConfig(model=str(tmp_path))).own_head is own


def test_every_family_is_compared() -> None:
    assert {architecture(kind) for _, kind, _ in CASES} == set(FAMILIES)
