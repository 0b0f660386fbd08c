"""Sizes of cache groups: what windows and states take, and that no group is full before the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tiny import CONFIGS, random_weights

from quire import LLM, SamplingParams, build, memory
from quire.backends.device import device_for, plan_weights
from quire.backends.native import _core
from quire.backends.native.caches import allocate
from quire.cache_plan import SNAPSHOT_TOKENS, BlockBytes, CacheGroup, Sizing, by_spec
from quire.cli.quality_report import logits_of
from quire.config import EngineConfig
from quire.memory import MemoryPlan, misfit, plan_memory, summary
from quire.models import read_model
from quire.program import Program, Value
from quire.program.caches import CacheSpec, PagedKV, PagedLatent, SlotState
from quire.weights.plan import all_in

BLOCK, STEP, GB = 16, 512, 10**9
# As published; the sizes that do not change what is cached are small, so that recording is quick.
GEMMA3_27B = {
    **CONFIGS["gemma3"],
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
}
GPT_OSS_20B = {
    **CONFIGS["gpt_oss"],
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
}


def sizing(raw: dict[str, Any], grouped: Any = by_spec) -> Sizing:
    program = read_model(raw).program
    return Sizing(grouped(program, lambda spec: spec.token_bytes(2) * BLOCK), BLOCK, STEP)


def requests_that_fit(sizes: Sizing, budget: int, num_tokens: int) -> int:
    number = 0
    while sizes.nbytes(sizes.blocks(number + 1, num_tokens)) <= budget:
        number += 1
    return number


@pytest.mark.parametrize(
    ("raw", "before", "after", "fit_before", "fit_after"),
    [(GEMMA3_27B, 16.6, 3.52, 1, 6), (GPT_OSS_20B, 1.61, 0.83, 12, 24)],
    ids=["gemma3 27b", "gpt-oss 20b"],
)
def test_layers_with_a_window_hold_no_more_than_it(
    raw: dict[str, Any], before: float, after: float, fit_before: int, fit_after: int
) -> None:
    """Gigabytes of one request of 32k tokens, and how many fit into 20 GB: as docs/performance.md says."""
    whole, windowed = sizing(raw, without_windows), sizing(raw)
    found = [sizes.nbytes(sizes.blocks(1, 32768)) / GB for sizes in (whole, windowed)]
    assert found == pytest.approx([before, after], rel=0.01)
    assert [requests_that_fit(s, 20 * GB, 32768) for s in (whole, windowed)] == [fit_before, fit_after]


def test_a_window_holds_what_is_in_sight_and_what_a_step_brings() -> None:
    sizes = Sizing((CacheGroup(100), CacheGroup(100, window=1024)), BLOCK, STEP)
    full, local = sizes.blocks(1, 32768)
    held = -(-(1024 + STEP) // BLOCK) + 1  # of one request, as the scheduler counts
    assert full == 2048
    assert held <= local <= 1.3 * held
    assert sizes.blocks(1, 100) == (7, 7)  # a request within the window holds all it has
    assert sizes.blocks(10, 32768)[1] < 10 * local  # the tokens of a step are shared


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.sampled_from([None, 16, 100, 1024])), min_size=1, max_size=4),
    st.integers(0, 10**8),
    st.integers(1, 40),
    st.integers(1, 3000),
    st.integers(1, 9000),
)
@settings(max_examples=200)
def test_no_group_starves_another(
    groups: list[tuple[int, int | None]], budget: int, number: int, each: int, longest: int
) -> None:
    """Whatever fits: within the budget, the same requests in every group, and the longest if it can."""
    each = min(each, longest)
    sizes = Sizing(tuple(CacheGroup(size, window) for size, window in groups), BLOCK, STEP)
    blocks = sizes.fit(budget, number, each, longest)
    assert sizes.nbytes(blocks) <= budget
    one = sizes.blocks(1, longest)
    if sizes.nbytes(one) > budget:
        length = sizes.longest(blocks, longest)
        assert blocks == sizes.blocks(1, length)
        assert sizes.nbytes(sizes.blocks(1, length + BLOCK)) > budget
        return
    assert sizes.longest(blocks, longest) == longest
    most = max(n for n in range(number + 1) if _holds(blocks, sizes.blocks(n, each)))
    more = tuple(map(max, sizes.blocks(most + 1, each), one))
    assert most == number or sizes.nbytes(more) > budget
    if all(window is None for _, window in groups):
        assert most == number or budget - sizes.nbytes(blocks) < sum(size for size, _ in groups)


def _holds(blocks: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return all(n <= have for n, have in zip(wanted, blocks, strict=True))


def test_the_memory_plan_goes_by_group() -> None:
    config = EngineConfig(device="reference", max_num_seqs=2)
    device, program = device_for(config), read_model(CONFIGS["gemma3"]).program
    weights = plan_weights(device, program, None, None, all_in("bf16"))
    plan = plan_memory(device, program, weights, config, 256, GB)
    local, whole = plan.sizing.groups
    assert (local.window, whole.window) == (24, None)
    assert plan.blocks == (2 * 16, 2 * 16)  # too short for the window to make it less
    long = plan_memory(device, program, weights, config, 4096, GB)
    assert long.blocks[1] == 2 * 256
    assert long.blocks[0] < 2 * 64
    assert long.num_tokens == 2 * 4096
    assert long.kv_bytes == long.blocks[0] * local.block_bytes + long.blocks[1] * whole.block_bytes
    assert "(8,192 tokens: 2 requests of 4,096)" in summary(long)
    least = long.sizing.nbytes(long.sizing.blocks(1, 4096))
    for size, fits in ((least, True), (least - 1, False)):
        asked = EngineConfig(device="reference", max_model_len=4096, kv_cache_memory_bytes=size)
        error = misfit(plan_memory(device, program, weights, asked, 4096, GB), asked, device)
        assert (error is None) is fits
        if error is not None:
            assert f"kv_cache_memory_bytes = {least} or more" in (error.hint or "")


def written(folder: Path, name: str) -> str:
    """A checkpoint of a tiny model with random weights."""
    program = read_model(CONFIGS[name]).program
    save_file({n: w.array for n, w in random_weights(program).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return str(folder)


def without_windows(program: Program, block_bytes: BlockBytes) -> tuple[CacheGroup, ...]:
    return tuple(replace(group, window=None) for group in by_spec(program, block_bytes))


@pytest.mark.parametrize("device", ["reference", "native"])
def test_tokens_are_the_same_with_blocks_that_slide_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    model = written(tmp_path, "gemma3")
    options: dict[str, Any] = {"device": device, "max_num_batched_tokens": 16, "block_size": 8}
    params = SamplingParams(temperature=0, max_tokens=60, logprobs=2, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(7 * i + k) % 32 for i in range(90 + 10 * k)]} for k in range(3)]
    found, blocks = [], []
    for grouping in (by_spec, without_windows):
        monkeypatch.setattr(memory, "by_spec", grouping)
        llm = LLM(model, max_num_seqs=3, **options)
        blocks.append(build.describe(llm.config).memory.blocks)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([output.outputs[0].logprobs for output in outputs])
        llm.close()
    assert found[0] == found[1]
    (local, whole), (all_local, all_whole) = blocks
    assert local < whole == all_local == all_whole


def test_rounding_is_measured_of_models_with_windows(tmp_path: Path) -> None:
    """Blocks of a window are fewer than those of the text."""
    config = EngineConfig(model=written(tmp_path, "gemma3"), device="reference", max_num_batched_tokens=16)
    ids, logits = list(range(32)) * 5, []
    for options in ({"max_num_seqs": 1}, {"max_num_seqs": 1, "max_num_batched_tokens": 256}):
        logits.append(logits_of(build.build(replace(config, **options)), ids))
    np.testing.assert_array_equal(*logits)


STATE = SlotState((64, 32), inputs=8, reach=63)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("spec", [PagedKV(2, 8, 4), PagedLatent(512, 64)])
def test_native_blocks_have_the_bytes_that_are_planned(spec: CacheSpec, kv_dtype: str) -> None:
    layers = Program((), Value(0, "T", (1,)), (spec, spec))
    sizes = {"num_blocks": [3], "block_size": BLOCK, "num_slots": 1, "num_snapshots": 0}
    memory = allocate(layers, kv_dtype=kv_dtype, nodes=_core.Nodes(1), **sizes).memory
    assert memory.num_bytes == [2 * device_for(EngineConfig()).block_bytes(spec, kv_dtype, BLOCK)]


def test_native_layers_that_keep_a_state_have_no_blocks() -> None:
    assert device_for(EngineConfig()).block_bytes(STATE, "float32", BLOCK) == 0


def with_states(available: int, **options: Any) -> MemoryPlan:
    """A plan of a program whose layers but the last one keep a state."""
    config = EngineConfig(device="reference", max_num_seqs=4, **options)
    device, small = device_for(config), read_model(CONFIGS["llama"]).program
    program = Program(small.ops, small.output, (STATE, STATE, PagedKV(2, 4, 4)))
    weights = plan_weights(device, program, None, None, all_in("bf16"))
    return plan_memory(device, program, weights, config, 4096, available)


def test_states_and_snapshots_are_counted() -> None:
    plan = with_states(GB)
    states, paged = plan.sizing.groups
    assert (states.block_bytes, states.slot_bytes) == (0, 2 * STATE.slot_bytes)
    assert paged.slot_bytes == paged.snapshot_bytes == 0
    assert plan.blocks == (0, 4 * 256)
    assert plan.num_snapshots == 4 * (4096 // SNAPSHOT_TOKENS + 1)  # no more than can be used
    assert plan.state_bytes == 8 * STATE.slot_bytes + plan.num_snapshots * 2 * STATE.snapshot_bytes
    assert plan.total_bytes == plan.working_bytes + plan.activation_bytes + plan.state_bytes + plan.kv_bytes
    assert f"(4 slots, {plan.num_snapshots} snapshots)" in summary(plan)
    fixed = plan.working_bytes + plan.activation_bytes + 8 * STATE.slot_bytes
    tight = with_states(fixed + 20 * 2 * STATE.snapshot_bytes * 5)  # 5% of what is left hold five of them
    assert tight.num_snapshots == 5
