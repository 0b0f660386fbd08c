"""Engines on the interpreted accelerator: tokens of the reference, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_accelerator import CHECKPOINT, write_checkpoint
from stores import wait_until
from test_exactness import fingerprint
from tiny import VOCAB

from quire import LLM, SamplingParams
from quire.engine import fetches
from quire.models import read_model

_RANDOM = np.random.default_rng(3)
SHARED = _RANDOM.integers(3, VOCAB, 9).tolist()
PROMPTS = [SHARED + _RANDOM.integers(3, VOCAB, n).tolist() for n in (5, 1)] + [[7, 8, 9]]
SHORT = SamplingParams(temperature=0, max_tokens=5, logprobs=2, detokenize=False, ignore_eos=True)
PARAMS = [
    replace(SHORT, max_tokens=7),
    replace(SHORT, temperature=0.9, top_p=0.9, seed=7),
    replace(SHORT, temperature=1.1, top_k=12, seed=-5, repetition_penalty=1.3, prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of a tiny model with random weights."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def make(model: str, **options: Any) -> LLM:
    how: dict[str, Any] = {"device": "cuda-interpreted", "block_size": 8, "speculative": "off"}
    return LLM(model, **{"max_model_len": 64, **how, **options})


def ask(llm: LLM, params: list[SamplingParams] = PARAMS) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    llm.engine.scheduler.check()
    return outputs


@pytest.fixture(scope="module")
def alone(model: str) -> Iterator[list[str]]:
    """Every request by itself, the prompt in one chunk, nothing cached."""
    llm = make(model, enable_prefix_caching=False, max_num_seqs=1)
    yield [fingerprint(output) for output in ask(llm)]
    llm.close()


def logprobs_of(output: Any) -> list[float]:
    return [entry.logprob for position in output.outputs[0].logprobs for entry in position.values()]


def test_tokens_are_those_of_the_reference(model: str) -> None:
    found, wanted = (ask(make(model, device=device)) for device in ("cuda-interpreted", "reference"))
    for own, other in zip(found, wanted, strict=True):
        assert own.outputs[0].token_ids == other.outputs[0].token_ids
        np.testing.assert_allclose(logprobs_of(own), logprobs_of(other), atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "block_size": 16},
        {"max_steps_in_flight": 2, "max_num_batched_tokens": 24},
        {"speculative": "auto"},
    ],
    ids=["together", "chunks of 7", "two in flight", "drafts"],
)
def test_same_bits_in_any_company(model: str, alone: list[str], options: dict[str, Any]) -> None:
    llm = make(model, **options)
    assert [fingerprint(output) for output in ask(llm)] == alone
    llm.close()


def test_same_bits_on_a_cache_hit_and_from_a_store(
    model: str, alone: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing a block is taken to last a second, so that fetching is always worth waiting for."""
    monkeypatch.setattr(fetches.Fetches, "_compute_s", lambda _, first, end: float(end - first))
    kept = {"prefix_cache_dir": str(tmp_path)}
    llm = make(model, **kept)
    assert [fingerprint(output) for output in ask(llm)] == alone
    outputs = ask(llm)
    assert [fingerprint(output) for output in outputs] == alone
    assert sum(output.num_cached_tokens for output in outputs) >= 16
    llm.close()
    other = make(model, **kept)
    store = other.engine.exchange.store
    wait_until(lambda: store.ready)
    outputs = ask(other)
    assert [fingerprint(output) for output in outputs] == alone
    assert sum(output.num_cached_tokens for output in outputs) >= 16
    other.close()


def test_same_bits_after_preemption(model: str) -> None:
    longer = [replace(one, max_tokens=10) for one in PARAMS]
    alone = make(model, enable_prefix_caching=False, max_num_seqs=1)
    wanted = [fingerprint(output) for output in ask(alone, longer)]
    alone.close()
    token_bytes = read_model(CHECKPOINT).program.kv_token_bytes(4)
    llm = make(model, max_model_len=24, kv_cache_memory_bytes=token_bytes * 40, enable_prefix_caching=False)
    assert [fingerprint(output) for output in ask(llm, longer)] == wanted
    assert llm.engine.scheduler.num_preemptions > 0
    llm.close()
