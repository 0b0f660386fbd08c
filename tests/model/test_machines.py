"""The catalogue of machines: the published facts, and how one is found by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.roofline.machines import GPU_MEMORY_SHARE, catalogue, find, this_machine
from quire.roofline.probe import Ceilings


def test_the_catalogue_has_the_published_facts(shared_data: Path) -> None:
    devices = json.loads((shared_data / "perf" / "hardware.json").read_text())["devices"]
    assert [machine.name for machine in catalogue()] == [device["name"] for device in devices]
    for machine, device in zip(catalogue(), devices, strict=True):
        assert machine.memory_bytes == device["memory_gb"] * 1e9 * GPU_MEMORY_SHARE
        assert machine.bandwidth == device["memory_bandwidth_gb_s"] * 1e9
        peaks = {kind: peak for kind, peak in device["peak_dense_tflops"].items() if peak is not None}
        assert {kind: rate / 1e12 for kind, rate in machine.operations.items()} == pytest.approx(peaks)
        assert list(machine.sources) == device["sources"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("H100 SXM", "H100 SXM"),
        ("h100 sxm", "H100 SXM"),
        ("4090", "GeForce RTX 4090"),
        ("B200", "B200 SXM (HGX)"),
    ],
)
def test_a_machine_is_found_by_words_of_its_name(asked: str, found: str) -> None:
    assert find(asked).name == found


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("H100", "H100 SXM, H100 PCIe"),
        ("H100 SMX", "did you mean 'H100 SXM'"),
        ("", "--machines"),
        ("abacus", "--machines"),
    ],
)
def test_an_unclear_name_is_an_error_with_names(asked: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        find(asked)
    assert told in str(error.value)


def test_a_format_without_an_instruction_takes_the_next_wider_one() -> None:
    turing = find("T4")
    assert turing.rate("bf16") == turing.rate("fp16") == 65e12
    assert find("A100 SXM 80GB").rate("fp8") == 312e12
    assert find("H100 SXM").ridge("bf16") == pytest.approx(295.3, abs=0.1)


def test_this_machine_has_its_measured_ceilings() -> None:
    found = Ceilings("a CPU", "avx2", 2, {"int8": 1e12, "bf16": 0.0, "f32": 2e11}, {2: {"memory": 3e10}}, 0.0)
    machine = this_machine(found, 8e9)
    assert (machine.kind, machine.bandwidth, machine.memory_bytes) == ("cpu", 3e10, 8e9)
    assert machine.rate("bf16") == machine.rate("f32") == 2e11
