"""Kernels for GPUs in packages: all that the manifest names, with their bytes, and no others."""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CODES = {"sm_80": b"one", "sm_90": b"another"}
FOLDER = "quire/backends/cuda/cubins/"


@pytest.fixture(scope="module")
def check() -> Any:
    return runpy.run_path(str(ROOT / "scripts" / "check_package.py"))["check_cubins"]


def package() -> dict[str, bytes]:
    """The files of a package by name."""
    sums = {target: hashlib.sha256(code).hexdigest() for target, code in CODES.items()}
    targets = {target: {"f(;)": {"sha256": own}} for target, own in sums.items()}
    files = {f"{FOLDER}{target}/{sums[target]}.cubin": code for target, code in CODES.items()}
    return files | {FOLDER + "manifest.json": json.dumps({"targets": targets}).encode(), "quire/x.py": b""}


def test_a_whole_package_is_as_expected(check: Any) -> None:
    files = package()
    assert check(set(files), files.__getitem__) == []


def test_faults_are_named(check: Any) -> None:
    files = package()
    first, second = sorted(name for name in files if name.endswith(".cubin"))
    without = {name: code for name, code in files.items() if name not in (first, second)}
    assert check(set(without), without.__getitem__) == [
        "no kernels for GPUs, 2 in the manifest: run `make cubins` before it is built"
    ]
    fewer = {name: code for name, code in files.items() if name != second}
    assert check(set(fewer), fewer.__getitem__) == [f"missing: {second}"]
    more = files | {f"{FOLDER}sm_90/0.cubin": b"old"}
    assert check(set(more), more.__getitem__) == [f"stray: {FOLDER}sm_90/0.cubin"]
    other = files | {first: b"damaged"}
    assert check(set(other), other.__getitem__) == [f"not what the manifest names: {first}"]


def test_wheels_are_refused_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    has_cubins = runpy.run_path(str(ROOT / "scripts" / "wheels.py"))["has_cubins"]
    sys.modules.pop("debian_chroot")
    file = tmp_path / "1.cubin"
    file.write_bytes(b"one")
    for name, wanted in (("a/1.cubin", True), ("a/1.py", False)):
        with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
            archive.add(file, name)
        assert has_cubins(tmp_path / "x.tar.gz") is wanted
