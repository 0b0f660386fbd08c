"""Tests of the driver's module on pretended GPUs; test_driver.py runs them in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_accelerator import write_checkpoint
from pretended_gpu import PretendedKernels, pretend
from test_cuda_engine import ask, make
from test_exactness import fingerprint

from quire.backends.cuda import divided
from quire.backends.cuda.accelerator import DeviceFault, Launch
from quire.backends.cuda.driver import Gpu, open_gpu
from quire.backends.cuda.gpu_group import GpuGroup
from quire.backends.cuda.self_check import check_accelerator
from quire.errors import ConfigError


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> PretendedKernels:
    return pretend(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(autouse=True)
def no_errors(kernels: PretendedKernels) -> Iterator[None]:
    """Fail a test in whose launches something was wrong."""
    yield
    assert kernels.errors == []


@pytest.fixture
def gpu(kernels: PretendedKernels) -> Gpu:
    return open_gpu(0)


def test_what_a_gpu_says(gpu: Gpu) -> None:
    assert gpu.in_words() == "pretended GPU, sm_90"
    assert gpu.free_bytes() == (4 << 30) - (512 << 20)
    assert gpu.state() == ""
    with pytest.raises(ConfigError, match="there is no GPU 2: this machine has 2"):
        open_gpu(2)


def test_arrays_are_copied(gpu: Gpu) -> None:
    array = gpu.allocate(4096).part(64, (3, 5), np.dtype(np.float32))
    values = np.arange(15, dtype=np.float32).reshape(3, 5)
    gpu.write(array, values)
    buffer = gpu.stage(1 << 16)
    copy = gpu.fetch(array)
    buffer.bytes[:60] = 7
    gpu.upload(buffer, array).wait()
    assert (copy.result() == values).all()
    assert (gpu.fetch(array).result().view(np.uint8) == 7).all()


def test_a_check_passes(gpu: Gpu) -> None:
    check_accelerator(gpu)


@pytest.mark.parametrize("dependent", [True, False])
@pytest.mark.parametrize("number", [1, 2])
def test_graphs(kernels: PretendedKernels, number: int, dependent: bool) -> None:
    gpus = [open_gpu(i) for i in range(number)]
    accelerator: Any = gpus[0] if number == 1 else GpuGroup(gpus)
    x = accelerator.allocate(4096).part(0, (1, 1024), np.dtype(np.float32))
    accelerator.write(x, np.ones((1, 1024), np.float32))
    double = Launch("scale", (1, 1, 1), (x, x, 1024, 2.0), {"BLOCK": 1024})
    accelerator.launch(double)
    before = len(kernels.dependent)
    graph = accelerator.capture([double, Launch("scale", (0, 1, 1), (), {}), double, double], dependent)
    assert kernels.dependent[before:] == [False] * number + [dependent] * 2 * number
    assert (accelerator.fetch(x).result() == 2).all()
    for _ in range(2):
        graph.replay()
    assert (accelerator.fetch(x).result() == 128).all()


def test_an_error_of_the_driver_is_a_fault_of_the_device(gpu: Gpu) -> None:
    with pytest.raises(DeviceFault, match=r"CUDA_ERROR_OUT_OF_MEMORY.*; it still works") as raised:
        gpu.allocate(1 << 60)
    assert "end what else uses the GPU" in str(raised.value.hint)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": "int4"},
        {"tensor_parallel_size": 2, "max_steps_in_flight": 2, "speculative": "auto"},
    ],
    ids=["bf16", "int4", "two GPUs"],
)
def test_requests_have_the_bits_of_the_interpreted_accelerator(
    kernels: PretendedKernels, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divided, "LEAST_SIZE", 0)
    model, found = write_checkpoint(tmp_path), []
    for device in ("cuda-interpreted", "cuda:0"):
        before = len(kernels.dependent)
        llm = make(model, device=device, **options)
        found.append([fingerprint(output) for output in ask(llm)])
        llm.close()
        launches = kernels.dependent[before:]
        assert bool(launches) == any(launches) == (device == "cuda:0")
    assert found[0] == found[1]
