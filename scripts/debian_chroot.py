"""Debian in a folder, for the scripts that need a fresh one. Needs root, debootstrap and a Debian mirror.

One for another architecture also needs qemu-user-static, by which its programs run.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # as Docker sets it
OF_THE_HOST = ("proc", "sys", "dev")
ARM = "arm64"  # as Debian names it
EMULATORS = Path("/proc/sys/fs/binfmt_misc")


@dataclass
class Chroot:
    """A folder that is the root of its processes."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": DEFAULT_PATH, "HOME": "/root"})
    user: str = "root"

    def start(self, argv: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._inside(argv))

    def run(self, argv: list[str]) -> int:
        return self.start(argv).wait()

    def read(self, command: str) -> str:
        """Return what a command of the shell prints on both streams; raise an error if it fails."""
        ended = subprocess.run(
            self._inside(["sh", "-c", command]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise RuntimeError(f"{command}: it ended with status {ended.returncode}\n{ended.stdout}")
        return ended.stdout

    def install(self, *packages: str) -> None:
        """Install packages of Debian, without those that they recommend."""
        self.environment["DEBIAN_FRONTEND"] = "noninteractive"
        self.read("apt-get update")
        self.read(f"apt-get install --yes --no-install-recommends {' '.join(packages)}")

    def install_compiler_for_arm(self, version: int) -> None:
        """Install GCC for ARM, a program of x86-64 that needs no emulator, as aarch64-linux-gnu-g++-VERSION.

        The libraries that it needs are of all architectures, which apt takes for the chroot's own alone.
        """
        self.read("dpkg --add-architecture amd64")
        programs = "binutils-aarch64-linux-gnu:amd64", f"cpp-{version}-aarch64-linux-gnu:amd64"
        self.install(*programs, f"libstdc++-{version}-dev-arm64-cross")
        compilers = " ".join(f"{name}-{version}-aarch64-linux-gnu:amd64" for name in ("gcc", "g++"))
        self.read(f"mkdir /compilers && cd /compilers && apt-get download {compilers}")
        self.read("dpkg --force-depends --install /compilers/*.deb")

    def _inside(self, argv: list[str]) -> list[str]:
        environment = [f"{name}={value}" for name, value in self.environment.items()]
        return ["chroot", f"--userspec={self.user}", str(self.root), "env", "-i", *environment, *argv]


def register_emulator() -> None:
    """Let Linux run programs for ARM by qemu, in every folder, until it restarts."""
    if not (EMULATORS / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(EMULATORS)], check=True)
    if not (EMULATORS / "qemu-aarch64").exists():
        rule = Path("/usr/lib/binfmt.d/qemu-aarch64.conf").read_text("ascii")
        (EMULATORS / "register").write_text(rule.strip(), "ascii")


def release_files(release: str, folder: Path, architecture: str | None) -> Path:
    """Return the folder with the fewest packages of a release, installed there once."""
    files = folder / f"{release}-{architecture or 'own'}"
    if not files.exists():
        which = [f"--arch={architecture}"] if architecture else []
        subprocess.run(["debootstrap", "--variant=minbase", *which, release, str(files), MIRROR], check=True)
    return files


def new_chroot(
    release: str, folder: Path, name: str, cert: Path | None, architecture: str | None = None
) -> Chroot:
    """Make a chroot from a release, with this system's processes and devices; pip trusts `cert`, if given.

    `architecture` is this machine's, unless it is given.
    """
    root = folder / name
    subprocess.run(["cp", "-a", str(release_files(release, folder, architecture)), str(root)], check=True)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    mount(root)
    chroot = Chroot(root)
    if cert is not None:
        shutil.copy(cert, root / "cert.pem")
        chroot.environment["PIP_CERT"] = "/cert.pem"
    return chroot


def mount(root: Path) -> None:
    """Mount this system's processes and devices in a chroot."""
    for what in OF_THE_HOST:
        subprocess.run(["mount", "--rbind", "--make-rslave", f"/{what}", str(root / what)], check=True)


def unmount(root: Path) -> None:
    """Unmount what a chroot has of this system, which must come before its folder is removed."""
    for what in OF_THE_HOST:
        if (root / what).is_mount():
            subprocess.run(["umount", "--recursive", "--lazy", str(root / what)], check=True)
