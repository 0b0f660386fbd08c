"""What outputs do to who follows them, and where their words are made, without an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_folders import tokenizer_of

from quire.errors import QuireError, RequestError
from quire.frontend import Encoded
from quire.outputs import CompletionOutput, Logprob, RequestOutput
from quire.sampling_params import SamplingParams
from quire.server import logprob_json as logprobs
from quire.server.errors import GenerationFailed
from quire.server.logprob_json import finite
from quire.server.openai.completions import CompletionRun
from quire.server.openai.protocol import CompletionRequest
from quire.server.prompt_run import PromptRun
from quire.text.tokenizer import Tokenizer
from quire.types import Failure, NewRequest, Output

HEAD = {"id": "a", "created": 1, "model": "demo", "system_fingerprint": "f"}
QUIET: Any = SimpleNamespace(first_tokens=lambda *_: None, next_tokens=lambda *_: None)


def prompt_run(**stream: Any) -> PromptRun:
    request = NewRequest("1", (1, 2), SamplingParams(seed=0, detokenize=False))
    return PromptRun(request, Encoded(()), None, SimpleNamespace(**stream))  # type: ignore[arg-type]


def test_one_that_is_ended_here_is_aborted_there() -> None:
    aborted = []
    run = prompt_run(abort=lambda: aborted.append(True))
    run.take([Output("1", 0, token_ids=(3,))], 0.0, QUIET)
    run.end()
    assert aborted == [True]
    assert run.finished
    assert run.output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(("by_request", "kind"), [(True, RequestError), (False, GenerationFailed)])
@pytest.mark.parametrize("words", ["no token may follow", "anything"])
def test_whose_fault_a_failure_is_does_not_stand_in_its_words(
    by_request: bool, kind: type[QuireError], words: str
) -> None:
    failed = Output("1", 0, finish_reason="error", error=Failure(words, by_request))
    with pytest.raises(QuireError) as caught:
        prompt_run().take([failed], 0.0, QUIET)
    assert type(caught.value) is kind
    assert caught.value.message == words


def completion_run(tokenizer: Tokenizer, num_prompt: int, **body: Any) -> CompletionRun:
    """A prompt and its logprobs, all there at once."""
    asked = CompletionRequest(prompt="x", logprobs=1, **body)
    output = RequestOutput(
        "1", "p", [100] * num_prompt, [CompletionOutput(0, "a", [101], finish_reason="stop")]
    )
    position = {100: Logprob(-1.0, 1, None), 101: Logprob(-2.0, 2, None)}
    output.prompt_logprobs, output.outputs[0].logprobs = [None] + [position] * (num_prompt - 1), [position]

    class Script:
        fingerprint = "f"
        service = SimpleNamespace(frontend=SimpleNamespace(need_tokenizer=lambda: tokenizer))
        prompts = (
            SimpleNamespace(output=output, request=SimpleNamespace(params=SamplingParams(logprobs=1))),
        )

        def timings(self) -> dict[str, float]:
            return {}

        async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
            yield 0, output

    return CompletionRun(asked, Script(), ["p"], HEAD, [])  # type: ignore[arg-type]


@pytest.mark.parametrize("num_prompt", [20, 3000])
@pytest.mark.parametrize(
    "body", [{"echo": True}, {"echo": True, "stream": True}, {"prompt_logprobs": 1}], ids=str
)
def test_logprobs_of_long_prompts_are_written_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, demo_folder: Path, num_prompt: int, body: dict[str, Any]
) -> None:
    threads = []

    def watched(one: Logprob) -> float:
        threads.append(threading.current_thread())
        return finite(one)

    monkeypatch.setattr(logprobs, "finite", watched)
    run = completion_run(tokenizer_of(demo_folder), num_prompt, **body)

    async def written() -> bytes:
        return b"".join([event async for event in run.chunks()]) if "stream" in body else await run.whole()

    assert asyncio.run(written()).count(b"-1.0") >= num_prompt - 1
    assert (threads.count(threading.main_thread()) < num_prompt) == (num_prompt == 3000)
