"""Tests of the driver's module on pretended GPUs; test_driver.py runs them in a process of their own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvmath.bindings import cublasLt
from on_accelerator import CHECKPOINT, write_checkpoint
from pretended_cublas import MANY_ROWS, PretendedProducts, pretend_cublas
from pretended_gpu import PretendedKernels, pretend
from test_cuda_engine import ask, make
from test_exactness import fingerprint
from test_gpu_check import load_script

from quire.backends.cuda import divided, library
from quire.backends.cuda.accelerator import DeviceArray, DeviceFault, Launch
from quire.backends.cuda.driver import Gpu, open_gpu
from quire.backends.cuda.gpu_group import GpuGroup
from quire.backends.cuda.library import LEAST_ROWS, open_library
from quire.backends.cuda.pinned import PinnedBuffers
from quire.backends.cuda.products import float_product
from quire.backends.cuda.self_check import check_accelerator
from quire.errors import ConfigError
from quire.quantize.kinds import DTYPES
from quire.sampling_params import SamplingParams

OUTPUTS, INPUTS = 192, 320


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> PretendedKernels:
    return pretend(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="session")
def cublas(kernels: PretendedKernels, tmp_path_factory: pytest.TempPathFactory) -> PretendedProducts:
    return pretend_cublas(tmp_path_factory.mktemp("cublas"))


@pytest.fixture(autouse=True)
def no_errors(kernels: PretendedKernels, cublas: PretendedProducts) -> Iterator[None]:
    """Fail a test in whose launches something was wrong."""
    cublas.asked.clear()
    cublas.is_exact = True
    yield
    assert kernels.errors == cublas.errors == []
    assert cublas.library.pretended_layouts() == 0


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


def test_a_copy_to_the_host_keeps_no_memory_of_a_gpu(gpu: Gpu) -> None:
    """What is copied may be freed behind it, before somebody takes the copy."""
    free = gpu.free_bytes()
    copy = gpu.fetch(gpu.allocate(1 << 20))
    assert gpu.free_bytes() == free
    assert copy.result().shape == (1 << 20,)


def test_pinned_memory_is_used_again(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """For copies each of which is a little larger than the one before."""
    pinned, allocated = PinnedBuffers(gpu._pinned.allocate), list[int]()
    own = pinned.allocate
    monkeypatch.setattr(pinned, "allocate", lambda size: allocated.append(size) or own(size))
    monkeypatch.setattr(gpu, "_pinned", pinned)
    array = gpu.allocate(1 << 20)
    for size in range(1 << 19, 1 << 20, 1 << 16):
        gpu.fetch(array.part(0, (size,))).result()
    assert sum(allocated) <= 2 << 20


def test_a_check_passes(gpu: Gpu) -> None:
    """It leaves no memory behind."""
    free = gpu.free_bytes()
    check_accelerator(gpu)
    assert gpu.free_bytes() == free


def test_memory_is_free_for_the_next_model(tmp_path: Path, gpu: Gpu) -> None:
    """Also of matrices and activations that kernels take by tiles, once they have been launched."""
    gpu.open_library()  # whose workspace stays
    free, model = gpu.free_bytes(), write_checkpoint(tmp_path, format="bf16")
    llm = make(model, device="cuda:0")
    ask(llm)
    assert gpu._descriptors
    assert gpu.free_bytes() < free
    llm.close()
    del llm
    assert gpu.free_bytes() == free


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


@pytest.mark.parametrize("number", [1, 2])
def test_garbage_is_freed_after_a_graph_was_captured(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of an array that is freed may be one that is being captured, which frees nothing."""
    gpus = [open_gpu(i) for i in range(number)]
    accelerator: Any = gpus[0] if number == 1 else GpuGroup(gpus)
    x = accelerator.allocate(4096).part(0, (1, 1024), np.dtype(np.float32))
    double = Launch("scale", (1, 1, 1), (x, x, 1024, 2.0), {"BLOCK": 1024})
    accelerator.launch(double)
    free, submit = accelerator.free_bytes(), Gpu.submit

    def collecting(own: Gpu, call: tuple[Any, ...], stream: Any) -> None:
        if gc.isenabled():
            gc.collect()  # as it may at any time
        submit(own, call, stream)

    monkeypatch.setattr(Gpu, "submit", collecting)
    garbage = [accelerator.allocate(1 << 20)]
    garbage.append(garbage)
    del garbage
    accelerator.capture([double])
    assert accelerator.free_bytes() == free


def test_an_error_of_the_driver_is_a_fault_of_the_device(gpu: Gpu) -> None:
    with pytest.raises(DeviceFault, match=r"CUDA_ERROR_OUT_OF_MEMORY.*; it still works") as raised:
        gpu.allocate(1 << 60)
    assert "end what else uses the GPU" in str(raised.value.hint)


def test_a_gpu_that_broke_ends_the_work_of_all(kernels: PretendedKernels) -> None:
    """Also where the driver reports it of another GPU, which itself works."""
    first, _ = (open_gpu(i) for i in range(2))
    kernels.fail(1, 700)
    with pytest.raises(DeviceFault, match="it works no more") as raised:
        first.allocate(1 << 60)
    kernels.fail(1, 0)
    assert not raised.value.works


def test_a_driver_that_cannot_be_used_says_why(kernels: PretendedKernels) -> None:
    kernels.fail(-1, 802)
    with pytest.raises(ConfigError, match="CUDA_ERROR_SYSTEM_NOT_READY"):
        open_gpu(9)
    kernels.fail(-1, 0)


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


def _product(gpu: Gpu, rows: int) -> Launch:
    """Return a product of random rows and one weight, written to new memory."""
    rng, dtype = np.random.default_rng(1), DTYPES["bf16"]
    weight, x = (rng.standard_normal((n, INPUTS)).astype(dtype) for n in (OUTPUTS, rows))
    arrays = [gpu.allocate(own.nbytes).part(0, own.shape, dtype) for own in (x, weight)]
    for array, values in zip(arrays, (x, weight), strict=True):
        gpu.write(array, values)
    out = gpu.allocate(4 * rows * OUTPUTS).part(0, (rows, OUTPUTS), np.dtype(np.float32))
    return float_product(out, arrays[0], arrays[1], out)


def _result(gpu: Gpu, launch: Launch) -> np.ndarray:
    out = launch.args[0]
    assert isinstance(out, DeviceArray)
    return gpu.fetch(out).result()


def test_cublas_computes_what_it_was_proved_for(
    kernels: PretendedKernels, cublas: PretendedProducts, gpu: Gpu
) -> None:
    library = gpu.open_library()
    assert library is not None
    assert library.name == "cuBLAS 13.1.2"
    few, many, more = (_product(gpu, rows) for rows in (LEAST_ROWS - 1, LEAST_ROWS, MANY_ROWS))
    gpu.launch(many)
    assert cublas.asked == []
    wanted = _result(gpu, many)
    assert library.prove([many, more])
    # The first has other bits at once, the second in the larger product alone.
    asked = [(algorithm, rows) for algorithm, rows, outputs, inputs in cublas.asked]
    assert asked == [(0, LEAST_ROWS), (1, LEAST_ROWS), (1, MANY_ROWS), (2, LEAST_ROWS), (2, MANY_ROWS)]
    cublas.asked.clear()
    before = len(kernels.dependent)
    gpu.launch(many)
    assert cublas.asked == [(2, LEAST_ROWS, OUTPUTS, INPUTS)]
    assert (_result(gpu, many) == wanted).all()
    with_bias = replace(many, constants={**many.constants, "BIAS": True})
    for launch in (few, with_bias):
        gpu.launch(launch)
    gpu.capture([many]).replay()
    assert len(cublas.asked) == 1
    assert len(kernels.dependent) == before + 3
    with pytest.raises(ValueError, match="only large products"):
        library.prove([few])


def test_cublas_computes_nothing_else(cublas: PretendedProducts, gpu: Gpu) -> None:
    library, product = gpu.open_library(), _product(gpu, MANY_ROWS)
    assert library is not None
    assert library.prove([product])
    cublas.is_exact = False
    assert not library.prove([product])
    cublas.asked.clear()
    gpu.launch(product)
    assert cublas.asked == []


@pytest.mark.parametrize("is_exact", [True, False])
def test_the_check_of_a_gpu_compares_cublas(cublas: PretendedProducts, gpu: Gpu, is_exact: bool) -> None:
    cublas.is_exact = is_exact
    check = load_script()
    piece = check.Piece(gpu, True, True, lambda piece: None)
    check._by_cublas(piece, _product(gpu, MANY_ROWS), 1.0, 2)
    facts = piece.rows[0]
    assert (facts["what"], facts["equal_bits"]) == ("product by cuBLAS 13.1.2", int(is_exact))
    assert ("times_as_fast" in facts) == is_exact
    assert sum(algorithm == 2 for algorithm, *_ in cublas.asked) == (4 if is_exact else 1)


def test_without_cublas(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> int:
        raise cublasLt.cuBLASLtError(1)

    monkeypatch.setattr(cublasLt, "create", fail)
    assert open_library(gpu) is None
    assert "cuBLAS is not used: NOT_INITIALIZED" in caplog.text
    assert "pip install 'quire[cublas]'" in caplog.text
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    caplog.clear()
    assert open_library(gpu) is None
    assert caplog.text == ""


@pytest.mark.parametrize("number", [1, 2])
def test_prompts_have_equal_bits_with_cublas(cublas: PretendedProducts, tmp_path: Path, number: int) -> None:
    model = write_checkpoint(tmp_path, {**CHECKPOINT, "max_position_embeddings": 512}, "bf16")
    prompt, found = [7 * i % 35 for i in range(LEAST_ROWS + 3)], []
    for is_exact in (True, False):
        cublas.is_exact = is_exact
        llm = make(
            model,
            device="cuda:0",
            tensor_parallel_size=number,
            max_model_len=512,
            max_num_batched_tokens=512,
        )
        chosen = llm.chosen["large_products"]
        shapes = (
            3 * number
        )  # of queries, of keys and values, and of what follows attention; gates have kernels
        told = (
            f"cuBLAS 13.1.2 in {shapes if is_exact else 0} of {shapes} shapes, from 257 rows on; else kernels"
        )
        assert chosen == told
        cublas.asked.clear()
        output = llm.generate(
            {"prompt_token_ids": prompt}, SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False
        )
        assert bool(cublas.asked) == is_exact
        assert {rows for _, rows, *_ in cublas.asked} <= {len(prompt)}
        found.append(fingerprint(output[0]))
        llm.close()
    assert found[0] == found[1]
