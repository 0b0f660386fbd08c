"""What is counted before loading is there after it; what does not fit is refused with a way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import CONFIGS

from quire.backends.kv_cache import KV_DTYPES
from quire.build import describe
from quire.config import KV_CACHE_DTYPES, EngineConfig
from quire.errors import ConfigError
from quire.memory import available_memory, gigabytes, misfit, plan_memory
from quire.models import read_model
from quire.program.passes import fuse
from quire.quantize.round_to_nearest import kind_of

PROGRAM = fuse(read_model(CONFIGS["llama"]).program)
TOKEN_BYTES = PROGRAM.kv_token_bytes(4)


def nbytes(spec: object) -> int:
    return kind_of(spec, "bf16", None).nbytes(spec.shape)  # type: ignore[attr-defined, arg-type]


def plan(available: int, longest: int = 256, **options: object):  # type: ignore[no-untyped-def]
    config = EngineConfig(**options)  # type: ignore[arg-type]
    return plan_memory(PROGRAM, nbytes, config, longest, available), config


def test_the_cache_takes_what_is_useful_and_no_more() -> None:
    got, config = plan(10**9, max_num_seqs=3)
    assert got.num_blocks * config.block_size == 3 * 256
    assert got.kv_bytes == 3 * 256 * TOKEN_BYTES
    assert misfit(got, config) is None


def test_the_cache_takes_half_of_what_is_left() -> None:
    whole, _ = plan(10**9)
    rest = whole.working_bytes + whole.activation_bytes
    got, config = plan(rest + 2 * 100 * TOKEN_BYTES)
    assert got.num_blocks == 100 // config.block_size
    assert got.max_model_len == got.num_blocks * config.block_size  # shortened, as nothing was asked for
    assert misfit(got, config) is None


def test_what_was_asked_for_is_kept_or_refused() -> None:
    got, config = plan(10**9, kv_cache_memory_bytes=100 * TOKEN_BYTES, max_model_len=200)
    assert got.max_model_len == 200
    assert "96 tokens, less than one sequence of 200" in str(misfit(got, config))
    got, config = plan(10**4)
    assert "are available" in str(misfit(got, config))
    got, config = plan(10**4, device="null")  # computes nothing, so anything fits
    assert misfit(got, config) is None


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_counted_before_loading_is_there_after(quantization: str | None) -> None:
    from quire.weights.load import load

    facts = describe(EngineConfig(quantization=quantization))
    weights = load(facts.program.weights(), facts.folder.checkpoint(), facts.program.ignored, quantization)
    assert sum(weight.nbytes for weight in weights.values()) == facts.memory.weight_bytes
    assert sum(weight.dense().nbytes for weight in weights.values()) == facts.memory.working_bytes


def test_a_config_alone_can_be_described(tmp_path: Path) -> None:
    config = {**CONFIGS["qwen3"], "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = describe(EngineConfig(model=str(tmp_path)), weights=False)
    assert {str(storage) for storage in facts.storage.values()} == {"f16"}
    with pytest.raises(ConfigError, match="safetensors"):
        describe(EngineConfig(model=str(tmp_path)))


def test_available_memory_is_within_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert available_memory(tmp_path, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_memory(tmp_path, tmp_path) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path, tmp_path) == 5000 * 1024
    assert available_memory(tmp_path / "none", tmp_path / "none") == 8 << 30
    assert available_memory() > 0


def test_every_cache_format_of_the_configuration_has_its_numbers() -> None:
    assert set(KV_DTYPES) == set(KV_CACHE_DTYPES)
    sizes = {name: plan(10**9, kv_cache_dtype=name)[0].kv_block_bytes for name in KV_CACHE_DTYPES}
    assert sizes["auto"] == sizes["float32"] == 2 * sizes["float16"] == 2 * sizes["bfloat16"]


def test_readable_numbers() -> None:
    assert [gigabytes(n) for n in (12, 2050, 5.5e6, 16.4e9)] == ["12 B", "2.05 kB", "5.5 MB", "16.4 GB"]
