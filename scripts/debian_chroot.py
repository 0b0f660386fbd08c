"""Debian in a folder, for the scripts that need a fresh one. Needs root, debootstrap and a Debian mirror."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # as Docker sets it
OF_THE_HOST = ("proc", "sys", "dev")


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

    def _inside(self, argv: list[str]) -> list[str]:
        environment = [f"{name}={value}" for name, value in self.environment.items()]
        return ["chroot", f"--userspec={self.user}", str(self.root), "env", "-i", *environment, *argv]


def release_files(release: str, folder: Path) -> Path:
    """Return the folder with the fewest packages of a release, installed there once."""
    files = folder / release
    if not files.exists():
        subprocess.run(["debootstrap", "--variant=minbase", release, str(files), MIRROR], check=True)
    return files


def new_chroot(release: str, folder: Path, name: str, cert: Path | None) -> Chroot:
    """Make a chroot from a release, with this system's processes and devices; pip trusts `cert`, if given."""
    root = folder / name
    subprocess.run(["cp", "-a", str(release_files(release, folder)), str(root)], check=True)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    for what in OF_THE_HOST:
        subprocess.run(["mount", "--rbind", "--make-rslave", f"/{what}", str(root / what)], check=True)
    chroot = Chroot(root)
    if cert is not None:
        shutil.copy(cert, root / "cert.pem")
        chroot.environment["PIP_CERT"] = "/cert.pem"
    return chroot


def unmount(root: Path) -> None:
    """Unmount what a chroot has of this system, which must come before its folder is removed."""
    for what in OF_THE_HOST:
        if (root / what).is_mount():
            subprocess.run(["umount", "--recursive", "--lazy", str(root / what)], check=True)
