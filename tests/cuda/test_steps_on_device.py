"""Steps sampled on the accelerator: for every parameter the tokens of the host, whatever else runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from constrained import verify_all
from hashed import hashed, lazy
from on_accelerator import CHECKPOINT, write_checkpoint
from tiny import VOCAB

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.backends.cuda.backend import CudaBackend
from quire.backends.cuda.kernels.variants import variants
from quire.backends.cuda.manifest import launch_key
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
    "rewarded": {"frequency_penalty": -0.6, "logprobs": 1, "temperature": 0.0},
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
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def make(model: str, device: str, **options: Any) -> LLM:
    how: dict[str, Any] = {"block_size": 8, "speculative": "off", "max_model_len": 64, **options}
    return hashed(LLM(model, device=device, **how))


def ask(llm: LLM, names: list[str], **more: Any) -> Found:
    """Tokens, ends, errors and log-probabilities of all requests, the latter apart."""
    asked = [{"prompt_token_ids": PROMPTS[list(PARAMS).index(name)]} for name in names]
    outputs = llm.generate(asked, [replace(PARAMS[name], **more) for name in names], use_tqdm=False)
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
    launches = backend._accelerator.launches
    wanted_kernels = {"feed_tokens", "place_entries", "penalize_logits", "top_logprobs"}
    assert wanted_kernels <= {launch.kernel for launch in launches}
    compiled = {variant.key for variant in variants()}
    asked = set(map(launch_key, launches))
    assert asked - compiled == set()
    for name, one in ask(make(model, "cuda-interpreted"), list(PARAMS)).items():
        if name in ON_HOST:
            assert one == wanted[name]
        else:
            assert one == found[name], name


def test_logits_of_steps_in_flight_are_not_kept(
    model: str, lazy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger step would have memory beside them, of which there is as much as it needs."""
    begin, begun = CudaBackend._begin, list[Any]()
    monkeypatch.setattr(CudaBackend, "_begin", lambda *args: begun.append(begin(*args)) or begun[-1])
    ask(make(model, "cuda-interpreted", max_steps_in_flight=2), ["greedy", "chosen ones"])
    assert len(begun) > 2
    assert all(one.logits is None for one in begun)


def test_prompts_whose_log_probabilities_take_several_launches(
    model: str, lazy: None, wanted: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.backends.cuda.sampler.MOST_DRAWS", 4)
    llm = make(model, "cuda-interpreted")
    backend: Any = llm.engine.runner._backend  # type: ignore[attr-defined]
    same(ask(llm, ["log-probabilities", "chosen ones"]), wanted)
    ofs = Counter((launch.kernel, launch.grid[0]) for launch in backend._accelerator.launches)
    assert min(ofs["top_logprobs", 4], ofs["token_logprobs", 4]) > 2


def test_alone_and_after_preemption(model: str, lazy: None, wanted: Found) -> None:
    """The counts of tokens, and all else, are rebuilt from the tokens, while others are in flight."""
    names = ["repetition", "frequency", "top-p", "bias"]
    for name in names:
        same(ask(make(model, "cuda-interpreted", max_num_seqs=1), [name]), wanted)
    token_bytes = read_model(CHECKPOINT).program.kv_token_bytes(4)
    few = {"kv_cache_memory_bytes": token_bytes * 48, "max_model_len": 32, "enable_prefix_caching": False}
    llm = make(model, "cuda-interpreted", max_steps_in_flight=2, **few)
    same(ask(llm, names), wanted)
    assert llm.engine.scheduler.num_preemptions > 0


def test_drafts_from_texts(model: str, lazy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that repeat are drafted, and accepted or not as they are drawn, by rows with counts too."""
    monkeypatch.setattr("quire.engine.speculation.choose_lengths", verify_all)
    monkeypatch.setattr("quire.engine.verify_times.FEW_ROWS", 8)
    monkeypatch.setattr("hashed.PERIOD", 2)
    names = ["greedy", "all of these", "repetition", "rewarded", "presence", "stop tokens", "phrases"]
    plain = ask(make(model, "reference"), names, max_tokens=16)
    llm = make(model, "cuda-interpreted", speculative="auto", max_steps_in_flight=2)
    same(ask(llm, names, max_tokens=16), plain)
    drafted = [record.num_drafted for record in llm.engine.records]
    accepted = [record.num_accepted for record in llm.engine.records]
    assert sum(drafted) > sum(accepted) > 0


def test_grammars_in_company(lazy: None) -> None:
    """Masks are those of the grammar; beside it, tokens are those that a request has without company."""
    structured = replace(ANY, structured_outputs=WORDS, ignore_eos=False, max_tokens=10)
    late = replace(structured, min_tokens=4)
    params = [structured, replace(structured, temperature=0, logit_bias={5: 2.0}), late, ANY]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[: len(params)]]
    found = []
    for device, options in (("reference", {}), ("cuda-interpreted", {"max_steps_in_flight": 2})):
        how: dict[str, Any] = {"max_model_len": 64, "speculative": "auto", **options}
        llm = hashed(LLM("demo", device=device, **how))
        found.append([gist(output) for output in llm.generate(prompts, params, use_tqdm=False)])
        llm.close()
    assert found[0] == found[1]
    assert sum(record.num_accepted for record in llm.engine.records) > 0
