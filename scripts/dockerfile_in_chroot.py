"""Run the instructions of a Dockerfile in chroots of Debian, for machines without Docker.

    sudo python scripts/dockerfile_in_chroot.py examples/Dockerfile

Each stage becomes a folder. RUN, COPY, ENV and USER do what Docker would, without its layers and isolation;
then CMD is started, as the user of the image, and HEALTHCHECK is asked until it succeeds. Needs what
debian_chroot.py needs. The exit status is 0 if all of it worked.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from debian_chroot import Chroot, new_chroot, unmount

HEALTH_S = 60.0  # for the first successful check


@dataclass
class Stage(Chroot):
    """One stage of the build, and what its image starts."""

    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)


def instructions(text: str) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of each line, with continued lines joined and comments dropped."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = [line.strip().split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(name, arguments.strip()) for name, arguments in pairs]


def new_stage(image: str, folder: Path, number: int, cert: Path | None) -> Stage:
    """Install the Debian release that an image is named after; pip trusts `cert`, if given."""
    name, _, tag = image.partition(":")
    if name != "debian":
        sys.exit(f"the base image {image!r} is not Debian")
    made = new_chroot(tag.removesuffix("-slim"), folder, f"stage{number}", cert)
    return Stage(made.root, made.environment)


def copy(stage: Stage, arguments: str, context: Path, stages: dict[str, Stage]) -> None:
    """Do a COPY of one source."""
    words = shlex.split(arguments)
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")].root / words[0].lstrip("/")
        what = [str(source)]
    else:
        listed = subprocess.run(
            ["git", "-C", str(context), "ls-files", "-z"], check=True, capture_output=True
        )
        what = [name for name in listed.stdout.decode().split("\0") if name]
    target = stage.root / words[1].lstrip("/")
    if len(what) == 1:
        subprocess.run(["cp", "-a", what[0], str(target)], check=True)
        return
    for name in what:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(context / name, target / name)


def build(text: str, context: Path, folder: Path, cert: Path | None) -> Stage:
    """Do all instructions; return the last stage."""
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for name, arguments in instructions(text):
        print(f"== {name} {arguments}", flush=True)
        if name == "FROM":
            image, _, alias = arguments.partition(" AS ")
            stage = stages[alias or str(len(stages))] = new_stage(image, folder, len(stages), cert)
            continue
        assert stage is not None, "an instruction before FROM"
        match name:
            case "RUN":
                if status := stage.run(["sh", "-c", arguments]):
                    sys.exit(f"it ended with status {status}")
            case "COPY":
                copy(stage, arguments, context, stages)
            case "ENV":
                stage.environment |= dict(word.split("=", 1) for word in shlex.split(arguments))
            case "USER":
                stage.user = arguments
            case "CMD":
                stage.command = json.loads(arguments)
            case "HEALTHCHECK":
                stage.health = json.loads(arguments[arguments.index("CMD") + 3 :])
            case "VOLUME" | "EXPOSE":
                pass  # of the container, not of its files
            case _:
                sys.exit(f"{name} is not known here")
    assert stage is not None, "no FROM"
    return stage


def check(stage: Stage) -> bool:
    """Start CMD; return True if it becomes healthy and ends by SIGTERM with status 0."""
    server = stage.start(stage.command)
    deadline_s = time.monotonic() + HEALTH_S
    healthy = False
    while not healthy and server.poll() is None and time.monotonic() < deadline_s:
        time.sleep(1)
        healthy = stage.run(stage.health) == 0
    server.send_signal(signal.SIGTERM)
    status = server.wait(60)
    print(f"== healthy: {healthy}; after SIGTERM it ended with status {status}")
    return healthy and status == 0


def main() -> int:
    """Build and check; remove the folders unless they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--folder", type=Path, help="work in this folder, and keep it")
    parser.add_argument("--cert", type=Path, help="certificates that pip trusts, where a proxy has its own")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="dockerfile-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return 0 if check(build(given.dockerfile.read_text(), Path.cwd(), folder, given.cert)) else 1
    finally:
        for root in folder.glob("stage*"):
            unmount(root)
        if given.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
