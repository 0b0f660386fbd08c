"""Debian in a folder, for the scripts that need a fresh one. Needs root, debootstrap and a Debian mirror.

One for another architecture needs mmdebstrap instead, and qemu-user-static, by which its programs run. Its
packages are unpacked, not configured, by programs of this machine: seconds instead of a quarter of an hour.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # as Docker sets it
OF_THE_HOST = ("proc", "sys", "dev")
ARM = "arm64"  # as Debian names it
EMULATORS = Path("/proc/sys/fs/binfmt_misc")
HOOK = "/usr/share/mmdebstrap/hooks/maybe-merged-usr"  # /bin is /usr/bin, where the release has it so
FEWEST = "?or(?essential,?priority(required))"
# GCC for ARM, in the folders of one release or a later one, and the libraries that it needs.
COMPILER = "usr/bin/aarch64-linux-gnu-*", "usr/aarch64-linux-gnu", "usr/lib*/gcc-cross"
RUNS_COMPILER = "usr/lib/x86_64-linux-gnu", "usr/lib64"


@dataclass
class Chroot:
    """A folder that is the root of its processes."""

    root: Path
    release: str
    architecture: str | None = None  # that of this machine, unless it is given
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
        if self.architecture:
            unpack(self.root, self.release, self.architecture, *packages)
        else:
            self.environment["DEBIAN_FRONTEND"] = "noninteractive"
            self.read("apt-get update")
            self.read(f"apt-get install --yes --no-install-recommends {' '.join(packages)}")

    def install_compiler_for_arm(self, version: int) -> None:
        """Install GCC for ARM, a program of x86-64, not emulated, as aarch64-linux-gnu-g++-VERSION."""
        with tempfile.TemporaryDirectory() as folder:
            unpack(Path(folder), self.release, "amd64", f"g++-{version}-aarch64-linux-gnu")
            found = [path for pattern in COMPILER + RUNS_COMPILER for path in Path(folder).glob(pattern)]
            names = [str(path.relative_to(folder)) for path in found]
            subprocess.run(["cp", "-a", "--parents", *names, str(self.root)], check=True, cwd=folder)
        if not (self.root / "lib64").exists():  # where Linux looks for the loader of x86-64
            (self.root / "lib64").symlink_to("usr/lib64")

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


def unpack(root: Path, release: str, architecture: str, *packages: str) -> None:
    """Unpack packages of a release and those that they depend on, except essential ones; trust its CAs."""
    which = [f"--architectures={architecture}", *(f"--include={package}" for package in packages)]
    how = ["--quiet", "--variant=extract", f"--hook-dir={HOOK}", *which]
    kept = ["--keep-directory-symlink", "--exclude=./etc/resolv.conf"]
    kept += [f"--exclude=./{name}" for name in OF_THE_HOST]
    with tempfile.TemporaryDirectory() as folder:
        archive = str(Path(folder) / "files.tar")
        subprocess.run(["mmdebstrap", *how, release, archive, MIRROR], check=True)
        subprocess.run(["tar", "-xf", archive, "-C", str(root), *kept], check=True)
    certificates = [path.read_bytes() for path in root.glob("usr/share/ca-certificates/mozilla/*.crt")]
    if certificates:
        (root / "etc/ssl/certs/ca-certificates.crt").write_bytes(b"".join(certificates))


def release_files(release: str, folder: Path, architecture: str | None) -> Path:
    """Return the folder with the fewest packages of a release, installed there once."""
    files = folder / f"{release}-{architecture or 'own'}"
    if files.exists():
        return files
    if architecture:
        part = folder / f"{files.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        unpack(part, release, architecture, FEWEST)
        for name in ("passwd", "group"):
            shutil.copy(part / f"usr/share/base-passwd/{name}.master", part / "etc" / name)
        for name in OF_THE_HOST:
            (part / name).mkdir(exist_ok=True)
        part.rename(files)
    else:
        subprocess.run(["debootstrap", "--variant=minbase", release, str(files), MIRROR], check=True)
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
    chroot = Chroot(root, release, architecture)
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
