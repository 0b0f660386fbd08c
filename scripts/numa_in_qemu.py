"""Run tests on an emulated machine with several NUMA nodes, which this machine need not have.

    python scripts/numa_in_qemu.py          # tests/native/test_node_pages.py, with two nodes of two cores
    python scripts/numa_in_qemu.py --cores 3 1 2 -- tests/native/test_nodes.py -k machine

QEMU emulates a whole computer. Linux and Python run there with the files of this machine, which they cannot
change. The exit status is that of pytest. Needs root, and on Debian the packages busybox-static cpio kmod
qemu-system-x86; a kernel is downloaded by apt.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from emulate import ENDED, FOLDER, linux, make_initrd

ROOT = Path.cwd()  # of the repository: it has the same path there
MODULES = ("virtio_pci", "9pnet_virtio", "9p")
FLAGS = (
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-W",
    "ignore",
    "--color=no",
    "-o",
    "faulthandler_timeout=0",
)
INIT = f"""#!/bin/busybox sh
/bin/busybox mkdir -p /dev /system
/bin/busybox mount -t devtmpfs none /dev
for module in $(/bin/busybox cat /modules); do /bin/busybox insmod /m/$module; done
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=1048576,cache=loose host /system
/bin/busybox mount -t proc none /system/proc
/bin/busybox mount -t sysfs none /system/sys
/bin/busybox mount -t devtmpfs none /system/dev
/bin/busybox mount -t tmpfs none /system/tmp
/bin/busybox cp /command /system/tmp/command
exec < /dev/null > /dev/ttyS0 2>&1
/bin/busybox chroot /system /bin/sh /tmp/command
echo "{ENDED} $?"
/bin/busybox poweroff -f
"""


def machine(cores: list[int], mib: int) -> list[str]:
    """Return the options for nodes with so many cores each, and as much memory each."""
    options, first = ["-smp", f"{sum(cores)},sockets=1", "-m", f"{mib * len(cores)}M"], 0
    for node, count in enumerate(cores):
        options += ["-object", f"memory-backend-ram,size={mib}M,id=m{node}"]
        options += ["-numa", f"node,nodeid={node},memdev=m{node},cpus={first}-{first + count - 1}"]
        first += count
    return options


def emulate(initrd: Path, options: list[str]) -> int:
    """Run the computer until its command has ended, print what it prints, and return the status."""
    kernel = next((linux() / "boot").glob("vmlinuz-*"))
    command = ["qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", *options]
    command += ["-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"]
    command += ["-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"]
    command += ["-kernel", str(kernel), "-initrd", str(initrd)]
    command += ["-append", "console=ttyS0 rdinit=/init loglevel=4 mitigations=off panic=-1"]
    status = 1
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode("utf-8", "replace").rstrip()
            if text.startswith(ENDED):
                status = int(text.split()[1])
            else:
                print(text, flush=True)
    return status


def main() -> int:
    """Run tests there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cores", type=int, nargs="+", default=[2, 2], help="of each node (default: 2 2)")
    parser.add_argument("--mib", type=int, default=1536, help="memory of each node (default: %(default)s)")
    parser.add_argument(
        "--python", type=Path, default=ROOT / ".venv/bin/python", help="default: that of .venv"
    )
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    words = [str(args.python), "-m", "pytest", *FLAGS, *(args.pytest or ["tests/native/test_node_pages.py"])]
    exports = "export HOME=/tmp LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 OPENBLAS_NUM_THREADS=1\n"
    exports += f"export PATH={shlex.quote(str(args.python.parent))}:/usr/bin:/bin\n"
    command = f"{exports}cd {shlex.quote(str(ROOT))}\n{shlex.join(words)}\n"
    initrd = make_initrd(FOLDER / "numa", MODULES, INIT, command)
    return emulate(initrd, machine(args.cores, args.mib))


if __name__ == "__main__":
    sys.exit(main())
