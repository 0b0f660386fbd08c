"""The requests of a load: lengths and arrivals that repeat, prompts that do not, and errors of options."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from quire.bench.load import DEFAULT_PROMPTS, LoadOptions, injected_requests, load_requests
from quire.bench.workload import PromptVocabulary, Request
from quire.errors import ConfigError

WORDS = PromptVocabulary(range(1000))


def made(load: LoadOptions, salt: str = "a", longest: int | None = None) -> list[Request]:
    return list(load_requests(load, WORDS, salt, longest))


def test_lengths_and_arrivals_repeat_but_prompts_are_new() -> None:
    load = LoadOptions(request_rate=4.0, random_range_ratio=0.5, seed=3)
    first, second = made(load, "a"), made(load, "b")
    assert len(first) == DEFAULT_PROMPTS
    for one, other in zip(first, second, strict=True):
        assert (one.at_s, one.num_output_tokens) == (other.at_s, other.num_output_tokens)
        assert len(one.content) == len(other.content)
        assert one.content != other.content
    assert made(load, "a") == first
    assert [one.at_s for one in made(replace(load, seed=4))] != [one.at_s for one in first]


@pytest.mark.parametrize("seed", range(5))
def test_arrivals_of_a_known_number_keep_the_rate_exactly(seed: int) -> None:
    found = made(LoadOptions(request_rate=4.0, num_prompts=50, seed=seed))
    assert found[0].at_s == 0.0
    assert 10 < found[-1].at_s < 12.5  # the gap after the last one is counted, too


def test_a_duration_bounds_arrivals() -> None:
    found = made(LoadOptions(request_rate=100.0, duration=2.0))
    assert found[-1].at_s <= 2.0
    assert len(found) == pytest.approx(200, rel=0.3)
    endless = load_requests(LoadOptions(max_concurrency=2, duration=2.0), WORDS, "a", None)
    assert len(list(islice(endless, 500))) == 500


def test_a_dataset_of_chats_and_one_of_lengths(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]
    path.write_text(json.dumps([{"conversations": turns}, {"prompt": "Bye", "output_len": 3}]))
    first, second = made(LoadOptions(dataset_path=path, random_output_len=9))
    assert (first.content, first.num_output_tokens) == ("Hello", 9)
    assert (second.content, second.num_output_tokens) == ("Bye", 3)


def test_a_line_of_a_dataset_may_have_any_other_separator_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    prompts = ["a\u2028b", "c\u2029d\x85"]
    lines = [json.dumps({"prompt": one}, ensure_ascii=False) for one in prompts]
    path.write_text("\r\n \n".join(lines), "utf-8")
    assert [one.content for one in made(LoadOptions(dataset_path=path))] == prompts


def test_a_trace_is_played_faster_and_shortened(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"prompt_len": 900, "output_len": 40, "arrival_ms": at} for at in (1000, 3000)]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = made(LoadOptions(arrivals=path, speed=4.0), longest=512)
    assert [one.at_s for one in found] == [0.0, 0.5]
    assert {(len(one.content), one.num_output_tokens) for one in found} == {(472, 40)}
    assert found[0].content != found[1].content


def test_a_long_prompt_is_sent_beside_the_load() -> None:
    (long,) = injected_requests(LoadOptions(inject_long_prompt=2000, at=1.5), WORDS, "a")
    assert (len(long.content), long.at_s) == (2000, 1.5)
    assert injected_requests(LoadOptions(), WORDS, "a") == []


@pytest.mark.parametrize(
    "options",
    [
        {"request_rate": 0.0},
        {"request_rate": -1.0},
        {"num_prompts": 0},
        {"duration": 0.0},
        {"speed": 0.0},
        {"random_range_ratio": 1.0},
        {"random_range_ratio": -0.1},
        {"max_concurrency": 0},
        {"arrivals": Path("x"), "request_rate": 1.0},
        {"arrivals": Path("x"), "dataset_path": Path("y")},
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--"):
        LoadOptions(**options)


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"a": 1}', "not JSON", None])
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace\.jsonl"):
        made(LoadOptions(arrivals=path))


@pytest.mark.parametrize("rate", [4.0, math.inf])
def test_a_dataset_without_requests_is_named(tmp_path: Path, rate: float) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl: .* no requests"):
        made(LoadOptions(dataset_path=path, request_rate=rate))


PACKED = gzip.compress(b'{"prompt_len": 3, "output_len": 4, "arrival_ms": 0}', mtime=0)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("truncated.jsonl.gz", PACKED[:-9]),
        ("damaged.jsonl.gz", PACKED[:10] + b"\xff" + PACKED[11:]),
        ("long.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"9" * 200_000),
    ],
    ids=["truncated", "damaged", "long"],
)
def test_a_damaged_trace_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=name):
        made(LoadOptions(arrivals=path))


def test_random_requests_that_the_server_cannot_take_are_refused() -> None:
    load = LoadOptions(random_input_len=60, random_output_len=40)
    assert made(load, longest=100)
    with pytest.raises(ConfigError, match="up to 100 tokens exceed the server's context of 99"):
        made(load, longest=99)
    with pytest.raises(ConfigError, match="up to 130 tokens"):
        made(replace(load, random_range_ratio=0.3), longest=100)
