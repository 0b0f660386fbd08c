"""Quantized checkpoints on the interpreted accelerator: as near to the golden logits as the reference is."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from quantized_files import error_of
from test_whole_models import in_parts
from tiny import Paged, same_bits

from quire.backends.backend import Capacity
from quire.backends.cuda import divided
from quire.backends.cuda.asked import require_compiled
from quire.backends.cuda.backend import CudaBackend
from quire.backends.cuda.interpreted import InterpretedAccelerator, InterpretedGroup
from quire.backends.cuda.weights import axes_of, upload
from quire.config import EngineConfig
from quire.description import Description, describe
from quire.errors import ConfigError
from quire.weights.load import load
from quire.weights.plan import WeightPlan

# With what a checkpoint adds to the error of the reference: activations beside 8-bit floats, and beside
# matrices that stayed bfloat16, are rounded to bfloat16.
CHECKPOINTS = {
    "gguf/tinyq-Q4_K_M.gguf": 1e-3,
    "gguf/tinyq-Q2_K.gguf": 1e-3,
    "gguf/tinyq-Q5_K_M.gguf": 1e-3,
    "gguf/tinyq-MXFP4.gguf": 1e-3,
    "compressed-tensors/fp8-block": 1e-2,
    "compressed-tensors/w8a8": 1e-2,
    "compressed-tensors/w4a16-asym": 1e-2,
    "compressed-tensors/nvfp4a16": 1e-2,
    "misc/bitsandbytes-nf4-double": 1e-2,
    "misc/gpt-oss-mxfp4": 1e-2,
    "gptq-awq/awq-g128": 1e-2,
    "gptq-awq/gptq-4bit-g32-asym-actorder": 1e-2,
    "gptq-awq/gptq-8bit-g128": 1e-2,
    "mlx/mlx-6bit-g64": 1e-2,
}


def opened(path: Path, device: str, num_gpus: int = 1) -> Description:
    how = {"device": device, "tensor_parallel_size": num_gpus}
    return describe(EngineConfig.from_keywords(model=str(path), **how))


def golden_of(path: Path) -> Any:
    """Return the golden logits of a checkpoint, of the first two prompts."""
    file = path.with_suffix(".golden.json") if path.suffix else path / "golden.json"
    golden = json.loads(file.read_text())
    return golden | {"prompts": golden["prompts"][:2]}


def loaded(facts: Description) -> Paged:
    """Return a model whose weights were uploaded as a GPU's are, or those of several."""
    ranks = facts.config.tensor_parallel_size
    accelerator = InterpretedAccelerator() if ranks == 1 else InterpretedGroup(ranks)

    def make(
        program: Any, weights: WeightPlan, *, num_blocks: list[int], block_size: int, num_slots: int, **_: Any
    ) -> CudaBackend:
        capacity = Capacity(num_blocks, block_size, "float32", num_slots)
        program = divided.divide(program, ranks, axes_of(weights))
        return CudaBackend(program, upload(weights, accelerator), accelerator, capacity)

    return Paged(facts.program, facts.weights, num_blocks=32, make=make)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_as_near_as_those_of_the_reference(name: str, shared_data: Path) -> None:
    """Every kernel that a checkpoint asks for is compiled, and neither chunks nor company change a bit."""
    path = shared_data / "quantized" / name
    golden, facts = golden_of(path), opened(path, "cuda-interpreted")
    capacity = Capacity([8] * len(facts.program.cache_groups), 16, "bfloat16", 4)
    require_compiled(facts.program, facts.weights.layout, capacity, InterpretedAccelerator())
    reference, own = opened(path, "reference"), loaded(facts)
    allowed = error_of(reference.model, Paged(reference.program, load(reference.weights)), golden)
    assert abs(error_of(facts.model, own, golden) - allowed) < CHECKPOINTS[name]
    tokens = golden["prompts"][1]["ids"]
    first = own.prefill(own.sequence(tokens))
    beside, _ = in_parts(own, [tokens, tokens[4:9]], [(3, 1, len(tokens) - 4), (1, 1, 3)])
    assert same_bits(beside, first)


@pytest.mark.parametrize(
    "name", ["gguf/tinyq-Q4_K_M.gguf", "compressed-tensors/fp8-block", "gptq-awq/gptq-4bit-g32-asym-actorder"]
)
def test_codes_are_divided_among_gpus(name: str, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided, "LEAST_SIZE", 0)
    path = shared_data / "quantized" / name
    tokens, found = golden_of(path)["prompts"][1]["ids"][:8], []
    for num_gpus in (1, 2):
        own = loaded(opened(path, "cuda-interpreted", num_gpus))
        found.append(own.prefill(own.sequence(tokens)))
    assert same_bits(*found)


def test_memory_is_that_of_the_file(shared_data: Path) -> None:
    """The weights of Q4_K_M take on the accelerator what they take in the file, but for 3 in 100.

    Vectors are small; each array is padded to 256 bytes.
    """
    path = shared_data / "quantized" / "gguf-demo" / "demo-Q4_K_M.gguf"
    plan = opened(path, "cuda-interpreted").weights
    matrices = [spec for spec in plan.specs.values() if len(spec.shape) > 1]
    stored = sum(plan.stored[spec.name].nbytes(spec.shape) for spec in matrices)
    assert stored < plan.layout.nbytes < 1.03 * stored + 256 * 4 * len(plan.specs)
    assert plan.layout.nbytes < 0.7 * sum(prod(spec.shape) for spec in matrices)


def test_what_has_no_kernel_is_refused_by_name(shared_data: Path) -> None:
    with pytest.raises(ConfigError, match="heads have 40 numbers"):
        opened(shared_data / "quantized" / "fp8" / "block128-ragged", "cuda-interpreted")
