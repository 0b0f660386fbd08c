"""Which names a model is served by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig, ServerConfig
from quire.server.errors import NotFound
from quire.server.service import MAX_MODEL_NAME, ServiceState, served_names


def serving(*given: str, model: str = "demo") -> ServiceState:
    unused: Any = None
    config = ServerConfig(served_model_name=given)
    names = served_names(config, model)
    return ServiceState(config, EngineConfig(), unused, unused, unused, names, False, unused)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ((), "demo"),
        (("*",), "gpt-4o"),
        (("*",), "org/name:tag [1m] ?"),
        (("claude-*",), "claude-opus-4-8"),
        (("claude-*",), "demo"),
        (("mine", "claude-*", "*-mini"), "gpt-5-mini"),
        (("a[b]*?",), "a[b]c?"),
        ((), "demo:latest"),
        (("mine", "*-mini"), "gpt-5-mini:latest"),
    ],
)
def test_an_answer_bears_the_name_that_was_sent(given: tuple[str, ...], name: str) -> None:
    assert serving(*given).check_model(name) == name


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ((), "gpt-4o"),
        (("mine",), "demo"),
        (("mine", "*-mini"), "demo"),
        (("claude-*",), "my-claude-1"),
        (("claude-*",), "Claude-1"),
        (("a[b]*",), "ab"),
        (("a*?",), "abc"),
        (("*",), ""),
        ((), ":latest"),
        ((), "demo:latest:latest"),
        (("mine",), "demo:latest"),
        (("*",), "a" * (MAX_MODEL_NAME + 1)),
    ],
)
def test_other_names_are_not_found(given: tuple[str, ...], name: str) -> None:
    with pytest.raises(NotFound) as caught:
        serving(*given).check_model(name)
    assert caught.value.hint is not None
    assert all(known in caught.value.hint for known in given)


def test_names_are_listed_and_patterns_are_not(tmp_path: Path) -> None:
    assert serving("one", "claude-*", "two").names == ("one", "two")
    assert serving("claude-*").names == serving("*").names == serving().names == ("demo",)
    (tmp_path / "my-model").mkdir()
    assert serving("*", model=str(tmp_path / "my-model")).names == ("my-model",)
    assert serving("*").check_model(None) == "demo"
    assert serving("one", "*").check_model(None) == "one"
