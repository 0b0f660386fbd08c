"""Steps sampled on the accelerator: for every parameter the tokens of the host, whatever else runs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hashed import hashed, lazy
from safetensors.numpy import save_file
from tiny import CONFIGS, VOCAB, random_weights

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.models import read_model

__all__ = ["lazy"]
_RANDOM = np.random.default_rng(5)
ANY = SamplingParams(temperature=1.0, max_tokens=7, detokenize=False, ignore_eos=True, seed=11)
WORDS = StructuredOutputsParams(regex="([a-z]{2,4} ){3}end")
HOWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6, "n": 2},
    "top-k": {"top_k": 5, "seed": -9},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1, "temperature": 1.7},
    "all of these": {"top_k": 12, "top_p": 0.8, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.9, "temperature": 0.0},
    "frequency": {"frequency_penalty": 1.3, "temperature": 0.0},
    "presence": {"presence_penalty": -0.8, "logprobs": 2},
    "bias": {"logit_bias": {3: 4.0, 9: -100.0, 12: 100.0}, "temperature": 1.9},
    "allowed": {"allowed_token_ids": list(range(1, VOCAB, 3))},
    "bad words": {"bad_words_token_ids": ((5,), (8,), (30,)), "logit_bias": {8: 50.0}},
    "stop tokens": {"stop_token_ids": list(range(1, 20)), "min_tokens": 3, "max_tokens": 6},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2, "min_tokens": 2, "stop_token_ids": [4, 5]},
    "chosen ones": {"logprobs": 0, "prompt_logprobs": 0, "temperature": 0.0},
    "impossible": {"allowed_token_ids": [7, 14], "max_tokens": 3},
    "all listed": {"logprobs": -1},
    "phrases": {"bad_words_token_ids": ((5, 6), (8,), (9, 1, 2)), "prompt_logprobs": 1},
}
ON_HOST = {"all listed", "phrases"}
PARAMS = {name: replace(ANY, **how) for name, how in HOWS.items()}
PROMPTS = [_RANDOM.integers(3, VOCAB, 3 + 5 * i % 13).tolist() for i in range(len(PARAMS))]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of a tiny model, of which only the sizes matter."""
    folder, config = tmp_path_factory.mktemp("tiny"), CONFIGS["qwen3"]
    program = read_model(config).program
    save_file({n: w.array for n, w in random_weights(program).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make(model: str, device: str, **options: Any) -> LLM:
    how: dict[str, Any] = {"block_size": 8, "speculative": "off", "max_model_len": 64, **options}
    return hashed(LLM(model, device=device, **how))


def ask(llm: LLM, names: list[str]) -> Found:
    """Tokens, ends, errors and log-probabilities of all requests, the latter apart."""
    asked = [{"prompt_token_ids": PROMPTS[list(PARAMS).index(name)]} for name in names]
    outputs = llm.generate(asked, [PARAMS[name] for name in names], use_tqdm=False)
    llm.engine.scheduler.check()
    llm.close()
    return {name: gist(output) for name, output in zip(names, outputs, strict=True)}


def gist(output: Any) -> Any:
    each = [(one.token_ids, one.finish_reason, one.stop_reason, one.error) for one in output.outputs]
    listed = [position for one in output.outputs for position in one.logprobs or ()]
    listed += [position for position in output.prompt_logprobs or () if position]
    entries = [(token, one.rank, one.logprob) for position in listed for token, one in position.items()]
    return each, [entry[:2] for entry in entries], [entry[2] for entry in entries]


def same(found: Found, wanted: Found) -> None:
    """Compare all that is an integer exactly, and log-probabilities to a rounding."""
    for name, (each, entries, logprobs) in found.items():
        assert (each, entries) == wanted[name][:2], name
        np.testing.assert_allclose(logprobs, wanted[name][2], rtol=3e-7, err_msg=name)


@pytest.fixture(scope="module")
def wanted(model: str) -> Found:
    """What the reference backend gives, sampled by the host."""
    return ask(make(model, "reference"), list(PARAMS))


def test_every_parameter_is_sampled_as_on_the_host(model: str, lazy: None, wanted: Found) -> None:
    llm = make(model, "cuda-interpreted", max_steps_in_flight=2, max_num_batched_tokens=40)
    backend: Any = llm.engine.runner._backend  # type: ignore[attr-defined]
    found = ask(llm, [name for name in PARAMS if name not in ON_HOST])
    same(found, wanted)
    assert wanted["impossible"][0][0][3] is not None
    assert {"feed_tokens", "place_entries", "penalize_logits", "top_logprobs"} <= set(
        backend._accelerator.kernels
    )
    for name, one in ask(make(model, "cuda-interpreted"), list(PARAMS)).items():
        if name in ON_HOST:
            assert one == wanted[name]
        else:
            assert one == found[name], name
