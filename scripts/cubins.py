"""Compile the kernels of the cuda backend ahead of time, without a GPU, into quire/backends/cuda/cubins/.

Writes a cubin for each variant (quire.backends.cuda.kernels.variants) and target, and the manifest, which
says what each needs: registers, stack, shared memory, instructions. Needs Triton: `make cubins` has an
environment for it. Compiling again gives the same bytes; --check compiles and compares without writing
anything.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # else the bytes contain the paths of this machine
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "triton"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.backends.cuda import kernels
from quire.backends.cuda.kernels.product_variants import tiles_on
from quire.backends.cuda.kernels.variants import (
    ALIGNED,
    DEPENDENT,
    TARGETS,
    Variant,
    constants_on,
    most_stack_bytes,
    stages_on,
    variants,
)
from quire.backends.cuda.manifest import FOLDER, SWIZZLE

# What kernels that can begin early do first, in PTX: wait until the one before them has ended and can be
# read; then let the next one begin. Only weights are asked for before (tiles.read_ahead).
BEGIN = "\tgriddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;\n"
_ASKED = re.compile(r".*cp\.async\.bulk\.prefetch\.L2.*?// end inline asm\n", re.DOTALL)
_EARLY = re.compile(r"\b(ld|st|atom|red|cp|bra|ret)\b(?!\.param|\.async\.bulk\.prefetch)")
_BEGUN = re.compile("ACQBULK.*PREEXIT", re.DOTALL)  # BEGIN in machine code
_MEMORY = re.compile(r"\b(LDG|STG|ATOM|RED|UTMA|UBLK(?!PF))")
_WARP_GROUPS = ("HGMMA", "IGMMA", "UTCHMMA", "UTCIMMA")
COUNTED = (*_WARP_GROUPS, "HMMA", "IMMA", "UTMALDG", "UBLKPF", "LDGSTS", "STL", "LDL")
# Instructions of a whole group of warps, or of one where the target has none.
EXPECTED = {
    "float": {"sm_90": "HGMMA", "sm_100": "UTCHMMA"},
    "integer": {"sm_90": "IGMMA"},
}
WITH_PRODUCTS = ("product", "attend")  # in the names of kernels whose instructions are counted
MANIFEST = FOLDER / "manifest.json"
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
Entry = dict[str, Any]


def function_of(name: str) -> Any:
    """Return a kernel by name."""
    for file in sorted(Path(kernels.__path__[0]).glob("*.py")):
        module = import_module(f"{kernels.__name__}.{file.stem}")
        if isinstance(found := vars(module).get(name), triton.JITFunction):
            return found
    raise SystemExit(f"there is no kernel {name}")


def constants_of(variant: Variant, target: str) -> dict[str, Any]:
    """Return all constants of a variant for a target, with defaults of the kernel."""
    parameters = inspect.signature(function_of(variant.kernel).fn).parameters.values()
    defaults = {own.name: own.default for own in parameters if own.default is not own.empty}
    own = constants_on(variant, target)
    if "STAGES" in defaults:
        own["STAGES"] = stages_on(variant, target)
    if tiles_on(variant, target):
        own["TILED"] = True
    return defaults | variant.constants | own


def waiting(ptx: str) -> str:
    """Return a kernel in PTX, with BEGIN before its first instruction, or behind those that ask for weights.

    Raises SystemExit for what is no kernel, or accesses memory before it asks.
    """
    declared = re.search(r"\.visible \.entry [^{]*\{\n(?:\t\.[^\n]*\n|\n)*", ptx)
    if declared is None:
        raise SystemExit(f"not one kernel in PTX: {ptx[:200]}")
    start = declared.end()
    if asked := _ASKED.match(ptx, start):
        if early := _EARLY.search(asked[0]):
            raise SystemExit(f"this kernel has {early[0]} before it asks for weights: {declared[0][:200]}")
        start = asked.end()
    return ptx[:start] + BEGIN + ptx[start:]


def _change_stages(backend: Any = None, stages: Any = None, *about: Any) -> tuple[str, str] | None:
    """Let the stages of Triton make kernels that wait; return a key for its cache if there are none."""
    if stages is None:
        return BEGIN, BEGIN
    if f"sm_{about[-1]}" in DEPENDENT:
        make = stages["ptx"]
        stages["ptx"] = lambda source, metadata: waiting(make(source, metadata))
    return None


knobs.runtime.add_stages_inspection_hook = _change_stages


def compiled(variant: Variant, capability: int) -> tuple[bytes, Entry]:
    """Return the cubin of a variant for a target, and its entry in the manifest."""
    function = function_of(variant.kernel)
    names, constants = function.arg_names, constants_of(variant, f"sm_{capability}")
    expected = [name for name in names if name not in constants]
    if list(variant.types) != expected:
        raise SystemExit(f"{variant.kernel} has the arguments {expected}, not {list(variant.types)}")
    tiles = tiles_on(variant, f"sm_{capability}")
    tiled = {name: f"tensordesc<bf16[{rows},{inputs}]>" for name, (rows, inputs) in tiles.items()}
    types, aligned = variant.types | tiled, [["tt.divisibility", 16]]
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): aligned
            for i, name in enumerate(names)
            if name in ALIGNED or types.get(name, "").startswith("*")
        },
    )
    options = {
        "num_warps": variant.warps,
        "num_stages": stages_on(variant, f"sm_{capability}"),
        "enable_fp_fusion": False,
    }
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin: bytes = found.asm["cubin"]
    about = found.metadata
    if about.global_scratch_size or about.profile_scratch_size:
        raise SystemExit(f"{variant.key} needs scratch memory, which no launch gives")
    entry = {
        "symbol": about.name,
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "num_warps": about.num_warps,
        "shared_bytes": about.shared,
        "num_scratch": 2,
    }
    if tiles:
        if any(made["swizzle"] != SWIZZLE for made in about.tensordesc_meta):
            raise SystemExit(
                f"{variant.key} takes other tiles than the driver makes: {about.tensordesc_meta}"
            )
        entry["tiles"] = {str(expected.index(name)): list(tile) for name, tile in tiles.items()}
    return cubin, entry | _usage(cubin, any(name in variant.kernel for name in WITH_PRODUCTS))


def _usage(cubin: bytes, count: bool) -> Entry:
    """Return what a cubin needs, by the tools of CUDA that Triton brings; its instructions if asked."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output("cuobjdump", "--dump-resource-usage", file.name)
        code = _output("nvdisasm", "-c", file.name)
    before = _MEMORY.split(code, maxsplit=1)[0]
    counts = {name: len(re.findall(rf"\b{name}\b", code)) for name in COUNTED if count}
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "stack_bytes": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "waits": bool(_BEGUN.search(before)),
        "instructions": {name: count for name, count in counts.items() if count},
    }


def _output(tool: str, *args: str) -> str:
    return subprocess.run([_TOOLS / tool, *args], capture_output=True, text=True, check=True).stdout


def faults(key: str, variant: Variant, target: str, entry: Entry) -> list[str]:
    """Return what is wrong with a compiled kernel: a budget exceeded, an instruction missing."""
    found = []
    if entry["stack_bytes"] > (most := most_stack_bytes(variant, target)):
        found.append(f"{target} {key}: {entry['stack_bytes']} bytes of stack, budget {most}")
    wanted = EXPECTED.get(variant.tensor_cores, {}).get(target)
    if wanted and not entry["instructions"].get(wanted):
        found.append(f"{target} {key}: no {wanted} among {entry['instructions']}")
    if "tiles" in entry and not entry["instructions"].get("UTMALDG"):
        found.append(f"{target} {key}: no UTMALDG among {entry['instructions']}")
    if "AHEAD" in constants_on(variant, target) and not entry["instructions"].get("UBLKPF"):
        found.append(f"{target} {key}: no UBLKPF among {entry['instructions']}")
    if entry["waits"] != (target in DEPENDENT):
        found.append(f"{target} {key}: waits for the kernel before it: {entry['waits']}")
    return found


def source_of(variant: Variant, target: str) -> str:
    """Return a digest of what a variant is compiled from for a target: the kernel, what it calls, and how."""
    text = f"{function_of(variant.kernel).cache_key} {variant} {sorted(ALIGNED)} {triton.__version__}"
    if (stages := stages_on(variant, target)) != variant.stages:
        text += f" stages={stages}"
    if own := constants_on(variant, target):
        text += f" {own}"
    if target in DEPENDENT:
        text += f" {BEGIN}"
    if tiles := tiles_on(variant, target):
        text += f" {tiles}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _job(job: tuple[Variant, int]) -> tuple[str, str, Entry, list[str]]:
    variant, capability = job
    key, target = variant.key, f"sm_{capability}"
    cubin, entry = compiled(variant, capability)
    place = FOLDER / target / f"{entry['sha256']}.cubin"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(cubin)
    return key, target, entry | {"source": source_of(variant, target)}, faults(key, variant, target, entry)


def build(targets: Iterable[int], number: int, done: dict[str, Any]) -> list[str]:
    """Compile for targets, with so many processes, what `done` has not; add it there, and return faults.

    What is of no variant any more is removed, and files that the manifest does not name.
    """
    wanted = {variant.key: variant for variant in variants()}
    jobs = []
    for capability in targets:
        entries = done.setdefault(target := f"sm_{capability}", {})
        for key in set(entries) - set(wanted):
            del entries[key]
        for key, variant in wanted.items():
            entry = entries.get(key, {})
            file = FOLDER / target / f"{entry.get('sha256')}.cubin"
            if entry.get("source") != source_of(variant, target) or not file.exists():
                jobs.append((variant, capability))
    wrong = []
    with ProcessPoolExecutor(number) as pool:
        for key, target, entry, own in pool.map(_job, jobs):
            done[target][key] = entry
            write({"triton": triton.__version__, "targets": done})  # what is done stays so if this is ended
            wrong += own
    write({"triton": triton.__version__, "targets": done})
    for capability in targets:
        kept = {entry["sha256"] for entry in done[f"sm_{capability}"].values()}
        for file in (FOLDER / f"sm_{capability}").glob("*.cubin"):
            if file.stem not in kept:
                file.unlink()
    print(f"compiled {len(jobs)} kernels for {', '.join(f'sm_{target}' for target in targets)}")
    return wrong


def write(manifest: dict[str, Any]) -> None:
    FOLDER.mkdir(exist_ok=True)
    MANIFEST.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", "utf-8")


def check(targets: Iterable[int], number: int, done: dict[str, Any], part: tuple[int, int]) -> list[str]:
    """Return how the manifest differs from the sources. Every n-th variant, from i on, is compiled again."""
    listed, wrong = list(variants()), []
    for target in (f"sm_{capability}" for capability in targets):
        entries = done.get(target, {})
        for variant in listed:
            if entries.get(variant.key, {}).get("source") != source_of(variant, target):
                wrong.append(f"{target} {variant.key}: not compiled from these sources")
        wrong += [f"{target} {key}: no variant" for key in set(entries) - {variant.key for variant in listed}]
    jobs = [(variant, capability) for capability in targets for variant in listed[part[0] :: part[1]]]
    with ProcessPoolExecutor(number) as pool:
        for key, target, entry, own in pool.map(_job, jobs):
            wrong += own
            if done.get(target, {}).get(key) != entry:
                wrong.append(f"{target} {key}: compiled again it is {entry}")
    print(f"compiled {len(jobs)} kernels again")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]))
    parser.add_argument("--targets", type=int, nargs="*", default=TARGETS, metavar="N", help="as in sm_N")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--check", type=int, nargs=2, metavar=("I", "N"), help="compare every N-th from I on")
    args = parser.parse_args()
    done: dict[str, Any] = json.loads(MANIFEST.read_text("utf-8"))["targets"] if MANIFEST.exists() else {}
    if args.check:
        wrong = check(args.targets, args.jobs, done, tuple(args.check))
    else:
        wrong = build(args.targets, args.jobs, done)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
