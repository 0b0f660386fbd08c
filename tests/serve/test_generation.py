"""Part: what one prompt's outputs do to who follows it, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.errors import QuireError, RequestError
from quire.frontend import RequestReader
from quire.sampling_params import SamplingParams
from quire.server.generation import GenerationFailed, Part
from quire.types import Failure, NewRequest, Output

QUIET: Any = SimpleNamespace(first_tokens=lambda *_: None, next_tokens=lambda *_: None)


def part() -> Part:
    request = NewRequest("1", (1, 2), SamplingParams(seed=0, detokenize=False))
    return Part(RequestReader(request, None, None), SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(("by_request", "kind"), [(True, RequestError), (False, GenerationFailed)])
@pytest.mark.parametrize("words", ["no token may follow", "anything"])
def test_whose_fault_a_failure_is_does_not_stand_in_its_words(
    by_request: bool, kind: type[QuireError], words: str
) -> None:
    failed = Output("1", 0, finish_reason="error", error=Failure(words, by_request))
    with pytest.raises(QuireError) as caught:
        part().take([failed], 0.0, QUIET)
    assert type(caught.value) is kind
    assert caught.value.message == words
