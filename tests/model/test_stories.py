"""The trained 260K-parameter Llama: golden text, tokens and log-probabilities, through the public API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> Path:
    return shared_data / "models" / "stories260K"


@pytest.fixture(scope="module")
def goldens(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "golden.json").read_text())["prompts"]


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_num_batched_tokens=128)


def test_text_and_tokens(llm: LLM, goldens: list[dict[str, Any]]) -> None:
    """All goldens in one batch. What they ignore, stop tokens, is ignored here."""
    params = [
        SamplingParams(temperature=0, max_tokens=golden["max_new_tokens"], ignore_eos=True, logprobs=5)
        for golden in goldens
    ]
    outputs = llm.generate([golden["prompt"] for golden in goldens], params, use_tqdm=False)
    for output, golden in zip(outputs, goldens, strict=True):
        choice = output.outputs[0]
        assert output.prompt_token_ids == golden["prompt_ids"], golden["name"]
        assert choice.token_ids == golden["token_ids"], golden["name"]
        if golden["prompt"]:  # the golden text of an empty prompt has no space before its first word
            assert choice.text.strip() == golden["text"].strip(), golden["name"]
        assert choice.logprobs is not None
        for position, top in zip(choice.logprobs, golden["top5"], strict=True):
            wanted = dict(zip(top["ids"], top["logprobs"], strict=True))
            assert {i: entry.logprob for i, entry in position.items()} == pytest.approx(wanted, abs=1e-3)


def test_prompt_logprobs(llm: LLM, goldens: list[dict[str, Any]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([golden["prompt"] for golden in goldens], params, use_tqdm=False)
    for output, golden in zip(outputs, goldens, strict=True):
        scored = output.prompt_logprobs or [None]
        assert scored[0] is None
        entries = zip(scored[1:], golden["prompt_ids"][1:], strict=True)
        got = [entry[token].logprob for entry, token in entries if entry]
        np.testing.assert_allclose(got, golden["prompt_logprobs"][1:], atol=1e-3)


def test_a_prompt_that_fills_the_context_ends_with_it(llm: LLM, goldens: list[dict[str, Any]]) -> None:
    golden = goldens[-1]
    assert len(golden["prompt_ids"]) + len(golden["token_ids"]) == 512
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    choice = llm.generate(golden["prompt"], params, use_tqdm=False)[0].outputs[0]
    assert choice.token_ids == golden["token_ids"]
    assert choice.finish_reason == "length"
