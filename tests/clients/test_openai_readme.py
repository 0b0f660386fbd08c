"""The examples of the openai package's README, as they stand there."""

from __future__ import annotations

import gc
import re

import pytest
from readme import Example, examples, run
from server import Server

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

pytestmark = pytest.mark.filterwarnings("ignore")  # examples leave clients open

# What these need is not here: images, other clouds, other endpoints, other packages.
ELSEWHERE = re.compile(
    r"image|audio|azure|bedrock|workload|realtime|webhook|proxy|mtls|aiohttp|/foo|\.files\.|response\.my_field"
    r"|fine_tuning\.jobs\.list|\.\.\.\)",
    re.IGNORECASE,
)
CALLS = re.compile(r"client\.(chat|responses|fine_tuning)|with_options")
HERE = [e for e in examples("openai") if CALLS.search(e.code) and not ELSEWHERE.search(e.code)]


def test_most_are_run() -> None:
    """The selection above does not become empty by itself."""
    headings = {example.heading for example in HERE}
    assert {"Usage", "Async usage", "Streaming responses", "Nested params", "Retries", "Timeouts"} <= headings
    assert {"Handling errors", "Request IDs", "with_streaming_response"} <= headings
    assert len(HERE) >= 13


@pytest.mark.parametrize("example", HERE, ids=lambda e: f"{e.heading} {len(e.code)}")
def test_an_example(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], example: Example
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    waits = re.search(r"^(\w+ = |    \w+ = |)await", example.code, re.MULTILINE)
    client = openai.AsyncOpenAI() if waits else openai.OpenAI()
    run(example, client=client, httpx=httpx)  # which an older README forgets to import
    gc.collect()  # what says that a client was not closed says it here
    printed = capsys.readouterr().out.strip()
    assert printed or "print(" not in example.code or "except openai.APIStatusError as exc" in example.code
    if example.heading == "Handling errors":
        assert "\n404\n" in printed
    if "_request_id" in example.code:
        assert re.fullmatch(r"[\w-]+", printed)  # Ray Serve gives ids of its own
