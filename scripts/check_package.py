"""Check what is in packages of Quire: every file that belongs there and no other.

    python scripts/check_package.py dist/*.tar.gz dist/*.whl

A source package has what a build needs. A wheel has the Python package, the native core with the kernels of
all instruction sets, the kernels for GPUs that its manifest names, which `make cubins` compiles and a source
package may have, and the licences. In wheels that auditwheel has named, the core needs no library beside
those of the C library. Run it in the clone that they were built from.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from email.parser import BytesParser
from pathlib import Path
from typing import Any

SOURCE = ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "csrc/", "licenses/", "quire/")
C_LIBRARY = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
C_LIBRARY |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
CORE = re.compile(r"quire/backends/native/_core\.(abi3|cpython-311-(x86_64|aarch64)-linux-gnu)\.so")
CUBINS = "quire/backends/cuda/cubins/"
BEST_SETS = {"x86_64": "avx512_amx", "aarch64": "neon_i8mm"}


def tracked(*prefixes: str) -> set[str]:
    """Return the files in git that are one of these names, or begin with them."""
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    return {name for name in listed.split("\0") if name and name.startswith(prefixes)}


def differences(found: set[str], expected: set[str]) -> list[str]:
    """Return what is wrong with a list of files."""
    stray, missing = sorted(found - expected), sorted(expected - found)
    return [f"stray: {name}" for name in stray] + [f"missing: {name}" for name in missing]


def check_cubins(names: set[str], read: Callable[[str], bytes]) -> list[str]:
    """Return what is wrong with the kernels for GPUs in a package, whose files are read by name."""
    targets = json.loads(read(CUBINS + "manifest.json"))["targets"]
    sums = {
        f"{CUBINS}{target}/{entry['sha256']}.cubin": entry["sha256"]
        for target, kernels in targets.items()
        for entry in kernels.values()
    }
    found = {name for name in names if name.endswith(".cubin")}
    if not found:
        return [f"no kernels for GPUs, {len(sums)} in the manifest: run `make cubins` before it is built"]
    digests = {name: hashlib.sha256(read(name)).hexdigest() for name in found & sums.keys()}
    wrong = sorted(name for name, digest in digests.items() if digest != sums[name])
    return differences(found, set(sums)) + [f"not what the manifest names: {name}" for name in wrong]


def check_source(path: Path) -> list[str]:
    """Return what is wrong with a source package."""
    folder = path.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(path) as package:  # read in order: going back decompresses it from its beginning
        read: Any = package.extractfile  # None only for what is no file
        contents = {member.name: read(member).read() for member in package if member.isfile()}
    files = {name.removeprefix(folder): content for name, content in contents.items()}
    cubins = {name for name in files if name.endswith(".cubin")}
    wrong = check_cubins(set(files), files.__getitem__) if cubins else []
    return wrong + differences(set(files) - cubins, tracked(*SOURCE) | {"PKG-INFO"})


def instruction_sets(platform: str) -> list[str]:
    """Return the instruction sets that CMakeLists.txt names for the machines of a wheel."""
    best = next(best for machine, best in BEST_SETS.items() if platform.endswith(machine))
    text = Path("CMakeLists.txt").read_text("utf-8")
    return re.findall(rf"set\(QUIRE_ISAS ({best} .*)\)", text)[0].split()


def needed_libraries(core: bytes) -> set[str]:
    """Return the shared libraries that a module names."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(core)
        file.flush()
        read = subprocess.run(["readelf", "--dynamic", file.name], check=True, capture_output=True, text=True)
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", read.stdout))


def check_wheel(path: Path) -> list[str]:
    """Return what is wrong with a wheel."""
    _, version, python, _, platform = path.stem.split("-")
    with zipfile.ZipFile(path) as package:
        names = {name for name in package.namelist() if not name.endswith("/")}
        cores = [name for name in names if CORE.fullmatch(name)]
        core = package.read(cores[0]) if cores else b""
        facts = f"quire-{version}.dist-info/"
        metadata = BytesParser().parsebytes(package.read(facts + "METADATA"))
        wrong = check_cubins(names, package.read)
    cubins = {name for name in names if name.endswith(".cubin")}
    licences = {facts + "licenses/" + name for name in tracked("LICENSE", "licenses/")}
    own = {facts + name for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    wrong += differences(names - set(cores) - cubins, tracked("quire/") | licences | own)
    if len(cores) != 1:
        wrong.append(f"{len(cores)} native cores: one is expected")
    if ("abi3" in path.stem) != (python != "cp311"):
        wrong.append(f"{python} is not for the stable interface of Python 3.12, or not the wheel for 3.11")
    if metadata["Version"] != version:
        wrong.append(f"its metadata has the version {metadata['Version']}")
    wrong += [
        f"no kernels for {isa}" for isa in instruction_sets(platform) if f"{isa}\0".encode() not in core
    ]
    if platform.startswith("manylinux"):
        wrong += [f"it needs {name}" for name in needed_libraries(core) - C_LIBRARY]
    return wrong


def main() -> int:
    """Check each file; return 0 if nothing is wrong."""
    status = 0
    for path in map(Path, sys.argv[1:]):
        wrong = (check_wheel if path.suffix == ".whl" else check_source)(path)
        print(f"{path.name} ({path.stat().st_size / 2**20:.1f} MiB): {'; '.join(wrong) or 'as expected'}")
        status |= bool(wrong)
    return status


if __name__ == "__main__":
    sys.exit(main())
