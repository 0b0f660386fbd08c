"""lm-eval's client of completions: its sums of logprobs are the engine's own, bit for bit."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from server import PYTHON, Server, running

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix
completions = pytest.importorskip("lm_eval.models.openai_completions")
instance = pytest.importorskip("lm_eval.api.instance")

PAIRS = [
    ("Once upon a time", " there was a dragon"),
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a small green frog, who sang all night."),
    ("2 + 2 =", " 4"),
    ("word " * 150, "word word"),
    ("Zoë and the café — 東京", ", a dragon 🐉"),
    ("A", " b"),
]


@pytest.fixture(scope="module", params=["native", "reference"])
def device(request: pytest.FixtureRequest) -> str:
    """What computes on both sides."""
    return str(request.param)


@pytest.fixture(scope="module")
def served(device: str) -> Iterator[Server]:
    with running("--device", device) as server:
        yield server


def client_of(server: Server, **options: Any) -> Any:
    return completions.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model="demo", max_length=1024, **options
    )


def offline(device: str, prompts: list[list[int]]) -> list[list[tuple[float, bool]]]:
    """(logprob, most likely?) of every token but the first of each prompt."""
    return _run_offline(json.dumps({"device": device, "prompts": prompts}))


@cache
def _run_offline(asked: str) -> list[list[tuple[float, bool]]]:
    script = str(Path(__file__).with_name("offline.py"))
    run = subprocess.run([PYTHON, script], input=asked, capture_output=True, text=True, check=True)
    found: list[list[tuple[float, bool]]] = json.loads(run.stdout)
    return found


def requests(kind: str, arguments: list[Any]) -> list[Any]:
    return [instance.Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"num_concurrent": 8}, {"tokenized_requests": False}])
def test_sums_are_the_engines_own(served: Server, device: str, options: Any) -> None:
    client = client_of(served, **options)
    assert client.tokenizer_backend == "remote"
    found = client.loglikelihood(requests("loglikelihood", PAIRS))
    encoded = [client._encode_pair(*pair) for pair in PAIRS]
    own = offline(device, [context + continuation for context, continuation in encoded])
    for (logprob, greedy), (_, continuation), entries in zip(found, encoded, own, strict=True):
        last = entries[-len(continuation) :]
        assert logprob == sum(value for value, _ in last)
        assert greedy == all(best for _, best in last)
    assert len({greedy for _, greedy in found}) == 2
    other = offline("reference", [context + continuation for context, continuation in encoded])
    for entries, others in zip(own, other, strict=True):
        assert sum(v for v, _ in entries) == pytest.approx(sum(v for v, _ in others), rel=1e-2, abs=0.05)


def test_perplexity_of_a_text(served: Server, device: str) -> None:
    client = client_of(served, batch_size=2)
    text = "Once upon a time there was a fox. " * 3
    (found,) = client.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]))
    tokens = [client.prefix_token_id, *client.tok_encode(text)]
    (entries,) = offline(device, [tokens])
    assert found == sum(value for value, _ in entries)


def test_generation(served: Server) -> None:
    client = client_of(served)
    until = {"until": ["."], "max_gen_toks": 40}
    prompts = [pair[0] for pair in PAIRS]
    found = client.generate_until(requests("generate_until", [(prompt, dict(until)) for prompt in prompts]))
    assert any(found)
    with served.client() as own:
        body = {"prompt": prompts, "temperature": 0, "max_tokens": 40, "stop": "."}
        choices = own.post("/v1/completions", json=body).json()["choices"]
    assert found == [choice["text"] for choice in choices]
