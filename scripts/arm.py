"""Build the native core for ARM and test it in an emulated Debian, on a machine with x86-64.

    sudo make arm                                  # builds, then runs the tests that `make arm` chooses
    sudo make arm ARGS="tests/native -k sampler"   # others

The chroot is kept in /var/cache/quire-arm; GCC for ARM is a program of x86-64, so compiling is not slow, and
qemu runs what is for ARM. A processor with all instruction sets is emulated; QEMU_CPU in the environment
names another (cortex-a72 has no dot products, neoverse-n1 no products of matrices). The exit status is that
of pytest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from debian_chroot import ARM, Chroot, mount, new_chroot, register_emulator, unmount

RELEASE, PYTHON = "bookworm", "3.11"
GCC = 12
PACKAGES = "packages"  # in the chroot
FOLDER = Path("/var/cache/quire-arm")  # outside of the tree, which packages and tools walk through
BUILT = ("CMakeLists.txt", "LICENSE", "README.md", "licenses", "pyproject.toml", "csrc", "quire")
TESTED = ("pyproject.toml", "tests", "benchmarks")
DATA = Path("../shared/data")  # of tests that compare with published results, where it is there
PASSED = ("QEMU_CPU", "QUIRE_ISA", "CMAKE_BUILD_PARALLEL_LEVEL")  # of the environment
CHECKERS = ("ruff", "mypy", "clang-format")  # of sources, not of what they do


def requirements() -> list[str]:
    """Return what builds Quire, what it depends on, and what its tests need."""
    described = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))
    project = described["project"]
    tests = [line for line in project["optional-dependencies"]["test"] if not line.startswith(CHECKERS)]
    return ["cmake", "ninja", *described["build-system"]["requires"], *project["dependencies"], *tests]


def prepared() -> Chroot:
    """Return the chroot, in which everything needed is installed once."""
    ready = FOLDER / "ready"
    wanted = "\n".join(requirements())
    if ready.exists() and ready.read_text("utf-8") == wanted:
        chroot = Chroot(FOLDER / "root", RELEASE, ARM)
        mount(chroot.root)
    else:
        unmount(FOLDER / "root")
        shutil.rmtree(FOLDER / "root", ignore_errors=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        print(f"quire: installing Debian for ARM in {FOLDER} (once; minutes) ...", file=sys.stderr)
        chroot = new_chroot(RELEASE, FOLDER, "root", None, ARM)
        chroot.install("python3-dev")
        chroot.install_compiler_for_arm(GCC)
        install_packages(chroot.root / PACKAGES)
        ready.write_text(wanted, "utf-8")
    chroot.environment |= {"PYTHONPATH": f"/source:/{PACKAGES}", "CXX": f"aarch64-linux-gnu-g++-{GCC}"}
    chroot.environment["PATH"] = f"/{PACKAGES}/cmake/data/bin:/{PACKAGES}/bin:{chroot.environment['PATH']}"
    return chroot


def install_packages(folder: Path) -> None:
    """Install what `requirements` names for the Python of the chroot, by a program of this machine."""
    target = ["--python-version", PYTHON, "--python-platform", "aarch64-manylinux_2_36", "--target", folder]
    command = [sys.executable, "-m", "uv", "pip", "install", "--only-binary=:all:", *target, *requirements()]
    subprocess.run([str(word) for word in command], check=True)


def copied(names: tuple[str, ...], to: Path) -> None:
    """Copy files and folders of the repository, with the times by which a build knows what is new."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    subprocess.run(["cp", "-a", "--no-preserve=ownership", *names, str(to)], check=True)


def copy_tree(root: Path) -> None:
    """Copy what is built and tested to a chroot, with the metadata that an installed package would have."""
    copied(BUILT, root / "source")
    copied(TESTED, root / "tested")
    facts = root / "source" / "quire-0.dist-info" / "METADATA"
    facts.parent.mkdir()
    facts.write_text("Metadata-Version: 2.1\nName: quire\nVersion: 0\n", "utf-8")
    if DATA.exists():
        copied((str(DATA),), root / "shared")


def main() -> int:
    """Build, install and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    _, pytest = parser.parse_known_args()
    if os.geteuid() or not shutil.which("mmdebstrap") or not shutil.which("qemu-aarch64-static"):
        print("quire: an emulated Debian needs root, mmdebstrap and qemu-user-static.", file=sys.stderr)
        print("hint: sudo apt install mmdebstrap qemu-user-static, then sudo make arm", file=sys.stderr)
        return 1
    register_emulator()
    try:
        chroot = prepared()
        chroot.environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        chroot.environment |= {name: os.environ[name] for name in PASSED if name in os.environ}
        copy_tree(chroot.root)
        chroot.read("cmake -S /source -B /build -G Ninja -DPython_EXECUTABLE=/usr/bin/python3")
        chroot.read("cmake --build /build && cmake --install /build --prefix /source")
        sets = chroot.read("python3 -c 'from quire.backends.native import _core; print(*_core.isas())'")
        print(f"quire: testing {sets.strip()}", file=sys.stderr)
        return chroot.run(["sh", "-c", 'cd /tested && exec python3 -m pytest "$@"', "pytest", *pytest])
    finally:
        unmount(FOLDER / "root")


if __name__ == "__main__":
    sys.exit(main())
