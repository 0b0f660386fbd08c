"""What is counted before loading is there after it; what does not fit is refused with a way out."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tiny import CONFIGS

from quire import __version__, memory
from quire.backends.device import Device, device_for, kv_dtype, plan_weights
from quire.backends.host import available_memory
from quire.backends.reference import ReferenceBackend
from quire.cli import plan_report
from quire.config import KV_CACHE_DTYPES, EngineConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.linux import granted_processors
from quire.memory import (
    REQUEST_TOKENS,
    MemoryPlan,
    gigabytes,
    plan_memory,
    summary,
)
from quire.models import read_model
from quire.program import WeightSpec
from quire.program.passes import fuse
from quire.quantize.round_to_nearest import quantize
from quire.weights.left_out import in_words
from quire.weights.plan import all_in

PROGRAM = fuse(read_model(CONFIGS["llama"]).program)
TOKEN_BYTES = PROGRAM.kv_token_bytes(4)


def device(**options: object) -> Device:
    return device_for(EngineConfig(**{"device": "reference", **options}))  # type: ignore[arg-type]


def plan(available: int, longest: int = 256, **options: object) -> tuple[MemoryPlan, EngineConfig]:
    config = EngineConfig(**{"device": "reference", **options})  # type: ignore[arg-type]
    chosen = device_for(config)
    weights = plan_weights(chosen, PROGRAM, None, config.quantization, all_in("bf16"))
    return plan_memory(chosen, PROGRAM, weights, config, longest, available), config


def misfit(got: MemoryPlan, config: EngineConfig) -> ConfigError | None:
    return memory.misfit(got, config, device_for(config))


def test_the_cache_takes_what_is_useful_and_no_more() -> None:
    got, config = plan(10**9, max_num_seqs=3)
    assert got.num_tokens == 3 * 256
    assert got.kv_bytes == 3 * 256 * TOKEN_BYTES
    assert misfit(got, config) is None


def test_the_cache_takes_half_of_what_is_left() -> None:
    whole, _ = plan(10**9)
    rest = whole.working_bytes + whole.activation_bytes
    got, config = plan(rest + 2 * 100 * TOKEN_BYTES)
    assert got.blocks[0] == 100 // config.block_size
    assert got.max_model_len == got.num_tokens  # shortened, as nothing was asked for
    assert misfit(got, config) is None


LONG = 131_072


def test_a_long_context_reserves_room_for_requests_of_a_usual_length() -> None:
    got, config = plan(10**12, LONG, max_num_seqs=64)
    assert got.num_tokens == 64 * REQUEST_TOKENS
    assert (got.max_model_len, got.kv_reason) == (LONG, "64 requests of 8,192")
    assert misfit(got, config) is None


def test_a_long_context_reserves_room_for_one_request_of_its_length() -> None:
    got, config = plan(10**12, LONG, max_num_seqs=4)
    assert got.num_tokens == LONG
    assert got.kv_reason == "one request of 131,072"
    for options in ({}, {"max_model_len": LONG}):
        fixed = got.working_bytes + got.activation_bytes
        tight, config = plan(fixed + int(LONG * TOKEN_BYTES * 1.12), LONG, **options)
        assert (tight.blocks[0], tight.max_model_len) == (
            got.blocks[0],
            LONG,
        )  # more than half of what is left
        assert misfit(tight, config) is None


def test_a_context_that_no_memory_holds_is_shortened_or_refused() -> None:
    got, _ = plan(10**12, LONG)
    left = int(LONG * TOKEN_BYTES * 1.1)
    small, config = plan(got.working_bytes + got.activation_bytes + left, LONG)
    assert small.kv_reason == "half of the memory left"
    assert small.max_model_len == small.blocks[0] * config.block_size < LONG
    assert misfit(small, config) is None
    error = misfit(*plan(got.working_bytes + got.activation_bytes + left, LONG, max_model_len=LONG))
    assert error is not None
    assert error.message.endswith("less than one sequence of 131,072")


def test_a_size_that_was_asked_for_is_taken_whatever_the_context() -> None:
    asked = 1_000_000 * TOKEN_BYTES
    got, config = plan(10**12, LONG, kv_cache_memory_bytes=asked)
    assert got.blocks[0] == 1_000_000 // config.block_size
    assert got.kv_reason == "as asked for"
    assert plan(10**12, kv_cache_memory_bytes=asked)[0].blocks[0] == 64 * 16  # no more than can be used


def test_what_was_asked_for_is_kept_or_refused() -> None:
    got, config = plan(10**9, kv_cache_memory_bytes=100 * TOKEN_BYTES, max_model_len=200)
    assert got.max_model_len == 200
    error = misfit(got, config)
    assert error is not None
    assert error.message == "the KV cache has room for 96 tokens, less than one sequence of 200"
    least = 13 * config.block_size * TOKEN_BYTES
    assert error.hint == f"give kv_cache_memory_bytes = {least} or more, or lower max_model_len"
    assert misfit(*plan(10**9, kv_cache_memory_bytes=least, max_model_len=200)) is None
    assert misfit(*plan(10**9, kv_cache_memory_bytes=least - 1, max_model_len=200)) is not None


def test_a_cache_without_one_block_says_how_large_it_must_be() -> None:
    got, config = plan(10**9, kv_cache_memory_bytes=1)
    error = misfit(got, config)
    assert error is not None
    assert error.message == "the KV cache has room for 0 tokens, less than one block"
    assert error.hint == f"give kv_cache_memory_bytes = {got.kv_block_bytes} or more"
    assert misfit(*plan(10**9, kv_cache_memory_bytes=got.kv_block_bytes)) is None


def test_what_does_not_fit_says_how_much_is_missing_and_what_helps() -> None:
    whole, _ = plan(10**9)
    weights, fixed = whole.working_bytes, whole.working_bytes + whole.activation_bytes
    cases = [
        (weights - 1, {}, "the weights alone", "smaller model: the reference backend keeps float32"),
        (weights + 1, {}, "short", "max_num_batched_tokens"),
        (fixed + 10**5, {"kv_cache_memory_bytes": 10**6}, "short", "kv_cache_memory_bytes = 100000 or less"),
        (fixed + 10**4, {"max_model_len": 256}, "short", "max_model_len"),
    ]
    for available, options, what, hint in cases:
        error = misfit(*plan(available, **options))
        assert error is not None
        assert f"{gigabytes(available)} of memory are available" in error.message
        assert what in error.message
        assert hint in (error.hint or "")
    got, config = plan(10**4, device="null")  # computes nothing, so anything fits
    assert misfit(got, config) is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Qwen--Qwen3-235B-A22B", "give quantization = 'int8' or 'int4', or take a smaller model"),
        ("Qwen--Qwen3-235B-A22B-FP8", "give quantization = 'int4', or take a smaller model"),
        ("nvidia--DeepSeek-V3.1-NVFP4", "take a smaller model"),
    ],
)
def test_rounding_is_suggested_only_where_it_saves_memory(name: str, hint: str, shared_data: Path) -> None:
    config = EngineConfig(model=str(shared_data / "configs" / name), device="native")
    found = describe(config, weights=False, available_bytes=10**10)
    error = memory.misfit(found.memory, config, found.device)
    assert error is not None
    assert error.hint == hint


def test_activations_count_the_logits_of_a_whole_chunk_of_a_prompt() -> None:
    """Its logprobs may be asked for, whatever the number of sequences."""
    few, _ = plan(10**9, max_num_seqs=1, max_num_batched_tokens=200)
    assert few.activation_bytes >= 200 * CONFIGS["llama"]["vocab_size"] * 4
    assert few.activation_bytes == plan(10**9, max_num_batched_tokens=200)[0].activation_bytes


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_counted_before_loading_is_there_after(quantization: str | None) -> None:
    from quire.weights.load import load

    facts = describe(EngineConfig(quantization=quantization, device="reference"))
    weights = load(facts.weights)
    assert sum(weight.nbytes for weight in weights.values()) == facts.memory.weight_bytes
    backend = ReferenceBackend(
        facts.program, weights, num_blocks=[1] * len(facts.program.cache_groups), block_size=16
    )
    kept = (*backend._weights.values(), *backend._quantized.values())
    assert sum(weight.nbytes for weight in kept) == facts.memory.working_bytes


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_room_for_a_quantized_matrix_unpacked(quantization: str) -> None:
    """The reference multiplies the largest one with a row: what NumPy takes meanwhile was counted."""
    rng = np.random.default_rng(0)
    spec = WeightSpec("m", (3000, 512), ("m",), quantizable=True)
    matrix = quantize(spec, rng.standard_normal(spec.shape, np.float32), quantization)
    row = rng.standard_normal((1, 512), np.float32)
    tracemalloc.start()
    matrix.product(row)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.9 * peak < matrix.storage.product_bytes(spec.shape) <= peak


def test_a_config_alone_can_be_described(tmp_path: Path) -> None:
    config = {**CONFIGS["qwen3"], "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = describe(EngineConfig(model=str(tmp_path)), weights=False)
    assert {str(storage) for storage in facts.weights.storage.values()} == {"f16"}
    with pytest.raises(ConfigError, match="safetensors"):
        describe(EngineConfig(model=str(tmp_path)))


def test_the_native_backend_holds_packed_weights() -> None:
    from quire.backends.native import _core
    from quire.backends.native.weights import load_packed

    kept = {}
    for quantization in (None, "int8", "int4"):
        facts = describe(EngineConfig(quantization=quantization))
        packed = load_packed(facts.weights, isa=_core.isas()[-1], nodes=_core.Nodes(1))
        held = [m.nbytes for m in packed.matrices.values()] + [v.nbytes for v in packed.vectors.values()]
        kept[quantization] = facts.memory.working_bytes
        assert 0 <= facts.memory.working_bytes - sum(held) < 64 * len(held)
    assert kept["int4"] < kept["int8"] < kept[None]


def test_the_native_backend_counts_more_than_values() -> None:
    """Rows laid out for products, and while loading one weight of the checkpoint."""
    reference, _ = plan(10**9)
    native, config = plan(10**9, device="native")
    assert plan(10**9, device="auto")[0] == native
    assert native.activation_bytes > reference.activation_bytes
    assert native.working_bytes < reference.working_bytes
    assert reference.loading_bytes == 0
    largest = max(spec.size for spec in PROGRAM.weights().values())
    assert native.loading_bytes == 2 * largest  # bf16
    through_file = plan(10**9, device="native", quantization="int8")[0].loading_bytes
    assert (
        through_file > plan(10**9, device="native", quantization="int8", packed_cache=False)[0].loading_bytes
    )
    assert native.total_bytes == native.working_bytes + native.activation_bytes + native.kv_bytes
    assert native.needed_bytes(-native.activation_bytes) == native.working_bytes + native.loading_bytes
    assert misfit(native, config) is None


def test_kept_blocks_count_beside_a_cache_whose_size_is_given() -> None:
    """Otherwise the process would be killed, once as many blocks are kept as may be."""
    sizes = {"kv_cache_memory_bytes": 1 << 20, "device": "native"}
    alone, _ = plan(10**8, **sizes)
    kept, config = plan(10**8, prefix_cache_memory_bytes=10**8, **sizes)
    assert kept.total_bytes == alone.total_bytes + 10**8
    assert "kept blocks and adapters 100 MB" in summary(kept)
    error = misfit(kept, config)
    assert error is not None
    assert "lower max_num_batched_tokens, prefix_cache_memory_bytes or max_model_len" in (error.hint or "")


def test_what_does_not_fit_natively_names_the_quantization() -> None:
    for quantization, hint in ((None, "'int8' or 'int4', or"), ("int8", "= 'int4', or"), ("int4", "take a")):
        error = misfit(*plan(10**3, device="native", quantization=quantization))
        assert error is not None
        assert "the weights alone" in error.message
        assert hint in (error.hint or "")


def test_the_plan_in_one_line() -> None:
    got, _ = plan(10**9, max_num_seqs=4, device="native")
    line = summary(got)
    assert line.startswith(f"memory: weights {gigabytes(got.working_bytes)}, KV cache ")
    assert "(1,024 tokens: 4 requests of 256), activations " in line
    assert line.endswith(", of 1 GB available")


def test_available_memory_is_within_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert available_memory(tmp_path, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_memory(tmp_path, tmp_path) == 2000
    stat = "anon 700\nfile 300\nactive_file 100\ninactive_file 200\n"
    (tmp_path / "memory.stat").write_text(stat)  # pages of files that were read, such as weights
    assert available_memory(tmp_path, tmp_path) == 2200
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path, tmp_path) == 5000 * 1024
    assert available_memory(tmp_path / "none", tmp_path / "none") == 8 << 30
    assert available_memory() > 0


@pytest.mark.parametrize(
    ("line", "root", "names", "cached"),
    [
        ("0::/user/job", "", ("memory.max", "memory.current"), "inactive_file"),
        (
            "4:cpu,memory:/user/job",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_inactive_file",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_every_control_group_around_the_process_counts(
    tmp_path: Path, line: str, root: str, names: tuple[str, str], cached: str
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemAvailable:    5000 kB\n")
    (proc / "self" / "cgroup").write_text(f"1:name=systemd:/elsewhere\n{line}\n")
    inner = groups / root / "user" / "job"
    inner.mkdir(parents=True)
    for folder, limit, used in ((inner, 9000, 1000), (inner.parent, 7000, 1500)):
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
    assert available_memory(proc, groups) == 5500
    (inner.parent / "memory.stat").write_text(f"cache 700\n{cached} 300\n")
    assert available_memory(proc, groups) == 5800
    (inner / names[0]).write_text("2000\n")
    assert available_memory(proc, groups) == 1000
    for folder in (inner, inner.parent):
        (folder / names[0]).write_text(f"{(1 << 63) - 4096}\n")  # how version 1 says "no limit"
    assert available_memory(proc, groups) == 5000 * 1024


def test_every_cache_format_of_the_configuration_has_its_numbers() -> None:
    assert {"auto", *device(device="native").kv_dtypes} == set(KV_CACHE_DTYPES)
    assert {*device().kv_dtypes, "int8"} == set(device(device="native").kv_dtypes)
    native = {n: plan(10**9, kv_cache_dtype=n, device="native")[0].kv_block_bytes for n in KV_CACHE_DTYPES}
    assert native["float32"] == 2 * native["float16"] == 2 * native["bfloat16"]
    assert native["auto"] == native["bfloat16"]  # as the weights are stored
    heads = sum(layer.num_heads for layer in PROGRAM.caches)
    assert native["int8"] == native["float32"] // 4 + 16 * 2 * 4 * heads  # a scale for each token and head
    assert plan(10**9)[0].kv_block_bytes == native["float32"]  # the reference is there to be exact


def test_the_format_of_the_cache_follows_the_checkpoint() -> None:
    native, reference = device(device="native"), device()
    for stored, expected in (("bf16", "bfloat16"), ("f16", "float16"), ("f32", "float32")):
        for quantization in (None, "int8"):
            weights = plan_weights(native, PROGRAM, None, quantization, all_in(stored))
            assert weights.floats == stored
        assert kv_dtype(native, "auto", stored) == expected
        assert kv_dtype(reference, "auto", stored) == "float32"
        assert kv_dtype(native, "int8", stored) == "int8"
    with pytest.raises(ConfigError, match="reference") as raised:
        kv_dtype(reference, "int8", "bf16")
    assert raised.value.hint == "choose 'float32', 'float16' or 'bfloat16', or leave device out"


def test_the_fingerprint_names_what_decides_the_bits() -> None:
    found = {
        describe(EngineConfig(**options)).fingerprint  # type: ignore[arg-type]
        for options in (
            {},
            {"device": "reference"},
            {"quantization": "int8"},
            {"kv_cache_dtype": "int8"},
            {"num_threads": 1},
            {"max_num_seqs": 3},
        )
    }
    isa = device(device="native").facts()["isa"]
    assert found == {
        f"quire-{__version__}-{rest}"
        for rest in (
            f"{isa}-stored-bfloat16",
            "reference-stored-float32",
            f"{isa}-int8-bfloat16",
            f"{isa}-stored-int8",
        )
    }


def test_readable_numbers() -> None:
    assert [gigabytes(n) for n in (12, 2050, 5.5e6, 16.4e9)] == ["12 B", "2.05 kB", "5.5 MB", "16.4 GB"]
    assert [gigabytes(n) for n in (999_600, 999.7e6, 999.4e9, 1.06e12)] == [
        "1 MB",
        "1 GB",
        "999 GB",
        "1.06 TB",
    ]
    assert [in_words(n) for n in (999_700_000, 1_026_000_000_000)] == ["1 billion", "1.03 trillion"]
    times = [plan_report._time(seconds) for seconds in (0.9994e-3, 0.9997e-3, 0.99961, 999.4, 999.6)]
    assert times == ["999 us", "1 ms", "1 s", "999 s", "1,000 s"]


@pytest.mark.parametrize(("name", "each"), [("native", 3), ("reference", 1)])
def test_shared_weights_count_once(name: str, each: int) -> None:
    config = EngineConfig(device=name)
    sharing = device_for(config, share_weights=True)
    weights = plan_weights(sharing, PROGRAM, None, None, all_in("bf16"))
    got = plan_memory(sharing, PROGRAM, weights, config, 256, 10**9, num_sharing=3)
    assert got.working_bytes == -(-weights.layout.nbytes // each)


def test_the_smallest_quota_of_processors_around_the_process_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert granted_processors(proc, groups) == math.inf
    (proc / "self" / "cgroup").write_text("4:cpuacct,cpu:/user/job\n0::/user/job\n")
    newer, older = groups / "user" / "job", groups / "cpu" / "user"
    newer.mkdir(parents=True)
    older.mkdir(parents=True)
    (newer / "cpu.max").write_text("max 100000\n")
    assert granted_processors(proc, groups) == math.inf
    (newer.parent / "cpu.max").write_text("450000 100000\n")
    assert granted_processors(proc, groups) == 4.5
    (newer / "cpu.max").write_text("150000 100000\n")
    assert granted_processors(proc, groups) == 1.5
    (older / "cpu.cfs_quota_us").write_text("50000\n")
    (older / "cpu.cfs_period_us").write_text("100000\n")
    assert granted_processors(proc, groups) == 0.5
    (older / "cpu.cfs_quota_us").write_text("-1\n")
    assert granted_processors(proc, groups) == 1.5
