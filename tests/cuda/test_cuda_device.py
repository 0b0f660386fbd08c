"""The device of GPUs: what it refuses and how it says so, what it launches, and its compiled kernels."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_accelerator import interpreted, wide, wide_config
from test_whole_models import stored
from tiny import VOCAB, Paged, random_weights, tiny

from quire.backends.backend import Capacity
from quire.backends.cuda.accelerator import DeviceArray, Launch, RankExchange, in_graph
from quire.backends.cuda.asked import require_compiled
from quire.backends.cuda.caches import DeviceCaches
from quire.backends.cuda.device import CudaDevice, cuda_device
from quire.backends.cuda.device_slots import DeviceSlot
from quire.backends.cuda.draws import StepDraws
from quire.backends.cuda.driver import _Loaded
from quire.backends.cuda.interpreted import InterpretedAccelerator, view_of
from quire.backends.cuda.kernels.variants import variants
from quire.backends.cuda.manifest import CompiledKernel, Manifest, launch_key, variant_key
from quire.backends.cuda.refused import require_kernels
from quire.backends.cuda.sampler import DeviceSampler, penalty_bytes, sampling_bytes
from quire.backends.cuda.segments import MEMORY_BYTES
from quire.backends.cuda.slot_sampling import SlotSampling
from quire.backends.cuda.slot_tables import SlotTables
from quire.backends.cuda.weights import plan_layout
from quire.backends.device import device_for, plan_weights
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.models import read_model
from quire.program import ops
from quire.program.caches import PagedKV, SlotState
from quire.program.passes import adaptable, fuse
from quire.quantize.coded import CodedStorage
from quire.quantize.groups import GroupStorage
from quire.quantize.kinds import FloatStorage
from quire.quantize.mixed import MixedStorage
from quire.quantize.scales import ScaleForm
from quire.sampling_params import SamplingParams
from quire.types import Admission, Row, Step
from quire.weights.plan import all_in


@pytest.fixture
def device() -> CudaDevice:
    return cuda_device("cuda-interpreted")


def test_launches_in_graphs_depend_on_launches_alone() -> None:
    array = DeviceArray(None, np.dtype(np.uint8), (2, 16))
    empty, some, exchange = Launch("f", (1, 0, 1), ()), Launch("f", (1, 1, 1), ()), RankExchange(array)
    listed = [empty, some, empty, some, exchange, empty, some, some]
    assert list(in_graph(listed, True)) == [
        (some, False),
        (some, True),
        (exchange, False),
        (some, False),
        (some, True),
    ]
    assert not any(dependent for _, dependent in in_graph(listed, False))


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("dependent", [True, False])
def test_only_kernels_that_wait_may_begin_early(waits: bool, dependent: bool) -> None:
    loaded = _Loaded(None, CompiledKernel("f", "", 4, 0, 2, waits))
    config = loaded.config((3, 2, 1), dependent)
    assert config.programmatic_stream_serialization == (waits and dependent)
    assert (config.grid, config.block) == ((3, 2, 1), (128, 1, 1))


def test_a_gpu_that_is_not_there_is_one_error() -> None:
    with pytest.raises(ConfigError) as raised:
        device_for(EngineConfig(device="cuda:999"))
    assert "NVIDIA driver" in str(raised.value) or "there is no GPU 999" in str(raised.value)
    assert raised.value.hint is not None


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "cuda:-1", "cuda:1000", "native:1", "gpu"])
def test_a_name_that_no_device_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not possible"):
        EngineConfig(device=name)


def test_refusals_say_what_to_do(device: CudaDevice) -> None:
    program = tiny("llama").program
    weight = next(iter(program.weights().values()))
    odd = CodedStorage("gptq", 4, "unsigned", 24, ScaleForm("f16"), zeros=True)
    for kind in (GroupStorage("int3", 3), odd, MixedStorage((FloatStorage("bf16"), odd))):
        with pytest.raises(ConfigError, match="which the cuda backend has no kernel for"):
            device.storage(weight, kind, None)


def test_what_kernels_have_no_room_for_is_refused() -> None:
    mixture = fuse(wide("mixtral").program)
    op = next(op for op in mixture if isinstance(op, ops.Experts))
    many = replace(mixture, ops=(replace(op, routing=replace(op.routing, chosen=33)),))
    with pytest.raises(ConfigError, match="33 of 4 experts"):
        require_kernels(many, {})
    huge = read_model(wide_config("llama", vocab_size=600_000)).program
    with pytest.raises(ConfigError, match="to sample from 600,000 tokens"):
        require_kernels(huge, dict.fromkeys(huge.weights(), FloatStorage("bf16")))
    storage: dict[str, Any] = {name: FloatStorage("bf16") for name in mixture.weights()}
    ordered = CodedStorage("gptq", 4, "unsigned", 32, ScaleForm("f16"), zeros=True, ordered=True)
    require_kernels(mixture, storage | {op.experts.up.name: ordered})
    with pytest.raises(ConfigError, match="tables of embeddings whose inputs are in another order"):
        require_kernels(mixture, storage | {mixture.ops[0].weights()[0].name: ordered})


def test_sizes_that_are_no_multiples_of_16_are_refused() -> None:
    """Rows of float matrices and heads; rows of integers are padded, and results may have any width."""
    narrow, dense = fuse(tiny("llama").program), fuse(wide("llama").program)
    with pytest.raises(ConfigError, match="no multiples of 16: heads have 4 numbers"):
        require_kernels(narrow, dict.fromkeys(narrow.weights(), GroupStorage("int8", 8)))
    config = wide_config("llama", intermediate_size=24)
    program = fuse(read_model(config).program)
    with pytest.raises(ConfigError, match=r"down_proj\.weight has 24 inputs"):
        require_kernels(program, dict.fromkeys(program.weights(), FloatStorage("bf16")))
    require_kernels(program, dict.fromkeys(program.weights(), GroupStorage("int8", 8)))
    adapted = adaptable(program)  # matrices of adapters are floats
    with pytest.raises(ConfigError, match=r"down_proj\.weight has 24 inputs"):
        require_kernels(adapted, dict.fromkeys(adapted.weights(), GroupStorage("int8", 8)))
    require_kernels(dense, dict.fromkeys(dense.weights(), FloatStorage("bf16")))


def test_a_launch_with_a_size_of_another_multiple_is_found() -> None:
    accelerator = InterpretedAccelerator()
    out, x = (accelerator.allocate(1 << 10).part(0, (1, 24), np.dtype(np.float32)) for _ in range(2))
    rotated = Launch("rotary", (1, 1, 1), (out, x, x, x, 1, 24, 8), {"ROPE": "halves", "DIM": 64})
    with pytest.raises(ValueError, match="rotary takes dim as a multiple of 16, not 24"):
        accelerator.launch(rotated)


def test_memory_is_counted_before_anything_is_loaded(device: CudaDevice) -> None:
    """The plan has the bytes that the backend then allocates, but for what does not grow with the model.

    That is also the memory of segments of contexts, which the backend has from its start.
    """
    program = fuse(wide("qwen2").program)
    plan = plan_weights(device, program, None, "int8", all_in("bf16"))
    spec = program.cache_groups[0]
    assert isinstance(spec, PagedKV)
    assert device.block_bytes(spec, "int8", 16) == 16 * 2 * 2 * (16 + 4)
    accelerator = InterpretedAccelerator()
    DeviceCaches(accelerator, program, [5], 16, "int8")
    block_bytes = device.block_bytes(spec, "int8", 16) * len(program.caches)
    assert accelerator.num_bytes == (5 + 1) * block_bytes
    eight, more = (device.slots_bytes(program, slots, block_bytes) for slots in (8, 16))
    assert eight > block_bytes + 9 * penalty_bytes(VOCAB)
    assert more > eight + 8 * penalty_bytes(VOCAB)
    paged = Paged(program, random_weights(program), make=interpreted)
    accelerator = paged.backend._accelerator  # type: ignore[attr-defined]
    before = accelerator.num_bytes
    paged.prefill(paged.sequence(range(20)))
    assert accelerator.num_bytes - before <= device.step_bytes(program, plan, 20) - MEMORY_BYTES + 2048
    parts = plan.layout.parts
    assert plan.layout.nbytes >= sum(part.nbytes for part in parts) > 0
    assert all(part.offset % 256 == 0 for part in parts)


def test_states_take_what_their_specs_say(device: CudaDevice) -> None:
    program, accelerator = fuse(wide("qwen3_5").program), InterpretedAccelerator()
    DeviceCaches(accelerator, program, [0] * len(program.cache_groups), 16, "int8", 5, 3)
    states = [spec for spec in program.caches if isinstance(spec, SlotState)]
    kept = sum(5 * spec.slot_bytes + 3 * spec.snapshot_bytes for spec in states)
    blocks = sum(device.block_bytes(spec, "int8", 16) for spec in program.caches)
    assert kept > blocks > 0
    assert kept + blocks <= accelerator.num_bytes <= kept + blocks + 8  # one byte for each empty array


def test_memory_of_sampling_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of more rows than a launch draws, with all that takes memory, allocates what was planned."""
    monkeypatch.setattr(InterpretedAccelerator, "launch", lambda *_: None)
    accelerator, vocab, rows = InterpretedAccelerator(), 500, 70
    sampler = DeviceSampler(accelerator, rows, vocab)
    params = SamplingParams(seed=1, logprobs=20, presence_penalty=1.0, allowed_token_ids=[1, 2])
    slots = []
    before = accelerator.num_bytes
    for slot in range(rows):
        admission = Admission(slot, str(slot), 0, params, (), 1)
        slots.append(DeviceSlot(admission, [1], None, sampling=SlotSampling(admission, vocab)))
        sampler.admit(slot, slots[-1])
    step = Step(0, tuple(Row(slot, 0, 1) for slot in range(rows)))
    logits = DeviceArray(np.zeros(4 * rows * vocab, np.uint8), np.dtype(np.float32), (rows, vocab))
    sampler.launch(StepDraws(step, slots, {}), logits)
    planned = sampling_bytes(vocab, rows) + (rows + 1) * penalty_bytes(vocab)
    assert 0.8 * planned < accelerator.num_bytes - before <= planned + 2048


FAMILIES = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "granite", "ministral3", "gpt2"),
    *("qwen3_5", "lfm2", "falcon_h1", "gemma4", "gemma3n", "glm4_moe_lite"),
)
MIXTURES = ("mixtral", "qwen3_moe", "llama4", "gpt_oss", "glm4_moe", "phimoe", "ernie4_5_moe")


@pytest.mark.parametrize(
    ("family", "format", "cache"),
    [
        *((family, "bf16", "bfloat16") for family in FAMILIES),
        ("qwen2", "int8", "int8"),
        ("qwen2", "int4", "int8"),
        *(
            (family, format, "bfloat16")
            for family in MIXTURES
            for format in ("bf16", "int8", "int4", "mxfp4")
        ),
    ],
)
def test_every_launch_of_a_model_was_compiled(
    monkeypatch: pytest.MonkeyPatch, family: str, format: str, cache: str
) -> None:
    """In the formats that models have on GPUs, no launch asks for a kernel that is not in the list.

    Arrays begin at multiples of 16 bytes, as kernels are compiled for.
    """
    compiled = {variant.key for variant in variants()}
    asked: set[str] = set()

    def launch(_: InterpretedAccelerator, launch: Any) -> None:
        arrays = [arg for arg in launch.args if isinstance(arg, DeviceArray)]
        assert all(array.first_byte % 16 == 0 for array in arrays), launch.kernel
        if prod(launch.grid):
            asked.add(launch_key(launch))

    monkeypatch.setattr(InterpretedAccelerator, "launch", launch)
    program = fuse(
        read_model(wide_config(family, **({"head_dim": 128} if family == "gemma2" else {}))).program
    )
    paged = Paged(program, stored(program, format), kv_cache_dtype=cache, make=interpreted)
    paged.prefill(paged.sequence(range(24)), (20, 1, 3))
    assert asked
    assert asked - compiled == set()


ROWS = Capacity([8], 16, "bfloat16", 4)


@pytest.mark.parametrize(("family", "kind"), [("qwen3_moe", "f32"), ("llama", "int4")])
def test_what_was_not_compiled_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    """A program's launches are those of its backend in steps of few rows and of many."""
    program = fuse(wide(family).program)
    kept = {name: weight.storage for name, weight in stored(program, kind).items()}
    layout, accelerator = plan_layout(program, kept), InterpretedAccelerator()
    if family == "llama":
        require_compiled(program, layout, ROWS, accelerator)
        monkeypatch.setattr(accelerator, "has_kernel", lambda key: "BLOCK_M=64" not in key)
    with pytest.raises(ConfigError, match=r"kernel (grouped_gated|joined_quantized)_") as raised:
        require_compiled(program, layout, ROWS, accelerator)
    assert accelerator.num_bytes == 0
    assert "native" in str(raised.value.hint)


def test_a_device_looks_launches_up(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fuse(wide("llama").program)
    plan = plan_weights(device, program, None, "int8", all_in("bf16"))
    monkeypatch.setattr(InterpretedAccelerator, "has_kernel", lambda *_: False)
    with pytest.raises(ConfigError, match="no kernel gather_"):
        device.build(program, plan, ROWS)


def test_compiled_kernels_are_checked(tmp_path: Path) -> None:
    code = b"a cubin"
    entry = {"symbol": "f", "num_warps": 4, "shared_bytes": 0, "num_scratch": 2, "waits": True}
    entry["sha256"] = hashlib.sha256(code).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps({"targets": {"sm_90": {"f(;)": entry}}}))
    manifest = Manifest.read(tmp_path)
    with pytest.raises(ConfigError, match="no kernel g"):
        manifest.kernel("sm_90", "g(;)")
    with pytest.raises(ConfigError, match="no kernels were compiled for sm_89, only for sm_90") as raised:
        manifest.require("sm_89")
    assert 'run `make cubins ARGS="--targets 89"`' in str(raised.value.hint)
    with pytest.raises(ConfigError, match="1 of 1 kernels for sm_90 are not in"):
        manifest.require("sm_90")
    kernel = manifest.kernel("sm_90", variant_key("f", [], {}))
    with pytest.raises(ConfigError, match="cannot be read") as raised:
        manifest.cubin("sm_90", kernel)
    assert "make cubins" in str(raised.value.hint)
    (tmp_path / "sm_90").mkdir()
    file = tmp_path / "sm_90" / f"{kernel.sha256}.cubin"
    file.write_bytes(b"another")
    with pytest.raises(ConfigError, match="not the one in the manifest"):
        manifest.cubin("sm_90", kernel)
    file.write_bytes(code)
    assert manifest.cubin("sm_90", kernel) == code
    manifest.require("sm_90")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Manifest.read(tmp_path)


def test_the_fingerprint_has_the_kernels_and_their_target(device: CudaDevice) -> None:
    assert device.arithmetic == "interpreted-interpreted"
    assert CudaDevice(InterpretedAccelerator(), "0123456789ab").arithmetic == "interpreted-0123456789ab"


def test_block_tables_take_changes_and_grow() -> None:
    """Tables on the accelerator are those of the host after changes, also when they were lengthened."""
    accelerator = InterpretedAccelerator()
    tables, rng = SlotTables(accelerator, 5, 2), np.random.default_rng(2)
    wanted, lengths = np.zeros((2, 5, 200), np.int32), np.zeros(5, np.int32)
    for longest in (4, 20, 32, 33, 90, 200):
        for group, slot in rng.integers(0, (2, 5), (6, 2)).tolist():
            first = int(rng.integers(0, longest))
            ids = rng.integers(0, 1000, longest - first)
            tables.grant(group, slot, first, ids.tolist())
            wanted[group, slot, first:longest] = ids
        slots = rng.permutation(5)[:3]
        lengths[slots] = rng.integers(0, 9, 3)
        tables.set_lengths(slots, lengths[slots])
        changes = [changed.astype(np.int32) for changed in tables.changes()]
        placed = [DeviceArray(own.view(np.uint8), own.dtype, own.shape) for own in changes]
        found_lengths, found = tables.place(placed[0], placed[1])
        assert view_of(found_lengths).tolist() == lengths.tolist()
        for table, own in zip(found, wanted, strict=True):
            held = view_of(table)
            width = min(held.shape[1], 200)
            assert (held[:, :width] == own[:, :width]).all()
            assert not own[:, width:].any()


def test_kernels_take_aligned_arrays() -> None:
    array = DeviceArray(np.zeros(64, np.uint8), np.dtype(np.int32), (4,), 4)
    with pytest.raises(ValueError, match="at multiples of 16 bytes"):
        InterpretedAccelerator().launch(Launch("feed_tokens", (1, 1, 1), (array, array, 4), {"BLOCK": 128}))


def test_parts_of_arrays_stay_inside(device: CudaDevice) -> None:
    array = DeviceArray(np.zeros(64, np.uint8), np.dtype(np.float32), (4, 4))
    assert array.rows(1, 2).first_byte == 16
    with pytest.raises(ValueError, match="leave an array of 64"):
        array.rows(3, 2)
