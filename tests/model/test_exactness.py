"""The exactness contract on the demo model: the same tokens and logprob bits, whatever the company."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from quire.program import numerics
from quire.program.ops import linear

SYSTEM = "You are a helpful assistant that answers in short and simple words. "
PROMPTS = [
    SYSTEM + "Tell me a story about a fox and a lantern.",
    SYSTEM + "What is 3 + 4?",
    "Hi",
    SYSTEM + "Sort these words: pear, apple, fig. " * 6,
    "Once upon a time there was a small boat. " * 9,
    SYSTEM + "Tell me a story about a fox and a kite.",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=20, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=20, seed=-5, max_tokens=30, logprobs=1, n=3, ignore_eos=True),
    SamplingParams(
        temperature=0.7, repetition_penalty=1.3, seed=1, max_tokens=16, logprobs=1, ignore_eos=True
    ),
    SamplingParams(temperature=0, max_tokens=8, logprobs=0, prompt_logprobs=2),
    SamplingParams(
        temperature=1.2, min_p=0.05, presence_penalty=0.5, seed=3, max_tokens=24, logprobs=2, ignore_eos=True
    ),
]


Maker = Callable[..., LLM]


def fingerprint(output: RequestOutput) -> str:
    """Token ids and float32 logprob bits of everything a request was given."""
    digest = hashlib.sha256()
    for sequence in output.outputs:
        digest.update(np.array(sequence.token_ids).tobytes())
        for position in sequence.logprobs or []:
            _take(digest, position)
    for position in output.prompt_logprobs or []:
        _take(digest, position or {})
    return digest.hexdigest()


def _take(digest: Any, position: dict[int, Any]) -> None:
    for token_id, entry in position.items():
        digest.update(struct.pack("<if", token_id, entry.logprob))


@pytest.fixture(scope="module", params=["native", "reference"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def make(device: str) -> Maker:
    return partial(LLM, "demo", device=device)


def run_together(llm: LLM) -> list[str]:
    slow = llm.config.device == "reference" and llm.config.quantization is not None
    params = [replace(own, max_tokens=6) for own in PARAMS] if slow else PARAMS
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.num_running == 0
    return [fingerprint(output) for output in outputs]


@pytest.fixture(scope="module")
def alone(make: Maker) -> list[str]:
    """Every request by itself in a new engine, the prompt in one chunk, nothing cached, nothing drafted."""
    prints = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        llm = make(enable_prefix_caching=False, speculative="off")
        prints.append(fingerprint(llm.generate(prompt, params, use_tqdm=False)[0]))
        llm.close()
    return prints


VARIANTS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 33": {"max_num_batched_tokens": 33, "enable_prefix_caching": False},
    "two at a time": {"max_num_seqs": 2},
    "blocks of 8": {"block_size": 8, "max_num_batched_tokens": 50},
    "blocks of 64": {"block_size": 64},
    "four at a time": {"max_num_seqs": 4, "max_num_batched_tokens": 90},
    "two in flight": {"max_steps_in_flight": 2},
    "two in flight, chunks of 7": {"max_steps_in_flight": 2, "max_num_batched_tokens": 7, "max_num_seqs": 3},
    "no drafts": {"speculative": "off", "max_num_batched_tokens": 60},
    "a draft model": {"speculative": "demo-draft"},
    "a draft model, two in flight": {"speculative": "demo-draft", "max_steps_in_flight": 2, "block_size": 8},
    "fair policy": {"scheduling_policy": "fair", "max_num_batched_tokens": 40},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_same_bits_in_any_company(name: str, make: Maker, alone: list[str]) -> None:
    llm = make(**VARIANTS[name])
    assert run_together(llm) == alone
    llm.close()


def test_same_bits_on_a_cache_hit(make: Maker, alone: list[str]) -> None:
    llm = make()
    assert run_together(llm) == alone
    cached = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [fingerprint(output) for output in cached] == alone
    assert sum(output.num_cached_tokens for output in cached) > 100
    llm.close()


@pytest.mark.parametrize("num_steps", [1, 2])
def test_same_bits_after_preemption(num_steps: int, make: Maker, device: str, alone: list[str]) -> None:
    program = make().engine.runner._backend.program  # type: ignore[attr-defined]
    token_bytes = program.kv_token_bytes(4 if device == "reference" else 2)
    memory = {"max_model_len": 160, "kv_cache_memory_bytes": token_bytes * 176}
    llm = make(**memory, max_num_batched_tokens=64, max_steps_in_flight=num_steps, speculative="off")
    assert run_together(llm) == alone
    assert llm.engine.scheduler.num_preemptions > 0
    llm.close()


def test_float16_cache_is_exact_too(make: Maker) -> None:
    prints = []
    for options in ({"max_num_batched_tokens": 9}, {"max_num_seqs": 1, "enable_prefix_caching": False}):
        llm = make(kv_cache_dtype="float16", **options)
        prints.append(run_together(llm))
        llm.close()
    assert prints[0] == prints[1]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_are_exact_too(quantization: str, make: Maker) -> None:
    prints = []
    for options in ({"max_num_batched_tokens": 9}, {"max_num_seqs": 1, "enable_prefix_caching": False}):
        llm = make(quantization=quantization, **options)
        prints.append(run_together(llm))
        llm.close()
    assert prints[0] == prints[1]


@pytest.mark.parametrize("num_threads", [1, 3, 4])
def test_same_bits_on_any_number_of_threads(num_threads: int, make: Maker, alone: list[str]) -> None:
    llm = make(num_threads=num_threads)
    assert run_together(llm) == alone
    llm.close()


@pytest.mark.parametrize("device", ["reference"], indirect=True)
def test_an_order_that_depends_on_the_batch_is_noticed(
    make: Maker, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: split the sum in two when there are several rows, and bits must differ."""

    def careless(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        half = x.shape[1] // 2 if len(x) > 1 else 0
        first = numerics.matmul(x[:, :half], weight[:, :half]) if half else np.float32(0)
        return first + numerics.matmul(x[:, half:], weight[:, half:])

    monkeypatch.setattr(linear, "matmul", careless)
    llm = make()
    assert run_together(llm) != alone
    llm.close()
