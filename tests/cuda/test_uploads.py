"""Uploads of weights: the bytes of the checkpoint, through bounded memory, whenever copies happen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from on_accelerator import write_checkpoint

from quire import LLM
from quire.backends.cuda import uploads
from quire.backends.cuda.accelerator import DeviceArray, HostBuffer, Launch, RankExchange, Upload
from quire.backends.cuda.interpreted import InterpretedAccelerator, view_of
from quire.backends.cuda.uploads import UploadRing
from quire.backends.cuda.weights import upload


class LateAccelerator(InterpretedAccelerator):
    """Copies and launches when somebody waits: what a buffer has by then is what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.staged: list[int] = []
        self.waiting: list[Callable[[], Any]] = []

    def stage(self, num_bytes: int) -> HostBuffer:
        self.staged.append(num_bytes)
        return super().stage(num_bytes)

    def upload(self, buffer: HostBuffer, array: DeviceArray) -> Upload:
        self.waiting.append(lambda: InterpretedAccelerator.upload(self, buffer, array))
        return _Late(self, len(self.waiting))

    def launch(self, launch: Launch | RankExchange) -> None:
        self.waiting.append(lambda: InterpretedAccelerator.launch(self, launch))

    def fetch(self, array: DeviceArray) -> Any:
        _Late(self, len(self.waiting)).wait()
        return super().fetch(array)


class _Late:
    def __init__(self, accelerator: LateAccelerator, number: int) -> None:
        self.accelerator, self.number = accelerator, number

    def wait(self) -> None:
        for begin in self.accelerator.waiting[: self.number]:
            begin()
        self.accelerator.waiting[: self.number] = [lambda: None] * self.number


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BUFFER_BYTES", 512)
    monkeypatch.setattr(uploads, "NUM_BUFFERS", 3)


def test_arrays_of_any_size_and_type(small: None) -> None:
    accelerator, rng = LateAccelerator(), np.random.default_rng(1)
    shapes = [(3,), (128,), (129, 7), (40, 50), (0, 4), (2, 3, 300)]
    kinds = [np.float32, np.int8, ml_dtypes.bfloat16, np.float16, np.uint8, np.float32]
    values = [
        rng.integers(0, 100, shape).astype(np.dtype(kind)) for shape, kind in zip(shapes, kinds, strict=True)
    ]
    values.append(values[3].T)
    places = []
    with UploadRing(accelerator, 4) as ring:
        for own in values:
            places.append(accelerator.allocate(max(own.nbytes, 1)).part(0, own.shape, own.dtype))
            ring.put(places[-1], own)
    assert accelerator.staged == [512] * 3
    for own, place in zip(values, places, strict=True):
        assert (view_of(place) == own).all()


def test_a_fault_in_a_thread_is_raised(small: None) -> None:
    accelerator = LateAccelerator()
    place = accelerator.allocate(2048)
    short: Any = HostBuffer(np.empty(1, np.uint8), None)
    accelerator.stage = lambda _: short  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="broadcast"), UploadRing(accelerator) as ring:
        ring.put(place, np.ones(2048, np.uint8))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_weights_of_a_checkpoint(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    """They are those that one large buffer gives, and progress ends with all bytes."""
    seen: list[tuple[int, int]] = []
    found: list[dict[str, Any]] = []

    def spy(plan: Any, accelerator: Any, *_: Any) -> Any:
        weights = upload(plan, accelerator, lambda done, total: seen.append((done, total)), 2)
        found.append({name: [view_of(a).copy() for a in own.arrays] for name, own in weights.items()})
        return weights

    monkeypatch.setattr("quire.backends.cuda.device.upload", spy)
    model = write_checkpoint(tmp_path)
    options: dict[str, Any] = {"quantization": quantization, "max_model_len": 64, "speculative": "off"}
    with monkeypatch.context() as patch:
        patch.setattr("quire.backends.cuda.interpreted.InterpretedAccelerator", LateAccelerator)
        LLM(model, device="cuda-interpreted", **options).close()
    monkeypatch.setattr(uploads, "BUFFER_BYTES", 1 << 20)
    LLM(model, device="cuda-interpreted", **options).close()
    assert found[0].keys() == found[1].keys()
    for name, arrays in found[0].items():
        for own, other in zip(arrays, found[1][name], strict=True):
            assert own.tobytes() == other.tobytes(), name
    assert seen[-1][0] == seen[-1][1] > 0
