"""The committed manifest of compiled kernels against their sources, budgets and a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quire.backends.cuda.kernels.variants import ALIGNED, constants_on, most_stack_bytes, variants
from quire.backends.cuda.manifest import FOLDER

ROOT = Path(__file__).parents[2]
SHARED = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}  # KiB that a block may have
COMPILED_AGAIN = 40  # one in so many


@pytest.fixture(scope="module")
def targets() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / "manifest.json").read_text("utf-8"))["targets"]
    return found


def test_every_variant_has_a_key_of_its_own() -> None:
    keys = [variant.key for variant in variants()]
    assert len(set(keys)) == len(keys)


def test_kernels_are_within_budgets(targets: dict[str, dict[str, Any]]) -> None:
    for target, variant in product(targets, variants()):
        entry = targets[target][variant.key]
        assert entry["stack_bytes"] <= most_stack_bytes(variant, target), (target, variant)
        assert entry["registers"] <= 255
        assert entry["shared_bytes"] <= SHARED[target] << 10, (target, variant)


def test_large_products_use_tensor_cores_of_warp_groups(targets: dict[str, dict[str, Any]]) -> None:
    wanted = {"float": "HGMMA", "integer": "IGMMA"}
    for variant in variants():
        if variant.tensor_cores:
            entry = targets["sm_90"][variant.key]
            assert entry["instructions"][wanted[variant.tensor_cores]] > 0


def test_large_products_of_bfloat16_take_tiles_of_matrices(targets: dict[str, dict[str, Any]]) -> None:
    """As tensor descriptors, where a unit of the target copies tiles by itself."""
    for target, entries in targets.items():
        tiled = {key.partition("(")[0] for key, entry in entries.items() if "tiles" in entry}
        assert tiled == (set() if target in {"sm_80", "sm_89"} else {"product", "gated_product"})
        assert all(entry["instructions"]["UTMALDG"] > 0 for entry in entries.values() if "tiles" in entry)


def test_kernels_that_can_begin_early_wait(targets: dict[str, dict[str, Any]]) -> None:
    for target, variant in product(targets, variants()):
        assert targets[target][variant.key]["waits"] == (target in {"sm_90", "sm_100", "sm_120"})


def test_products_of_few_rows_ask_for_weights_before_they_wait(targets: dict[str, dict[str, Any]]) -> None:
    """Where they may begin early. Others have no row of weights that is theirs whatever came before."""
    few = {variant.key for variant in variants() if "AHEAD" in constants_on(variant, "sm_90")}
    assert {key.partition("(")[0] for key in few} == {
        f"{joined}{how}product" for joined in ("", "joined_") for how in ("", "quantized_")
    } | {"gated_product", "quantized_gated_product"}
    for target, entries in targets.items():
        asking = {key for key, entry in entries.items() if "UBLKPF" in entry["instructions"]}
        assert asking == (few if target in {"sm_90", "sm_100", "sm_120"} else set())


def test_what_accesses_memory_before_it_asks_for_weights_is_refused() -> None:
    code = """
import cubins
asks = "// begin inline asm\\n@p cp.async.bulk.prefetch.L2.global [a], b;\\n\\t// end inline asm\\n"
rest = "\\tld.global.b32 %r1, [%rd1];\\n\\tret;\\n}"
entry, first = ".visible .entry f(){\\n\\t.reg .b32 %r<2>;\\n", "\\tld.param.b32 %r0, [f_param_0];\\n"
assert cubins.waiting(entry + first + rest) == entry + cubins.BEGIN + first + rest
assert cubins.waiting(entry + first + 2 * asks + rest) == entry + first + 2 * asks + cubins.BEGIN + rest
for early in ("ld.global.b32 %r1, [%rd1]", "st.shared.b32 [%r0], %r1", "@%p1 bra $L1", "cp.async.cg [%r0]"):
    try:
        cubins.waiting(entry + first + f"\\t{early};\\n" + asks + rest)
    except SystemExit as error:
        assert "before it asks for weights" in str(error), error
    else:
        raise AssertionError(early)
"""
    run = without_interpreter("-c", code, cwd=ROOT / "scripts")
    assert run.returncode == 0, run.stderr


def test_a_kernel_that_does_not_wait_is_a_fault() -> None:
    code = """
import cubins
variant = next(variant for variant in cubins.variants() if variant.kernel == "scale")
def faults():
    _, entry = cubins.compiled(variant, 90)
    return cubins.faults(variant.key, variant, "sm_90", entry)
assert faults() == []
right, cubins.BEGIN = cubins.BEGIN, "another key of the cache"
cubins.waiting = lambda ptx: ptx
assert "waits" in faults()[0], faults()
cubins.BEGIN = "one more"
cubins.waiting = lambda ptx: ptx.replace("\\tret;", right + "\\tret;")
assert "waits" in faults()[0], faults()
"""
    run = without_interpreter("-c", code, cwd=ROOT / "scripts")
    assert run.returncode == 0, run.stderr


def test_the_manifest_is_that_of_the_sources(targets: dict[str, dict[str, Any]]) -> None:
    """Every kernel was compiled from these sources; some are compiled again, other ones every day."""
    part = [str(date.today().toordinal() % COMPILED_AGAIN), str(COMPILED_AGAIN)]
    run = check("--targets", "90", "--check", *part)
    assert run.returncode == 0, run.stderr
    others = [target.removeprefix("sm_") for target in targets if target != "sm_90"]
    if others:
        run = check("--targets", *others, "--check", "9999", "10000")
        assert run.returncode == 0, run.stderr


def test_stages_of_one_target_change_its_digests_alone() -> None:
    code = """
import cubins
variant = next(variant for variant in cubins.variants() if variant.kernel == "product")
before = [cubins.source_of(variant, target) for target in ("sm_89", "sm_80")]
cubins.stages_on = lambda variant, target: variant.stages - (target == "sm_89")
after = [cubins.source_of(variant, target) for target in ("sm_89", "sm_80")]
assert before[0] == before[1] == after[1] != after[0], (before, after)
"""
    run = without_interpreter("-c", code, cwd=ROOT / "scripts")
    assert run.returncode == 0, run.stderr


def check(*args: str) -> subprocess.CompletedProcess[str]:
    return without_interpreter(str(ROOT / "scripts" / "cubins.py"), "--jobs", "2", *args)


def without_interpreter(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run Python without Triton's interpreter, which this process has turned on."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, cwd=cwd)


def test_sizes_that_kernels_take_as_multiples_of_16_are_integers() -> None:
    for variant in variants():
        assert all(variant.types[name] == "i32" for name in ALIGNED & set(variant.types))
