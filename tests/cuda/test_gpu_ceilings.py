"""Ceilings of an accelerator: measured by its kernels, kept under its name, and used for verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from on_accelerator import write_checkpoint

from quire import LLM, SamplingParams
from quire.backends.cuda import device as cuda
from quire.backends.cuda.accelerator import DeviceArray
from quire.backends.cuda.device import cuda_device
from quire.backends.cuda.interpreted import InterpretedAccelerator
from quire.backends.cuda.kernels.variants import variants
from quire.backends.cuda.loops import CudaLoops
from quire.backends.cuda.manifest import launch_key
from quire.cli.main import main
from quire.roofline import probe


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops of toy sizes, and a cache of this test."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    make = CudaLoops
    monkeypatch.setattr(cuda, "CudaLoops", lambda *args: make(*args, size=512, memory_bytes=1 << 16))
    monkeypatch.setattr(probe, "_SECONDS", 0.0)


def run(*argv: str) -> int | str | None:
    """The exit status of a command."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return ended.value.code


def test_launches_of_loops_were_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = {variant.key for variant in variants()}
    asked = []

    def launch(_: InterpretedAccelerator, one: Any) -> None:
        arrays = [arg for arg in one.args if isinstance(arg, DeviceArray)]
        assert all(array.num_bytes for array in arrays)
        asked.append(launch_key(one))

    monkeypatch.setattr(InterpretedAccelerator, "launch", launch)
    found = probe.measure(cuda_device("cuda-interpreted").loops())
    assert set(asked) <= compiled
    assert len(set(asked)) == 4
    assert found.cpu == "Triton's interpreter, on the CPU"
    assert found.isa == "interpreted-interpreted"
    assert set(found.read_bytes[1]) == {"memory"}
    assert min(found.operations.values()) > 0


def test_probe_keeps_them_and_steps_get_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(InterpretedAccelerator, "launch", lambda *_: None)
        assert run("probe", "--device", "cuda-interpreted", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    loops = cuda_device("cuda-interpreted").loops()
    kept = probe.cached(loops)
    assert kept is not None
    assert kept.bandwidth == shown["read_bytes"]["1"]["memory"]
    llm = LLM(write_checkpoint(tmp_path), device="cuda-interpreted", max_model_len=64)
    assert "operations a second" in llm.chosen["ceilings"]
    params = SamplingParams(max_tokens=2, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)
    assert {record.bound for record in llm.engine.records} <= {"memory", "arithmetic", "overhead"}
    assert all(record.roof_share > 0 for record in llm.engine.records)
    llm.close()


def test_what_inspect_shows_is_the_memory_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(InterpretedAccelerator, "free_bytes", lambda _: 3_210_000_000)
    model = write_checkpoint(tmp_path)
    assert run("inspect", model, "--device", "cuda-interpreted", "--max-model-len", "64") == 0
    assert "3.21 GB" in capsys.readouterr().out


def test_a_plan_for_a_gpu_has_its_memory_and_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(InterpretedAccelerator, "launch", lambda *_: None)
    monkeypatch.setattr(InterpretedAccelerator, "free_bytes", lambda _: 3_210_000_000)
    model = write_checkpoint(tmp_path)
    assert run("plan", model, "--device", "cuda-interpreted", "--max-model-len", "64", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["machine"] == "Triton's interpreter, on the CPU"
    assert shown["memory"]["available_bytes"] == 3_210_000_000
    assert shown["memory"]["fits"]
    assert run("plan", model, "--device", "cuda-interpreted", "--machine", "L40S") == 2
    assert "--device with --machine" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("plan", "demo"), ("probe",)])
def test_a_gpu_that_is_not_there_is_one_error(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command, "--device", "cuda:999") == 1
    told = capsys.readouterr().err
    assert "NVIDIA driver" in told or "there is no GPU 999" in told
    assert "Traceback" not in told
