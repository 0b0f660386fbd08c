"""The device "auto": a GPU that works and has kernels and memory for the model, else the CPU, and why."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from on_accelerator import write_checkpoint
from tiny import CONFIGS

from quire import LLM
from quire.backends import device as devices
from quire.backends.cuda import device as cuda
from quire.backends.cuda.accelerator import DeviceArray, DeviceFault, Launch
from quire.backends.cuda.device import CudaDevice
from quire.backends.cuda.interpreted import InterpretedAccelerator, view_of
from quire.backends.cuda.self_check import check_accelerator
from quire.backends.device import device_for
from quire.config import EngineConfig
from quire.description import describe
from quire.errors import ConfigError


class Wrong(InterpretedAccelerator):
    """Changes what one kernel writes: the last bit of the first number, or all by a factor."""

    kernel = ""
    amount = 0.0

    def launch(self, launch: Launch) -> None:
        super().launch(launch)
        if launch.kernel == self.kernel and launch.grid[0]:
            out = launch.args[0]
            assert isinstance(out, DeviceArray)
            values = view_of(out).reshape(-1)
            if self.amount:
                values *= 1 + self.amount
            else:
                values[0] = np.nextafter(values[0], np.float32(np.inf))


def test_an_accelerator_that_is_right_passes() -> None:
    check_accelerator(InterpretedAccelerator())


@pytest.mark.parametrize(
    ("kernel", "amount", "what"),
    [
        ("quantized_product", 0.0, "products of int8 wrongly"),
        ("product", 1e-3, "products of bfloat16 wrongly"),
        ("attend", 4.0, "attention wrongly"),
        ("rope_and_kv", 9.0, "attention wrongly"),
    ],
)
def test_wrong_results_are_found(
    monkeypatch: pytest.MonkeyPatch, kernel: str, amount: float, what: str
) -> None:
    monkeypatch.setattr(Wrong, "kernel", kernel)
    monkeypatch.setattr(Wrong, "amount", amount)
    with pytest.raises(ConfigError, match=what) as raised:
        check_accelerator(Wrong())
    assert "device='native'" in str(raised.value.hint)


def test_a_fault_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any) -> None:
        raise DeviceFault("the GPU reports a fault", "a hint")

    monkeypatch.setattr(InterpretedAccelerator, "launch", launch)
    with pytest.raises(ConfigError, match="fails in products of int8: the GPU reports a fault"):
        check_accelerator(InterpretedAccelerator())


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_checkpoint(tmp_path)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A GPU that works, which the interpreted accelerator stands for."""
    found = CudaDevice(InterpretedAccelerator(), "interpreted")
    monkeypatch.setattr(cuda, "cuda_device", lambda *_: found)
    return found


def test_a_gpu_that_works_is_chosen(model: str, gpu: CudaDevice) -> None:
    config = EngineConfig(model=model, max_model_len=64)
    assert device_for(config) is gpu
    described = describe(config)
    assert described.device is gpu
    assert described.no_gpu == ""


def test_what_it_has_no_kernels_or_memory_for_runs_on_the_cpu(
    model: str, gpu: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=model, max_model_len=64)
    (tmp_path / "narrow").mkdir()
    narrow = describe(replace(config, model=write_checkpoint(tmp_path / "narrow", CONFIGS["llama"])))
    assert narrow.device.name == "native"
    assert "no multiples of 16" in narrow.no_gpu
    assert describe(replace(config, speculative="demo-draft", model="demo")).device is gpu
    monkeypatch.setattr(CudaDevice, "available_bytes", lambda _: 1000)
    full = describe(config)
    assert full.device.name == "native"
    assert "of memory are available" in full.no_gpu
    less = describe(config, available_bytes=1 << 60)
    assert less.device.name == "cuda"


def test_what_was_not_compiled_runs_on_the_cpu(
    model: str, gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        InterpretedAccelerator, "has_kernel", lambda _, key: not key.startswith("rope_and_kv")
    )
    described = describe(EngineConfig(model=model, max_model_len=64))
    assert described.device.name == "native"
    assert described.no_gpu.startswith("no kernel rope_and_kv(")


def test_the_reason_is_said(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> CudaDevice:
        raise ConfigError("cuda:0 computes attention wrongly", "report it")

    monkeypatch.setattr(cuda, "cuda_device", broken)
    llm = LLM(model, max_model_len=64)
    assert llm.chosen["backend"] == "native"
    assert llm.chosen["gpu"] == "not used: cuda:0 computes attention wrongly"
    llm.close()


def test_nothing_is_said_where_nothing_speaks_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_GPU_DRIVERS", ("/there is none",))
    monkeypatch.setattr(devices, "find_spec", lambda name: name == "cuda" or None)  # as PyTorch brings it
    assert devices.automatic_gpu(EngineConfig()) == (None, "")
    monkeypatch.setattr(devices, "_GPU_DRIVERS", ("/",))
    monkeypatch.setattr(cuda, "find_spec", lambda _: None)
    found, reason = devices.automatic_gpu(EngineConfig())
    assert found is None
    assert "needs cuda-core, which is not installed" in reason


def test_another_cuda_core_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other packages bring it: one that lacks what the driver's module takes of it."""
    older = ModuleType("cuda.core")
    older.__spec__ = ModuleSpec("cuda.core", None)
    monkeypatch.setitem(sys.modules, "cuda.core", older)
    for name in ("driver", "gpu_group"):
        monkeypatch.delitem(sys.modules, f"quire.backends.cuda.{name}", raising=False)
    described = describe(EngineConfig(model=write_checkpoint(tmp_path), max_model_len=64))
    assert described.device.name == "native"
    assert "needs another cuda-core" in described.no_gpu


def test_blocks_that_the_host_keeps_take_no_memory_of_a_gpu(tmp_path: Path) -> None:
    config = EngineConfig(model=write_checkpoint(tmp_path), device="cuda-interpreted")
    kept = replace(config, prefix_cache_memory_bytes=1 << 40)
    alone, beside = (describe(one, available_bytes=1 << 30).memory.blocks for one in (config, kept))
    assert beside == alone
