"""Every family on every instruction set: its logits against those of the reference backend, from one
checkpoint, in every format of weights; and the published results of the golden checkpoints.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from lowered import (
    BF16_ISAS,
    FORMATS,
    ISAS,
    distance,
    native,
    on_native,
    on_reference,
    plain,
    planned,
    rounding_to_bf16,
    rounds_to_bf16,
    tensors,
)
from test_goldens import TINY_RANDOM, TINY_RANDOM_2, check_stories, check_tiny_random
from tiny import CONFIGS, VOCAB, Dense, Paged, random_weights, tiny

from quire import LLM, SamplingParams
from quire.backends.native import _core
from quire.backends.native.weights import load_packed
from quire.models import Model, read_model
from quire.program.passes import fuse
from quire.weights.safetensors import Checkpoint

LENGTHS = (70, 12, 12, 10, 8, 8)  # the first leaves every window, and takes the rope of long contexts
CLOSE = 2e-5  # parts of the largest logit
COARSE = 2e-2  # the same where a checkpoint's activations are rounded
# Random delta nets make ten times as much of noise as other layers: what the folder says of each. One token
# of phimoe has experts at the edge of what counts: the reference, rounded alike, is as far off.
SENSITIVE = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "phimoe")
SPOILED, SPOILED_BY = 2, 5e-2  # so many sequences at most, by so much at most, where activations are rounded


@cache
def model_of(name: str) -> tuple[Model, dict[str, Dense]]:
    model = tiny(name)
    return model, random_weights(model.program)


def run(paged: Paged, model: Model) -> list[np.ndarray]:
    """The logits of several sequences in one step, [tokens, vocab] each."""
    rng = np.random.default_rng(1)
    rows = [
        (paged.sequence(rng.integers(0, VOCAB, n).tolist(), model.context_variant(n)), n) for n in LENGTHS
    ]
    return paged.step(rows)


@cache
def expected(name: str, format: str, rounded: bool) -> list[np.ndarray]:
    model, weights = model_of(name)
    with rounding_to_bf16(rounded):
        return run(on_reference(plain(fuse(model.program)), tensors(weights, format), format), model)


def errors_of(name: str, weights: dict[str, Dense], format: str, isa: str) -> list[float]:
    """How far each sequence of a model with these weights is from the reference with its own."""
    model, _ = model_of(name)
    found = run(on_native(plain(fuse(model.program)), tensors(weights, format), format, isa), model)
    clean = expected(name, format, rounds_to_bf16(isa, format))
    assert all((a.argmax(axis=-1) == b.argmax(axis=-1)).all() for a, b in zip(found, clean, strict=True))
    return [distance(a, b) for a, b in zip(found, clean, strict=True)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_reference(name: str, isa: str) -> None:
    """Where activations are rounded, one may fall to the other side of a half, as the last bits of a float
    before it differ: that spoils the rest of its sequence, and no other.
    """
    for format in FORMATS:
        errors = errors_of(name, model_of(name)[1], format, isa)
        if format in ("int8", "int4") or rounds_to_bf16(isa, format):
            assert sum(error > CLOSE for error in errors) <= SPOILED, format
            assert max(errors) < SPOILED_BY, format
        else:
            assert max(errors) < CLOSE, format


@pytest.mark.parametrize("isa", ISAS)
def test_a_small_change_is_noticed(isa: str) -> None:
    """The control: a thousandth on one vector of one layer spoils every sequence in every format."""
    weights = model_of("llama")[1]
    name = "model.layers.1.post_attention_layernorm.weight"
    other = {**weights, name: Dense(weights[name].array * np.float32(1.001))}
    for format in ("f32", "f16", "int4"):
        assert min(errors_of("llama", other, format, isa)) > CLOSE, format


def load(folder: Path, isa: str) -> tuple[Model, Paged]:
    model = read_model(json.loads((folder / "config.json").read_text()))
    program = fuse(model.program)
    packed = load_packed(planned(program, Checkpoint.open(folder)), isa=isa, nodes=_core.Nodes(1))
    return model, Paged(program, packed, num_blocks=300, make=native(isa))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", TINY_RANDOM)
def test_tiny_random(name: str, isa: str, shared_data: Path) -> None:
    folder = shared_data / "models" / "tiny-random" / name
    coarse = COARSE if isa in BF16_ISAS and "bf16" in name else None
    check_tiny_random(folder, *load(folder, isa), coarse)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", TINY_RANDOM_2)
def test_tiny_random_2(name: str, isa: str, shared_data: Path) -> None:
    folder = shared_data / "models" / "tiny-random-2" / name
    coarse = (8e-2 if name in SENSITIVE else COARSE) if isa in BF16_ISAS else None
    check_tiny_random(folder, *load(folder, isa), coarse)


@pytest.mark.parametrize("isa", [ISAS[0], ISAS[-1]])
def test_stories(isa: str, shared_data: Path) -> None:
    folder = shared_data / "models" / "stories260K"
    check_stories(folder, *load(folder, isa))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "phi3-longrope"])
def test_greedy_tokens_through_the_public_interface(
    name: str, isa: str, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QUIRE_ISA names the instruction set; prompts run side by side, whole or in chunks."""
    monkeypatch.setenv("QUIRE_ISA", isa)
    folder = shared_data / "models" / "tiny-random" / name
    prompts = json.loads((folder / "golden.json").read_text())["prompts"]
    params = [
        SamplingParams(temperature=0, max_tokens=len(p["greedy"]), ignore_eos=True, detokenize=False)
        for p in prompts
    ]
    inputs = [{"prompt_token_ids": p["ids"]} for p in prompts]
    for batched_tokens in (512, 9):
        llm = LLM(str(folder), device="native", num_threads=2, max_num_batched_tokens=batched_tokens)
        outputs = llm.generate(inputs, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [p["greedy"] for p in prompts]
        llm.close()
