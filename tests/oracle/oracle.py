"""What the comparisons with transformers share: its classes, random weights, and both sides' logits."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import read_weights
from safetensors.numpy import load_file, save_file

from quire.backends.reference import ReferenceBackend
from quire.models import read_model
from quire.program import Program
from quire.program.batch import Batch
from quire.program.passes import fuse

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

LENGTH = 75
COMPOSITE = (
    *("Ernie4_5_VLMoe", "Exaone4_5_", "Mistral3"),
    *("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe"),
    *("Glm4v", "Glm46V", "Glm4vMoe", "GlmOcr", "PaddleOCRVL"),
)
WITHOUT_CLASS = (
    "MiniCPM",
    "BailingMoe",
    "BailingMoeV2",
    "DeciLM",
    "Exaone",
    "InternLM2",
    "InternLM3",
)  # transformers has none: only the code that is published with checkpoints
OF_TEXT = ("Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified", "Llama4", "Qwen3_5", "Qwen3_5Moe")
# Configurations of their own, whose models are those of another class
OF_OTHERS = {"IQuestCoder": "Llama", "SarvamMLA": "DeepseekV3", "SarvamMoE": "Glm4Moe"}
_CONFIGS = {kind: f"{kind}TextConfig" for kind in OF_TEXT}
_MODELS = {"GPT2": "GPT2LMHeadModel", **{kind: f"{kind}ForConditionalGeneration" for kind in COMPOSITE}}


def architecture(kind: str) -> str:
    return _MODELS.get(kind, f"{kind}ForCausalLM")


def config_class(kind: str) -> Any:
    return getattr(transformers, _CONFIGS.get(kind, f"{kind}Config"))


def model_class(kind: str) -> Any:
    return getattr(transformers, architecture(OF_OTHERS.get(kind, kind)))


def token_ids(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, vocab_size, LENGTH)


def randomize(model: Any) -> None:
    """Random weights of a size that keeps every layer alive; norms, biases and sinks random too."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
            else:
                torch.nn.init.normal_(weight, std=0.3 if "embed" in name else 2 / weight.shape[-1] ** 0.5)
        for name, bias in model.named_buffers():
            if "correction_bias" in name:
                bias.normal_(std=0.3)
            if "layer_scalar" in name:
                bias.uniform_(0.5, 1.5)
            if "tid2eid" in name:
                bias.random_(model.config.n_routed_experts)


def theirs(model: Any, ids: np.ndarray) -> np.ndarray:
    """The same of transformers' model."""
    with torch.no_grad():
        return model(torch.tensor(ids)[None]).logits[0].float().numpy()


def write_as_released(path: Path, program: Program) -> None:
    """Write one tensor for all experts where the program reads one and the file has a matrix of each."""
    tensors = load_file(path)
    if divided_as_released(tensors, program):
        save_file(tensors, path, {"format": "pt"})
    wanted = {source for spec in program.weights().values() for source in spec.sources}
    missing = wanted - set(tensors)
    for name in missing:
        start, _, part = name.rpartition(".")
        count = sum(key.startswith(f"{start}.") and key.endswith(".down_proj.weight") for key in tensors)
        if not count:
            continue  # its name is another in this checkpoint
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        experts = ([tensors[f"{start}.{i}.{part}.weight"] for part in parts] for i in range(count))
        tensors[name] = np.stack([np.concatenate(matrices) for matrices in experts])
    if missing and wanted <= set(tensors):
        save_file({name: tensors[name] for name in wanted}, path, {"format": "pt"})


def divided_as_released(tensors: dict[str, np.ndarray], program: Program) -> bool:
    """Divide convolutions of queries, keys and values by their widths; transformers writes equal parts."""
    specs, changed = program.weights(), False
    for first in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        names = [first.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        widths = [specs[name].shape[0] for name in names]
        if widths != [len(tensors[name]) for name in names]:
            parts = np.split(np.concatenate([tensors[name] for name in names]), np.cumsum(widths)[:-1])
            tensors.update(zip(names, map(np.ascontiguousarray, parts), strict=True))
            changed = True
    return changed


def ours(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Logits [tokens, vocab] of the checkpoint in the folder, in two chunks."""
    model = read_model(json.loads((folder / "config.json").read_text()))
    program: Program = fuse(model.program)
    write_as_released(folder / "model.safetensors", program)
    weights = read_weights(folder, program)
    groups = len(program.cache_groups)
    backend = ReferenceBackend(program, weights, num_blocks=[8] * groups, block_size=16, num_slots=1)

    def step(start: int, count: int) -> np.ndarray:
        return backend.execute(
            Batch(
                token_ids=ids[start : start + count],
                positions=np.arange(start, start + count),
                row_offsets=np.array([0, count]),
                block_tables=(np.arange(8)[None],) * groups,
                context_lens=np.array([start + count]),
                slots=np.array([0]),
                variants=np.array([model.context_variant(len(ids))]),
                logit_rows=np.arange(count),
                block_size=16,
            )
        )

    return np.concatenate([step(0, 50), step(50, len(ids) - 50)])
