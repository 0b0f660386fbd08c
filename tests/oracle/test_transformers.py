"""Small random models made by transformers on the fly, loaded from the folder it writes, logits compared.

The families of the goldens in settings that those lack. Needs torch and transformers.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from quire.backends.reference import ReferenceBackend
from quire.models import read_model
from quire.models.registry import FAMILIES
from quire.program import Program, WeightSpec
from quire.program.batch import Batch
from quire.program.passes import fuse

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix

LENGTH = 75
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
CONFIG_CLASSES = {"Gemma3": "Gemma3TextConfig"}
MODEL_CLASSES = {"GPT2": "GPT2LMHeadModel"}


class Dense:
    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.nbytes = array, array.shape, array.nbytes

    def dense(self) -> np.ndarray:
        return self.array


def read(spec: WeightSpec, tensors: dict[str, np.ndarray]) -> Dense:
    parts = [tensors[name] for name in spec.sources]
    array = np.stack(parts) if len(parts) > 1 or parts[0].ndim < len(spec.shape) else parts[0]
    array = np.swapaxes(array, -1, -2) if spec.transposed else array
    if spec.interleaved:
        array = array[:, spec.interleaved[0] :: spec.interleaved[1]]
    assert array.shape == spec.shape
    return Dense(np.ascontiguousarray(array))


def make(kind: str, changes: dict[str, Any], folder: Path) -> Any:
    """A random model of transformers, saved to the folder; norms, biases and sinks random too."""
    torch.manual_seed(0)
    config_class = getattr(transformers, CONFIG_CLASSES.get(kind, f"{kind}Config"))
    foreign = ("intermediate_size", "num_key_value_heads") if kind == "GPT2" else ()
    sizes = {name: size for name, size in SIZES.items() if name not in foreign}
    config = config_class(**{**sizes, **changes}, attn_implementation="eager")
    model = getattr(transformers, MODEL_CLASSES.get(kind, f"{kind}ForCausalLM"))(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
            else:
                torch.nn.init.normal_(weight, std=0.3 if "embed" in name else 2 / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


def ours(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Logits [tokens, vocab] of the checkpoint in the folder, in two chunks."""
    model = read_model(json.loads((folder / "config.json").read_text()))
    program: Program = fuse(model.program)
    tensors = load_file(folder / "model.safetensors")
    weights = {name: read(spec, tensors) for name, spec in program.weights().items()}
    backend = ReferenceBackend(program, weights, num_blocks=8, block_size=16)

    def step(start: int, count: int) -> np.ndarray:
        return backend.execute(
            Batch(
                token_ids=ids[start : start + count],
                positions=np.arange(start, start + count),
                row_offsets=np.array([0, count]),
                block_tables=np.arange(8)[None],
                context_lens=np.array([start + count]),
                variants=np.array([model.context_variant(len(ids))]),
                logit_rows=np.arange(count),
                block_size=16,
            )
        )

    return np.concatenate([step(0, 50), step(50, len(ids) - 50)])


@pytest.mark.parametrize(
    ("name", "kind", "changes"), CASES, ids=[f"{kind}-{name}" for name, kind, _ in CASES]
)
def test_logits(name: str, kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = make(kind, changes, tmp_path)
    ids = np.random.default_rng(0).integers(3, SIZES["vocab_size"], LENGTH)
    with torch.no_grad():
        theirs = model(torch.tensor(ids)[None]).logits[0].float().numpy()
    logits = ours(tmp_path, ids)
    assert np.abs(logits - theirs).max() <= 1e-4 * np.abs(theirs).max()
    assert theirs.std() > 0.05


def test_every_family_is_compared() -> None:
    classes = {MODEL_CLASSES.get(kind, f"{kind}ForCausalLM") for _, kind, _ in CASES}
    assert classes == set(FAMILIES)
