"""A draft model by its name: which may draft for which, the memory it takes, and what is told of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.backends.device import device_for
from quire.backends.draft_model import spare_blocks
from quire.backends.native.device import NativeLoops
from quire.config import EngineConfig
from quire.description import Description, describe
from quire.errors import ConfigError
from quire.memory import misfit, summary
from quire.program import Load
from quire.roofline import probe
from quire.roofline.law import fold_costs, fold_draft_costs
from quire.weights.hub import DEMO, EMBEDDED

GB = 10**9


def described(**options: Any) -> Description:
    return describe(EngineConfig(**{"device": "reference", "speculative": "demo-draft", **options}))


def folder(path: Path, **changed: Any) -> str:
    """The embedded draft model with another configuration."""
    shutil.copytree(EMBEDDED["demo-draft"], path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changed))
    return str(path)


def test_the_embedded_draft_model_drafts_for_the_demo() -> None:
    facts = described()
    assert facts.draft is not None
    assert (facts.draft.name, facts.draft.max_len, facts.draft.max_tokens) == ("demo-draft", 1024, 512)
    alone = described(speculative="off")
    assert alone.draft is None
    assert facts.fingerprint == alone.fingerprint


def test_its_memory_is_counted() -> None:
    """Weights, caches on the blocks of the model, spare blocks, and what a step of it needs."""
    facts, alone = described(max_num_seqs=4), described(max_num_seqs=4, speculative="auto")
    got, without = facts.memory, alone.memory
    draft, program = got.draft, facts.draft.program  # type: ignore[union-attr]
    assert draft is not None
    token_bytes = program.kv_token_bytes(4)
    assert got.blocks == without.blocks
    assert draft.weight_bytes == 4 * sum(spec.size for spec in program.weights().values())
    assert got.kv_bytes - without.kv_bytes == got.num_tokens * token_bytes
    assert got.total_bytes - without.total_bytes == got.draft_bytes
    spare = 4 * spare_blocks(16) * 16 * token_bytes
    one, more = (described(max_num_seqs=4, max_num_batched_tokens=n).memory.draft for n in (4, 8))
    assert one is not None
    assert more is not None
    assert spare < one.activation_bytes < more.activation_bytes
    assert f", {got.draft_bytes / 1e6:.3g} MB of it for the draft model, of " in summary(got)
    assert "draft model" not in summary(without)


def test_a_draft_model_can_be_too_much() -> None:
    from quire import memory

    facts = described(max_num_seqs=1, max_model_len=64)
    needed = facts.memory.needed_bytes(facts.memory.kv_bytes)
    for available, fits in ((needed, True), (needed - 1, False)):
        plan = replace(facts.memory, available_bytes=available)
        assert (misfit(plan, facts.config, facts.device) is None) == fits
    one = EngineConfig(device="reference", kv_cache_memory_bytes=10**7)
    sizes = [
        memory.plan_memory(facts.device, facts.program, facts.weights, one, 64, GB, draft).num_tokens
        for draft in (None, facts.draft)
    ]
    assert sizes[1] < sizes[0]


def test_what_cannot_draft(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculative = 'no-such': model 'no-such'") as caught:
        described(speculative="no-such")
    assert caught.value.hint
    path = folder(tmp_path / "windowed", sliding_window=24, architectures=["MistralForCausalLM"])
    with pytest.raises(ConfigError, match=r"looks back at all tokens, but the model keeps no more than 24"):
        described(model=path)


def test_the_vocabulary_must_be_the_same(tmp_path: Path) -> None:
    """Tokens that only one of them has, and padding, make no difference."""
    path = folder(tmp_path / "other")
    held = json.loads((DEMO / "tokenizer.json").read_text())
    tokenizer = tmp_path / "other" / "tokenizer.json"
    more = {"id": 2048, "content": "<more>", "special": True, "single_word": False, "lstrip": False}
    more |= {"rstrip": False, "normalized": False}
    tokenizer.write_text(json.dumps({**held, "added_tokens": [*held["added_tokens"], more]}))
    assert described(speculative=path).draft is not None
    vocab = held["model"]["vocab"]
    plain = [token for token in vocab if len(token) == 3][:2]
    vocab[plain[0]], vocab[plain[1]] = vocab[plain[1]], vocab[plain[0]]
    tokenizer.write_text(json.dumps(held))
    with pytest.raises(ConfigError, match=r"has another vocabulary than 'demo'") as caught:
        described(speculative=path)
    assert "same family" in (caught.value.hint or "")
    tokenizer.unlink()
    assert described(speculative=path).draft is not None


@pytest.mark.parametrize(
    ("device", "quantization"), [("reference", None), ("native", None), ("native", "int8")]
)
def test_outputs_are_those_without_it(device: str, quantization: str | None) -> None:
    params = [
        SamplingParams(max_tokens=24, temperature=0, logprobs=1),
        SamplingParams(max_tokens=24, seed=5, temperature=0.9, logprobs=1, n=2),
    ]
    prompts = ["Tell me a story about a fox and a lantern.", "What is 3 + 4?"]
    found = []
    options: dict[str, Any] = {"device": device, "quantization": quantization, "num_threads": 1}
    for speculative in ("off", "demo-draft"):
        llm = LLM("demo", speculative=speculative, max_num_seqs=4, **options)
        outs = llm.generate(prompts, params, use_tqdm=False)
        found.append([(one.token_ids, one.logprobs) for out in outs for one in out.outputs])
        assert ("draft_model" in llm.chosen) == (speculative != "off")
    assert found[0] == found[1]


def test_its_costs_are_folded_apart_from_the_models() -> None:
    facts = described()
    folded, draft = fold_draft_costs(facts), facts.draft
    assert folded is not None
    assert draft is not None
    rows, load = ((7, 1), (40, 1)), Load(((7, 1), (40, 1)), 2, 4)
    assert folded.cost(rows, 2) == draft.program.cost(load, draft.weights.stored_bytes)
    assert folded.total.flops < fold_costs(facts).total.flops
    assert fold_draft_costs(described(speculative="auto")) is None


def test_the_law_of_its_passes_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(NativeLoops, "operations", lambda *_: 1e12)
    monkeypatch.setattr(NativeLoops, "read_bytes", lambda *_: 1e10)
    probe.ceilings(device_for(EngineConfig(device="native", num_threads=1)).loops())
    with LLM("demo", device="native", speculative="demo-draft", num_threads=1, max_num_seqs=2) as llm:
        llm.generate("Once", SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)
        law, draft_law = llm.engine.scheduler.law, llm.engine.meter.draft_law
    assert law is not None
    assert draft_law is not None
    of_draft, of_model = [(one, one.values([(50, 1)], 1)) for one in (draft_law, law)]
    assert min(one.seconds(values) for one, values in (of_draft, of_model)) > 0
    assert 0 < of_draft[0].roof_s(of_draft[1]) < of_model[0].roof_s(of_model[1])
