"""The experiments of the page, with small parameters: what they say of the demo and of each other."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from quire.experiments import cache, heads, quantization
from quire.experiments.demo import DemoEngine, question, text_of_length
from quire.experiments.parameters import (
    CacheParameters,
    HeadsParameters,
    QuantizationParameters,
)
from quire.weights.folder import ModelFolder
from quire.weights.hub import open_model


def lines_of(run, asked, name):
    """Return the lines of one kind, and the last one."""
    lines = list(run(asked))
    assert all(len(line) == 1 for line in lines)
    progress = [line["progress"] for line in lines if "progress" in line]
    assert progress == sorted(progress)
    assert all(0 < one <= 1 for one in progress)
    return [line[name] for line in lines if name in line], lines[-1]["done"]


def test_the_answer_is_the_same_with_a_cache_and_without():
    tokens, done = lines_of(cache.run, CacheParameters(prompt_tokens=40, num_tokens=6), "token")
    assert done["tokens_equal"] is True
    assert [one["context"] for one in tokens] == list(range(40, 46))
    assert [one["without_tokens"] for one in tokens] == list(range(40, 46))
    assert [one["with_tokens"] for one in tokens] == [40, 1, 1, 1, 1, 1]
    for kind in ("with", "without"):
        assert all(one[f"{kind}_ms"] > 0 for one in tokens)
        assert sum(one[f"{kind}_ms"] for one in tokens) == pytest.approx(done[f"{kind}_ms"])
        assert sum(one[f"{kind}_tokens"] for one in tokens) == done[f"{kind}_tokens"]
    assert done["text"]


def test_without_a_cache_each_step_computes_the_whole_prompt():
    engine = DemoEngine()
    prompt = text_of_length(engine, 50)
    for _ in range(2):  # the second finds nothing of the first
        engine.start(prompt, 1)
        assert [step.num_tokens for step in engine.run()] == [50]


def test_kinds_of_weights_are_compared_with_bf16():
    kinds, done = lines_of(quantization.run, QuantizationParameters(num_tokens=24, rounds=1), "kind")
    assert [one["kind"] for one in kinds] == ["bf16", "int8", "int4"]
    sizes = [one["weight_bytes"] for one in kinds]
    assert sizes[0] > 1.8 * sizes[1] > 3 * sizes[2]
    assert kinds[0]["first_difference"] is None
    for one in kinds:
        assert one["weight_read_bytes"] == pytest.approx(one["weight_bytes"], rel=0.01)  # the head is tied
        assert one["token_ms"] > 0
        assert 0 < one["num_steps"] < 24
    pieces, found = kinds[0]["pieces"], kinds[2]["first_difference"]
    assert found is not None
    index = found["index"]
    assert kinds[2]["pieces"][:index] == pieces[:index]
    assert kinds[2]["pieces"][index] != pieces[index]
    assert found["bf16_gap"] > 0
    assert found["own_gap"] > 0
    engine = DemoEngine()
    prompt, ends = question(engine)
    assert done["prompt_tokens"] == len(prompt)
    engine.start(prompt, 24, ends=ends)
    answer = [token for step in engine.run() for token in step.token_ids]
    assert "".join(pieces) == engine.tokenizer().decode(answer)


def test_repeated_heads_give_the_same_answers_in_more_bytes():
    asked = HeadsParameters(batch=3, context=48, num_tokens=4, memory_bytes=1 << 20)
    variants, done = lines_of(heads.run, asked, "heads")
    assert done == {"num_heads": 8, "num_kv_heads": 4, "batch": 3, "context": 48}
    assert [one["num_kv_heads"] for one in variants] == [8, 4, 1]
    assert [one["kv_bytes_per_token"] for one in variants] == [4096, 2048, 512]
    assert [one["tokens_equal"] for one in variants] == [True, True, None]
    assert [one["num_fitting"] for one in variants] == [5, 10, 42]  # 1 MiB over three blocks of 16 tokens
    for one in variants:
        assert one["kv_read_bytes"] == 3 * 49 * one["kv_bytes_per_token"]
        assert one["step_ms"] > 0


def test_a_model_with_other_heads_is_one_of_the_demos_weights(tmp_path):
    demo = open_model("demo")
    heads.write_model(demo, tmp_path / "many", 8)
    name = "model.layers.1.self_attn.v_proj.weight"
    before, source = demo.tensors().pull(name).dense(), ModelFolder.at(tmp_path / "many")
    after = source.tensors().pull(name).dense()
    assert source.config()["num_key_value_heads"] == 8
    for head in range(8):
        own = before[head // 2 * 32 : (head // 2 + 1) * 32]
        assert np.array_equal(after[head * 32 : (head + 1) * 32], own)


def test_the_process_prints_lines():
    done = subprocess.run(
        [sys.executable, "-P", "-m", "quire.experiments", "cache"],
        input=b'{"prompt_tokens": 16, "num_tokens": 2}',
        capture_output=True,
        check=True,
        timeout=60,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(line) for line in lines] == [["token"], ["token"], ["done"]]
