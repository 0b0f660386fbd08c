"""Faults of an accelerator: requests of the step fail alone, or the engine ends with one error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hashed import LazyAccelerator, hashed
from on_accelerator import write_checkpoint

from quire import LLM, SamplingParams
from quire.backends.cuda import driver
from quire.backends.cuda.accelerator import DeviceArray, DeviceFault
from quire.errors import ConfigError, EngineDead

ANY = SamplingParams(temperature=0.9, seed=4, max_tokens=6, detokenize=False, ignore_eos=True)


class Faulty(LazyAccelerator):
    """Fails once to allocate, to fetch, or to wait, as soon as it is told to."""

    fails = ""
    works = True

    def _fail(self, what: str) -> None:
        if Faulty.fails == what:
            Faulty.fails = ""
            raise DeviceFault(f"the GPU reports a fault as it should {what}", "a hint", Faulty.works)

    def allocate(self, num_bytes: int) -> DeviceArray:
        self._fail("allocate")
        return super().allocate(num_bytes)

    def fetch(self, array: DeviceArray) -> Any:
        self._fail("fetch")
        copy, accelerator = super().fetch(array), self

        class Copy:
            def result(self) -> Any:
                accelerator._fail("wait")
                return copy.result()

        return Copy()


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr("quire.backends.cuda.interpreted.InterpretedAccelerator", Faulty)
    monkeypatch.setattr(Faulty, "fails", "")
    options: dict[str, Any] = {"block_size": 8, "speculative": "off", "max_model_len": 64}
    options |= {"max_steps_in_flight": 2, "max_num_batched_tokens": 32}
    return hashed(LLM(write_checkpoint(tmp_path), device="cuda-interpreted", **options))


def ask(llm: LLM, *lengths: int, **more: Any) -> list[Any]:
    asked = [{"prompt_token_ids": [3 + i * length % 29 for i in range(length)]} for length in lengths]
    outputs = llm.generate(asked, replace(ANY, **more), use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].error) for one in outputs]


@pytest.mark.parametrize("fails", ["allocate", "fetch", "wait"])
def test_requests_of_the_step_fail_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """The first step fails, which has the first requests; others, and later ones, get their tokens."""
    lengths = (9, 20, 30, 5)  # 29 of at most 32 tokens, then others
    Faulty.fails = fails
    found = ask(llm, *lengths)
    failed = [error for _, error in found if error]
    assert Faulty.fails == ""
    assert 2 <= len(failed) < len(lengths)
    assert all("the GPU reports a fault" in str(error) for error in failed)
    again = ask(llm, *lengths)
    assert all(error is None and len(tokens) == 6 for tokens, error in again)
    for (tokens, error), (wanted, _) in zip(found, again, strict=True):
        assert error or tokens == wanted
    llm.engine.scheduler.check()
    llm.close()


def test_an_accelerator_that_is_lost_ends_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "works", False)
    Faulty.fails = "wait"
    with pytest.raises(EngineDead, match="DeviceFault: the GPU reports a fault as it should wait"):
        ask(llm, 9, 20)
    with pytest.raises(EngineDead):
        ask(llm, 9)


def test_memory_that_is_missing_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.backends.cuda.interpreted.InterpretedAccelerator", Faulty)
    monkeypatch.setattr(Faulty, "fails", "allocate")
    with pytest.raises(ConfigError, match="cuda-interpreted: the GPU reports a fault as it should allocate"):
        LLM(write_checkpoint(tmp_path), device="cuda-interpreted", max_model_len=64)


def test_a_kernel_that_was_not_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that need it fail alone."""

    def penalize(*_: Any) -> None:
        raise ConfigError("no kernel penalize_logits was compiled")

    monkeypatch.setattr("quire.backends.cuda.sampler.DeviceSampler._penalties", penalize)
    ((_, error),) = ask(llm, 5, presence_penalty=1.0)
    assert "no kernel" in str(error)
    on_host = replace(ANY, logprobs=-1)  # what is beside it is sampled when the step is collected
    prompts = [{"prompt_token_ids": [5, 6, 7]}] * 2
    outputs = llm.generate(prompts, [on_host, replace(ANY, presence_penalty=1.0)], use_tqdm=False)
    assert "no kernel" in str(outputs[1].outputs[0].error)
    ((tokens, error),) = ask(llm, 5)
    assert (error, len(tokens)) == (None, 6)


class DriverError(Exception):
    """As cuda-core raises it: its own class is not public."""

    __module__ = "cuda.core"


@pytest.mark.parametrize(
    ("raised", "synchronized", "hint", "says", "advises"),
    [
        (
            DriverError("CUDA_ERROR_OUT_OF_MEMORY: all\nof it"),
            0,
            None,
            "OUT_OF_MEMORY: all; it st",
            "kv_cache",
        ),
        (DriverError("CUDA_ERROR_OUT_OF_MEMORY"), 0, "ulimit", "it still works", "ulimit"),
        (RuntimeError(), 0, None, "the GPU reports RuntimeError; it still works", "None"),
        (DriverError("CUDA_ERROR_ILLEGAL_ADDRESS"), 700, "ulimit", "it works no more", "report it"),
        (DriverError("CUDA_ERROR_UNKNOWN"), 999, None, "it works no more", "nvidia-smi"),
    ],
)
def test_errors_of_the_driver_are_faults(
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    synchronized: int,
    hint: str | None,
    says: str,
    advises: str,
) -> None:
    monkeypatch.setattr(driver.driver, "cuCtxSynchronize", lambda: (synchronized,))

    @driver.reported(hint)
    def fails() -> None:
        raise raised

    with pytest.raises(DeviceFault, match=says) as found:
        fails()
    assert found.value.works is (synchronized == 0)
    assert advises in str(found.value.hint)


def test_errors_of_quire_are_no_faults() -> None:
    @driver.reported()
    def fails() -> None:
        raise KeyError("a mistake")

    with pytest.raises(KeyError):
        fails()
