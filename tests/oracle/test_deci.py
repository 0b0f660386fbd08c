"""Llama-Nemotron, of which transformers has no class, against a Llama with layers of different sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import ours, randomize, theirs, token_ids, torch, transformers
from safetensors.torch import save_file

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 32}
AS_PUBLISHED = {"sparsify": None, "no_op": False, "replace_with_linear": False}
OF_ATTENTION = {
    **AS_PUBLISHED,
    "num_sink_tokens": None,
    "unshifted_sink": False,
    "use_prefill_window_in_sink_attention": False,
    "window_length": None,
}
# Heads of queries that share one of keys, and ffn_mult with the width it stands for; None for one matrix, 0
# for nothing
LAYERS = [(3, (2.625, 256)), (0, (8.1, 512)), (None, None), (6, 0), (1, (8.0, 256))]


class OneMatrix(torch.nn.Module):
    """A matrix in the place of an attention, which also returns weights, or of an MLP."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__()
        self.name, self.count = name, count
        setattr(self, name, torch.nn.Linear(48, 48, bias=False))

    def forward(self, hidden_states: Any, **rest: Any) -> Any:
        out = getattr(self, self.name)(hidden_states)
        return (out, None) if self.count == 2 else out


class Nothing(torch.nn.Module):
    """The same of what is absent."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, hidden_states: Any, **rest: Any) -> Any:
        out = torch.zeros_like(hidden_states)
        return (out, None) if self.count == 2 else out


def assembled(**settings: Any) -> Any:
    """Return the Llama of these layers."""
    config = transformers.LlamaConfig(**SIZES, **settings)
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config)
    layer_class = type(model.model.layers[0])
    for i, (each, mlp) in enumerate(LAYERS):
        own = transformers.LlamaConfig(**SIZES, **settings)
        own._attn_implementation = "eager"
        own.num_key_value_heads, own.intermediate_size = 6 // (each or 6), mlp[1] if mlp else 8
        layer = model.model.layers[i] = layer_class(own, i)
        if not each:
            layer.self_attn = OneMatrix("linear_attn", 2) if each is None else Nothing(2)
        if not mlp:
            layer.mlp = OneMatrix("linear_mlp", 1) if mlp is None else Nothing(1)
    randomize(model)
    return model.float().eval()


def block_configs() -> list[dict[str, Any]]:
    blocks = []
    for each, mlp in LAYERS:
        attention = {**OF_ATTENTION, "n_heads_in_group": each or None, "replace_with_linear": each is None}
        ffn = {**AS_PUBLISHED, "ffn_mult": mlp[0] if mlp else None, "replace_with_linear": mlp is None}
        blocks.append({"attention": attention | {"no_op": each == 0}, "ffn": ffn | {"no_op": mlp == 0}})
    return blocks


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": ROPE, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu_new"},
    ],
    ids=["published", "biases"],
)
def test_layers_of_their_own_sizes(settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = assembled(**settings)
    ids = token_ids(SIZES["vocab_size"])
    tensors = model.state_dict()
    for i, (each, mlp) in enumerate(LAYERS):
        for absent, norm in ((each == 0, "input_layernorm"), (mlp == 0, "post_attention_layernorm")):
            if absent:
                del tensors[f"model.layers.{i}.{norm}.weight"]
    if settings.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    raw = {**SIZES, **settings, "num_key_value_heads": None, "intermediate_size": None}
    raw |= {"architectures": ["DeciLMForCausalLM"], "block_configs": block_configs()}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    expected = theirs(model, ids)
    assert np.abs(ours(tmp_path, ids) - expected).max() <= 1e-4 * np.abs(expected).max()
