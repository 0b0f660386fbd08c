"""A prefix cache that stays: the same bits after a restart, and nothing of another model or build."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from stores import wait_until

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.description import describe
from quire.engine import fetches
from quire.errors import ConfigError
from quire.outputs import RequestOutput
from quire.prefix_store import content_fingerprint
from quire.transfer.disk_store import DiskStore

DEMO = Path(__file__).parents[2] / "quire/assets/demo"
PROMPT = [(37 * number) % 400 + 5 for number in range(200)]
NUM_REUSABLE = 192  # of a block size of 16; the last token is always computed
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=3, logprobs=2)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing a block is taken to last a second, so that fetching is always worth waiting for."""
    monkeypatch.setattr(fetches.Fetches, "_compute_s", lambda _, first, end: float(end - first))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


def answer(folder: Path | None, prompt: list[int] = PROMPT, salt: str = "", **options: Any) -> RequestOutput:
    """Return the answer of a new engine, whose process might be a new one."""
    kept = {} if folder is None else {"prefix_cache_dir": str(folder)}
    with LLM("demo", num_threads=1, max_num_seqs=2, **kept, **options) as llm:
        if folder is not None:
            assert llm.engine.exchange is not None
            store = llm.engine.exchange.store
            assert isinstance(store, DiskStore)
            wait_until(lambda: store.ready)
        request = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
        (output,) = llm.generate([request], PARAMS, use_tqdm=False)
        return output


def bits(output: RequestOutput) -> object:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def test_a_restart_finds_the_same_bits(folder: Path) -> None:
    first, again, without = answer(folder), answer(folder), answer(None)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, NUM_REUSABLE)
    assert bits(first) == bits(again) == bits(without)


def test_a_longer_prompt_begins_with_what_was_kept(folder: Path) -> None:
    answer(folder)
    longer = [*PROMPT, *range(5, 70)]
    again = answer(folder, longer)
    assert again.num_cached_tokens == NUM_REUSABLE
    assert bits(again) == bits(answer(None, longer))


def test_a_salt_finds_only_its_own(folder: Path) -> None:
    answer(folder, salt="one")
    assert answer(folder).num_cached_tokens == 0
    assert answer(folder, salt="two").num_cached_tokens == 0
    assert answer(folder, salt="one").num_cached_tokens == NUM_REUSABLE


def test_another_format_of_the_cache_finds_nothing(folder: Path) -> None:
    answer(folder)
    assert answer(folder, kv_cache_dtype="int8").num_cached_tokens == 0
    assert answer(folder, block_size=32).num_cached_tokens == 0


def test_damaged_files_are_computed_instead(folder: Path) -> None:
    first = answer(folder)
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    again = answer(folder)
    assert again.num_cached_tokens < NUM_REUSABLE
    assert bits(again) == bits(first)


def test_memory_alone_keeps_what_the_cache_loses() -> None:
    """The KV cache has room for one prompt: the second evicts the first, which comes back from memory."""
    with LLM(
        "demo", num_threads=1, max_num_seqs=1, max_model_len=256, prefix_cache_memory_bytes=64 << 20
    ) as llm:
        prompts = [PROMPT, PROMPT[::-1], PROMPT]
        outputs = [llm.generate([prompt], PARAMS, use_tqdm=False)[0] for prompt in prompts]
        assert llm.engine.exchange is not None
        counters = llm.engine.exchange.counters()
    assert bits(outputs[0]) == bits(outputs[2])
    assert outputs[2].num_cached_tokens == NUM_REUSABLE
    assert counters is not None
    assert counters["memory"].num_fetched > 0


# The fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def fingerprint(model: Path, layout: str = "layout", **options: Any) -> bytes:
    return content_fingerprint(describe(EngineConfig(model=str(model), **options)), layout)


def test_what_decides_bits_is_in_the_fingerprint(model: Path) -> None:
    same = fingerprint(model)
    assert fingerprint(model) == same
    assert fingerprint(model, num_threads=1, max_num_seqs=3, seed=5) == same
    assert fingerprint(model, quantization="int8") != same
    assert fingerprint(model, kv_cache_dtype="int8") != same
    assert fingerprint(model, "another layout") != same
    (weights,) = model.glob("*.safetensors")
    os.utime(weights, (1e9, 1e9))
    assert fingerprint(model) != same


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        EngineConfig(prefix_cache_dir=str(tmp_path), enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="out of range"):
        EngineConfig(prefix_cache_bytes=1000)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="may be written") as refused:
        LLM("demo", prefix_cache_dir=str(tmp_path / "open"))
    assert "chmod 700" in (refused.value.hint or "")
