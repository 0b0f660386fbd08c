"""What the comparisons with transformers share: its classes, random weights, and both sides' logits."""

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
from quire.program import Program, WeightSpec
from quire.program.batch import Batch
from quire.program.passes import fuse

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

LENGTH = 75
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}
_MODELS = {"GPT2": "GPT2LMHeadModel"}


def architecture(kind: str) -> str:
    return _MODELS.get(kind, f"{kind}ForCausalLM")


def config_class(kind: str) -> Any:
    return getattr(transformers, _CONFIGS.get(kind, f"{kind}Config"))


def model_class(kind: str) -> Any:
    return getattr(transformers, architecture(kind))


def token_ids(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, vocab_size, LENGTH)


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


def randomize(model: Any) -> None:
    """Random weights of a size that keeps every layer alive; norms, biases and sinks random too."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
            else:
                torch.nn.init.normal_(weight, std=0.3 if "embed" in name else 2 / weight.shape[-1] ** 0.5)


def theirs(model: Any, ids: np.ndarray) -> np.ndarray:
    """The same of transformers' model."""
    with torch.no_grad():
        return model(torch.tensor(ids)[None]).logits[0].float().numpy()


def ours(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Logits [tokens, vocab] of the checkpoint in the folder, in two chunks."""
    model = read_model(json.loads((folder / "config.json").read_text()))
    program: Program = fuse(model.program)
    tensors = load_file(folder / "model.safetensors")
    weights = {name: read(spec, tensors) for name, spec in program.weights().items()}
    groups = len(program.cache_groups)
    backend = ReferenceBackend(program, weights, num_blocks=[8] * groups, block_size=16)

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
