"""Test the native core on an emulated processor, whose instructions this machine need not have.

    python scripts/emulate.py BOCHS --isas             # only print the instruction sets found
    python scripts/emulate.py BOCHS -- tests/native/test_ops.py -k avx512_vnni
    python scripts/emulate.py --again BOCHS -- tests/native/test_rows.py     # on the disk of the last run
    python scripts/emulate.py --cpu arrow_lake BOCHS -- tests/native/test_ops.py -k avx2_vnni

Bochs emulates a whole computer, whose processor is a Sapphire Rapids or another that it knows. Linux,
Python and this folder with its .venv, which `make -B .venv/.test SETS=all` builds before, run there. Up to
100 million instructions a second are emulated, and pytest takes minutes to start, so name few files and
one set: `-k` takes what pytest does. The exit status is that of pytest. Bochs has no XFD, without which
Linux hides AMX; of that set its twin runs. To build Bochs:

    git clone https://github.com/bochs-emu/Bochs && cd Bochs/bochs
    CXXFLAGS="-O3 -march=native" ./configure --enable-cpu-level=6 --enable-x86-64 --enable-avx --enable-evex \
        --enable-amx --enable-pci --enable-all-optimizations --without-x --with-nogui && make -j2

On Debian it needs the packages busybox-static cpio dosfstools e2fsprogs kmod mtools syslinux; a kernel is
downloaded by apt.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path.cwd()  # of the repository: it has the same path there
DATA = ROOT.parent / "shared/data"  # of tests that compare with published results, where it is there
FOLDER = Path("/var/tmp/quire-emulated")
MODULES = ("ata_piix", "sd_mod", "crc32c_generic", "ext4")
CYLINDER = 16 * 63 * 512  # disks are whole numbers of these
START = 2048  # sector of the one partition of the disk that boots
MEMORY_MIB = 3072
LEFT_OUT = ("site-packages", "test", "config-3*")  # of the library of Python
UNTESTED = ("mypy", "mypyc", "clang_format", "ruff", "torch", "transformers", "triton")  # of .venv
TOP = (".git", "build", "dist", ".wheels", ".cuda", ".clients", ".ray", ".browser", ".agents")  # of ROOT
ENVIRONMENT = {
    "PATH": "/usr/bin",
    "HOME": "/tmp",
    "LC_ALL": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",  # its sorting meets an illegal instruction
}
# Files are read-only there, time is not ours, and there is one processor.
PLUGINS = ("xdist", "cacheprovider", "hypothesispytest")  # left out
SETTINGS = ("faulthandler_timeout=0", "addopts=--import-mode=importlib")
ISAS = "from quire.backends.native import _core; print('instruction sets:', *_core.isas())"
ENDED = "quire-ended"

INIT = f"""#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /system
/bin/busybox mount -t devtmpfs none /dev
for module in $(/bin/busybox cat /modules); do /bin/busybox insmod /m/$module; done
while ! [ -e /dev/sdb ]; do /bin/busybox sleep 0.1; done
/bin/busybox mount -t ext4 -o ro /dev/sdb /system
/bin/busybox mount -t proc none /system/proc
/bin/busybox mount -t sysfs none /system/sys
/bin/busybox cp /command /dev/command
/bin/busybox mount --bind /dev /system/dev
/bin/busybox mkdir -p /system/dev/shm
/bin/busybox mount -t tmpfs none /system/dev/shm
/bin/busybox mount -t tmpfs none /system/tmp
exec < /dev/null > /dev/ttyS0 2>&1
/bin/busybox chroot /system /bin/sh /dev/command
echo "{ENDED} $?"
/bin/busybox poweroff -f
"""


def run(*words: object, **how: object) -> str:
    """Run a program; return its output. Raises CalledProcessError if it fails."""
    command = [str(word) for word in words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **how).stdout  # type: ignore[call-overload,no-any-return]


def libraries(folders: list[Path]) -> set[str]:
    """Return the paths of the libraries of this machine that programs below these folders load."""
    files = [str(file) for folder in folders for file in folder.rglob("*.so*") if file.is_file()]
    command = ["ldd", *files, str(Path(sys.executable).resolve())]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    named = set(re.findall(r"(?:=> |^\t)(/\S+) \(", found.stdout, re.MULTILINE))
    return {name for name in named if not any(name.startswith(str(folder)) for folder in folders)}


def make_system(disk: Path) -> None:
    """Make the disk with Python, Quire, its tests and what they need, from this machine."""
    root, busybox = FOLDER / "root", shutil.which("busybox") or "busybox"
    shutil.rmtree(root, ignore_errors=True)
    for name in ("usr/bin", "usr/lib/x86_64-linux-gnu", "usr/lib64", "proc", "sys", "dev", "tmp", "etc"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc/passwd").write_text("root:x:0:0:root:/tmp:/bin/sh\n", "ascii")
    shutil.copy(busybox, root / "bin/busybox")
    for name in run(busybox, "--list").split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    python = Path(run(ROOT / ".venv/bin/python", "-c", "import sys; print(sys.base_prefix)").strip())
    excluded = [f"{ROOT}/{name}" for name in TOP]
    excluded += [f"{ROOT}/.venv/lib/python3.*/site-packages/{name}" for name in UNTESTED]
    library = Path(
        run(ROOT / ".venv/bin/python", "-c", "import os; print(os.path.dirname(os.__file__))").strip()
    )
    excluded += [f"{library}/{name}" for name in LEFT_OUT]
    kept = [str(path) for path in (python / "bin", library, ROOT, DATA) if path.exists()]
    pack = ["tar", "-C", "/", "-cPf", "-", "--wildcards", *(f"--exclude={name}" for name in excluded), *kept]
    with subprocess.Popen(pack, stdout=subprocess.PIPE) as packed:
        unpack = ["tar", "-C", str(root), "-xf", "-"]
        subprocess.run(unpack, stdin=packed.stdout, stderr=subprocess.DEVNULL, check=True)
    for name in libraries([library, ROOT / ".venv"]):
        to = root / name.lstrip("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, to)
    mib = int(run("du", "-sm", root).split()[0]) * 1.15 + 200
    disk.unlink(missing_ok=True)
    with disk.open("wb") as file:
        file.truncate(int(mib * 2**20) // CYLINDER * CYLINDER)
    run("mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-d", root, disk)


def linux() -> Path:
    """Return a folder with a kernel of Debian, unpacked there once."""
    folder = FOLDER / "kernel"
    if not folder.exists():
        package = re.findall(r"linux-image-\S+", run("apt-cache", "depends", "linux-image-amd64"))[-1]
        run("apt-get", "-qq", "download", package, cwd=FOLDER)
        run("dpkg-deb", "-x", next(FOLDER.glob(f"{package}*.deb")), folder)
        run("depmod", "-b", folder, next((folder / "lib/modules").iterdir()).name)
    return folder


def make_initrd(folder: Path, modules: Sequence[str], init: str, command: str) -> Path:
    """Return the files that Linux begins with, made in a folder: its first process runs `init`.

    That finds the names of the modules to load in /modules, and a command of the shell in /command.
    """
    files = linux()
    version = next((files / "lib/modules").iterdir()).name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    (folder / "m").mkdir()
    shutil.copy(shutil.which("busybox") or "busybox", folder / "bin/busybox")
    order: list[str] = []
    for module in modules:
        for line in run("modprobe", "-d", files, "-S", version, "--show-depends", module).splitlines():
            path = Path(line.split()[1])
            if line.startswith("insmod") and path.name not in order:
                order.append(path.name)
                shutil.copy(path, folder / "m")
    for name, text in (("modules", "\n".join(order)), ("init", init), ("command", command)):
        (folder / name).write_text(text, "utf-8")
    (folder / "init").chmod(0o755)
    image = folder.with_suffix(".img")
    run("sh", "-c", f"find . | cpio -o -H newc --quiet > ../{image.name}", cwd=folder)
    return image


def make_boot(disk: Path, command: str) -> None:
    """Make the disk that boots Linux, whose first process runs a command of the shell in the system."""
    files, image = linux(), make_initrd(FOLDER / "initrd", MODULES, INIT, command)
    options = "console=ttyS0,115200 init=/init mitigations=off nokaslr nowatchdog loglevel=4 tsc=reliable"
    options += " clearcpuid=fsrm,amx_tile"  # Linux expects more of them than Bochs has
    config = FOLDER / "syslinux.cfg"
    config.write_text(f"DEFAULT q\nLABEL q\nKERNEL vmlinuz\nINITRD {image.name}\nAPPEND {options}\n", "ascii")
    with disk.open("wb") as file:
        file.truncate(80 * CYLINDER)
        sectors = 80 * CYLINDER // 512 - START
        file.write(Path("/usr/lib/syslinux/mbr/mbr.bin").read_bytes())
        file.seek(446)
        entry = struct.pack("<8BII", 0x80, 0, 0, 0, 0xE, 0xFE, 0xFF, 0xFF, START, sectors)
        file.write(entry.ljust(64, b"\0") + b"\x55\xaa")
    run("mkfs.vfat", "-F", "16", "--offset", START, "-h", START, "-g", "16/63", disk, sectors // 2)
    kernel = next((files / "boot").glob("vmlinuz-*"))
    for path, name in ((kernel, "vmlinuz"), (image, ""), (config, "")):
        run("mcopy", "-i", f"{disk}@@{START * 512}", path, f"::{name}")
    run("syslinux", "--offset", START * 512, "--install", disk)


def emulate(bochs: Path, cpu: str, boot: Path, system: Path) -> int:
    """Run the computer until its command has ended, print what it prints, and return the status."""
    bios, serial = bochs.parent / "bios", FOLDER / "serial.txt"
    serial.write_bytes(b"")
    settings = FOLDER / "bochsrc"
    settings.write_text(
        f"""config_interface: textconfig
display_library: nogui
megs: {MEMORY_MIB}
cpu: model={cpu}, count=1, ips=100000000
romimage: file={bios}/BIOS-bochs-latest
vgaromimage: file={bios}/VGABIOS-lgpl/VGABIOS-lgpl-latest.bin
clock: sync=none
pci: enabled=1, chipset=i440fx
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=disk, mode=volatile, path={boot}
ata0-slave: type=disk, mode=volatile, path={system}
boot: disk
com1: enabled=1, mode=file, dev={serial}
log: {FOLDER}/bochs.log
panic: action=fatal
error: action=ignore
info: action=report
debug: action=ignore
""",
        "utf-8",
    )
    with (FOLDER / "out.txt").open("wb") as out:
        command = [str(bochs), "-q", "-f", str(settings)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        return follow(serial, process)
    finally:
        process.terminate()
        process.wait()


def follow(serial: Path, process: subprocess.Popen[bytes]) -> int:
    """Print what arrives until a line tells the status."""
    with serial.open("rb") as file:
        rest = b""
        while True:
            has_ended = process.poll() is not None
            *lines, rest = (rest + file.read().replace(b"\r", b"")).split(b"\n")
            for line in lines:
                text = line.decode("utf-8", "replace")
                if text.startswith(ENDED):
                    return int(text.split()[1])
                print(text, flush=True)
            if has_ended:
                print(
                    f"quire: the emulator ended early; see out.txt and bochs.log in {FOLDER}", file=sys.stderr
                )
                return 1
            time.sleep(0.2)


def main() -> int:
    """Make the disks and run the emulator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bochs", type=Path, help="the program, in the folder where it was built")
    parser.add_argument("--cpu", default="sapphire_rapids", help="the processor (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="take the system of the last run")
    parser.add_argument(
        "--isas", action="store_true", help="only print the instruction sets that Quire finds"
    )
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    system, boot, python = FOLDER / "system.img", FOLDER / "boot.img", ROOT / ".venv/bin/python"
    if not args.again or not system.exists():
        make_system(system)
    command = shlex.join([str(python), "-c", ISAS])
    flags = ["-W", "ignore", "--color=no", *(f"-pno:{name}" for name in PLUGINS)]
    flags += [word for setting in SETTINGS for word in ("-o", setting)]
    if not args.isas:
        command += " && " + shlex.join([str(python), "-m", "pytest", *flags, *args.pytest])
    exports = "".join(f"export {name}={value}\n" for name, value in ENVIRONMENT.items())
    make_boot(boot, f"{exports}cd {ROOT}\n{command}\n")
    return emulate(args.bochs.resolve(), args.cpu, boot, system)


if __name__ == "__main__":
    sys.exit(main())
