"""What a server tells of the drafts of its answers: the same numbers wherever they are asked for."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from requests_over_http import idle, wait_for
from server import Server, running

from quire import LLM, SamplingParams

PROMPT = "Once upon a time, in a forest, there lived a fox who"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 48}


def counters(client: httpx.Client) -> dict[str, float]:
    text = client.get("/metrics").text
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return {one.name: one.value for one in samples if "draft" in one.name or "accepted" in one.name}


def test_counts_agree(unmeasured: Server) -> None:
    """An answer that was given before is drafted from the store: most of its tokens are accepted."""
    with unmeasured.client() as client:
        answers = [client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY}).json() for _ in range(3)]
        texts = {answer["choices"][0]["text"] for answer in answers}
        assert len(texts) == 1
        timings = [answer["timings"] for answer in answers]
        assert timings[-1]["accepted_tokens"] > 20
        own = client.post("/completion", json={"prompt": PROMPT, **GREEDY, "n_predict": 48}).json()
        assert own["content"] in texts
        assert own["timings"]["draft_n"] >= own["timings"]["draft_n_accepted"] > 20
        chat = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], **GREEDY}
        with client.stream("POST", "/v1/chat/completions", json=chat | {"stream": True}) as reply:
            lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
        timings.append(json.loads(lines[-1][6:])["timings"])
        wait_for(lambda: idle(unmeasured), 60, "nothing runs")
        drafted = sum(one["drafted_tokens"] for one in timings) + own["timings"]["draft_n"]
        accepted = sum(one["accepted_tokens"] for one in timings) + own["timings"]["draft_n_accepted"]
        found = counters(client)
        assert found["vllm:spec_decode_num_draft_tokens_total"] == drafted
        assert found["vllm:spec_decode_num_accepted_tokens_total"] == accepted
        assert 0 < found["vllm:spec_decode_num_drafts_total"] <= drafted
        steps = client.get("/steps?last=4096").json()["steps"]
        assert sum(step["num_drafted"] for step in steps) == drafted
        assert sum(step["num_accepted"] for step in steps) == accepted
        assert sum(step["num_drafts"] for step in steps) == found["vllm:spec_decode_num_drafts_total"]


@pytest.mark.parametrize("speculative", ["auto", "off"])
def test_in_python(speculative: str) -> None:
    with LLM("demo", device="reference", speculative=speculative) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        first, again = (llm.generate(PROMPT, params, use_tqdm=False)[0] for _ in range(2))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert again.metrics is not None
    assert (again.metrics.num_accepted > 10) == (speculative == "auto")
    assert (again.metrics.num_drafted > 0) == (speculative == "auto")
    assert again.metrics.drafting_gain > 0


def test_the_first_lines_say_where_drafts_come_from() -> None:
    with running("--speculative", "off") as server:
        assert re.search(r"drafts\s+off", server.log)
