"""Fields of config.json replaced by an option: `hf_overrides`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.prefix_store import content_fingerprint
from quire.weights.hub import open_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def config(**keywords: Any) -> EngineConfig:
    return EngineConfig.from_keywords(device="reference", **keywords)


def test_rope_scaling_and_context() -> None:
    """A dict from Python and the JSON of the command line are the same; the context grows with the rope."""
    plain = describe(config())
    scaled = describe(config(hf_overrides={"rope_scaling": YARN}))
    assert (plain.longest_context, scaled.longest_context) == (1024, 4096)
    assert describe(config(hf_overrides=json.dumps({"rope_scaling": YARN}))).program == scaled.program
    assert scaled.program != plain.program
    longer = describe(config(hf_overrides={"max_position_embeddings": 2048}, max_model_len=2000))
    assert longer.longest_context == 2000
    assert content_fingerprint(plain, "") != content_fingerprint(scaled, "")
    with pytest.raises(ConfigError, match="max_model_len = 2,000"):
        describe(config(max_model_len=2000))


def test_answers_change_with_the_rope() -> None:
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1)
    prompt = "Once upon a time there was a little fox"
    answers = []
    for overrides in (None, {"rope_theta": 10_000.0}, {"rope_theta": 200.0}):
        with LLM(device="reference", hf_overrides=overrides) as llm:
            (output,) = llm.generate([prompt], params)
            answers.append([next(iter(step.values())).logprob for step in output.outputs[0].logprobs or []])
    assert answers[0] == answers[1]
    assert not np.allclose(answers[0][:1], answers[2][:1], atol=1e-3)


def test_null_takes_a_field_away() -> None:
    source = open_model("demo", overrides={"rope_theta": None, "hidden_act": "gelu"})
    found = source.config()
    assert "rope_theta" not in found
    assert found["hidden_act"] == "gelu"
    assert source.tokenizer() == open_model("demo").tokenizer()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"max_positions": 4096}, "did you mean 'max_position_embeddings'?"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "unknown rope scaling"),
        ({"hidden_size": 128}, "does not fit the model"),
        ("[1]", "is not a JSON object"),
        ('{"a', "is not a JSON object"),
        ("[" * 100_000, "is not a JSON object"),
    ],
)
def test_overrides_that_are_refused(overrides: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        describe(config(hf_overrides=overrides))
    assert words in str(caught.value)
