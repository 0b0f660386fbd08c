"""Several accelerators as one: the bits of a single one, for families and kinds of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_accelerator import interpreted, wide, wide_config, write_checkpoint
from seeing import whole
from seeing_on_gpu import QWEN, model, on_gpu, scores
from stores import wait_until
from streams import Machine
from test_adapters_on_gpu import parts_of, rows_of
from test_cuda_engine import SHORT, ask, make
from test_exactness import fingerprint
from test_whole_models import TOKENS, in_parts, stored
from tiny import CONFIGS, Paged, batch_of, random_weights, same_bits
from tiny_vision import write_qwen3_vl

from quire.backends.cuda import divided
from quire.backends.cuda.accelerator import DeviceArray, HostCopy, Launch, RankExchange
from quire.backends.cuda.device import CudaDevice
from quire.backends.cuda.divided import divide, divided_axes
from quire.backends.cuda.interpreted import InterpretedAccelerator, InterpretedGroup
from quire.backends.cuda.kernels.variants import variants
from quire.backends.cuda.segments import MEMORY_BYTES
from quire.backends.device import plan_weights
from quire.backends.slot_images import batch_of as slice_of
from quire.backends.slot_images import pixels_of
from quire.engine.fetches import Fetches
from quire.errors import ConfigError
from quire.program.passes import adaptable, fuse
from quire.weights.plan import all_in

# What is divided differently: biases, windows, experts, latents, states, layers that share a cache.
FAMILIES = ("qwen2", "gemma2", "gpt_oss", "qwen3_next", "deepseek_v3", "gemma4", "stablelm", "nemotron_h")


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide matrices of any size."""
    monkeypatch.setattr(divided, "LEAST_SIZE", 0)


def group(number: int) -> Callable[..., Any]:
    """What Paged makes a backend of so many accelerators with."""
    return partial(interpreted, make=partial(InterpretedGroup, number))


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_have_the_bits_of_one(name: str) -> None:
    program = fuse(wide(name).program)
    weights, prompts = random_weights(program), [TOKENS[:18], TOKENS[40:45]]
    one = Paged(program, weights, make=interpreted)
    two = Paged(program, weights, block_size=8, make=group(2), seed=1)
    whole = [one.prefill(one.sequence(prompt)) for prompt in prompts]
    parts = in_parts(two, prompts, [(9, 8, 1), (0, 4, 1)])
    for expected, found in zip(whole, parts, strict=True):
        assert same_bits(expected, found)


@pytest.mark.parametrize(
    ("name", "format"),
    [("llama", "bf16"), ("mixtral", "int4"), ("gpt_oss", "mxfp4"), ("deepseek_v3", "int8")],
)
def test_weights_of_every_kind_are_divided(name: str, format: str) -> None:
    program = fuse(wide(name).program)
    weights, prompt = stored(program, format), TOKENS[:20]
    found = []
    for how in (interpreted, group(2)):
        paged = Paged(program, weights, kv_cache_dtype="int8", make=how)
        found.append(paged.prefill(paged.sequence(prompt)))
    assert same_bits(*found)


def test_what_cannot_be_divided_is_computed_by_all() -> None:
    """Two key heads among four ranks, and outputs whose number no rank has a part of."""
    program = fuse(wide("llama").program)  # 35 tokens
    axes, weights = divided_axes(program, 4), random_weights(program)
    assert divide(program, 4, axes).caches == program.caches
    assert "lm_head.weight" not in axes
    assert "model.layers.0.mlp.down_proj.weight" in axes
    one, four = (Paged(program, weights, make=how) for how in (interpreted, group(4)))
    prompt = TOKENS[:18]
    assert same_bits(one.prefill(one.sequence(prompt)), four.prefill(four.sequence(prompt)))


def test_every_family_is_divided() -> None:
    """Each rank has half of nearly all numbers of matrices, and half of the cache of each head."""
    for name in CONFIGS:
        program = fuse(wide(name, vocab_size=64).program)
        if name == "deci":  # layers with two heads of keys would have the caches of those with one
            with pytest.raises(ConfigError, match="cannot be divided among 2 GPUs"):
                divide(program, 2, divided_axes(program, 2))
            continue
        own = divide(program, 2, divided_axes(program, 2))
        assert own.layer_groups == program.layer_groups
        sizes = [sum(spec.size for spec in p.weights().values() if spec.quantizable) for p in (program, own)]
        assert sizes[1] < 0.75 * sizes[0], name


class EagerGroup(InterpretedGroup):
    """A group whose first rank is as far ahead of the others as exchanges let it be."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._waiting: list[Callable[[int], None]] = []  # what each rank does after the last exchange

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        kept = values.copy()
        self._waiting.append(lambda rank: self.ranks[rank].write(self.on(rank, array), kept))

    def launch(self, launch: Launch | RankExchange) -> None:
        if isinstance(launch, Launch):
            self._waiting.append(lambda rank: self.ranks[rank].launch(self.of_rank(rank, launch)))
            return
        self.catch_up()
        parts = launch.parts
        if parts.num_bytes:
            self._waiting.append(lambda rank: self._copy(rank, parts))

    def _copy(self, rank: int, parts: DeviceArray) -> None:
        for source in range(len(self.ranks)):
            held = self.ranks[source].fetch(self.on(source, parts.rows(source, 1)))
            self.ranks[rank].write(self.on(rank, parts.rows(source, 1)), held.result())

    def catch_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        for rank in range(len(self.ranks)):
            for do in waiting:
                do(rank)

    def fetch(self, array: DeviceArray) -> HostCopy:
        self.catch_up()
        return super().fetch(array)


@pytest.mark.parametrize("vocab", [35, 64])
def test_a_rank_overwrites_nothing_that_others_still_copy(vocab: int) -> None:
    """Steps follow one another without waiting. There are five exchanges, and a sixth where 64 tokens are."""
    program = fuse(wide("mixtral", vocab_size=vocab, num_hidden_layers=1).program)
    weights, found = random_weights(program), list[np.ndarray]()
    for how in (interpreted, partial(interpreted, make=partial(EagerGroup, 2))):
        paged = Paged(program, weights, make=how)
        sequences = [paged.sequence(TOKENS[start : start + 20]) for start in (0, 20)]
        batches = [batch_of([(one, 20)], paged.block_size, ids=paged.ids) for one in sequences]
        backend: Any = paged.backend
        accelerator = backend._accelerator
        logits = backend._forward(batches[0]).values[backend._output]
        kept = accelerator.allocate(logits.num_bytes).part(0, logits.shape, logits.dtype)
        copied = (kept, logits, vocab, vocab, 0)
        accelerator.launch(Launch("take_columns", (20, 1, 1), copied, {"BLOCK": 128}))
        backend.execute(batches[1])
        found += [
            rank.fetch(accelerator.on(number, kept)).result() for number, rank in enumerate(accelerator.ranks)
        ]
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


def test_a_larger_step_overwrites_nothing_that_others_still_copy() -> None:
    """Of the step before it, which exchanges an even number of times, the last for all of its tokens."""
    program = fuse(wide("llama", num_hidden_layers=1).program)  # four exchanges: 35 tokens have no halves
    weights, found = random_weights(program), list[np.ndarray]()
    for how in (interpreted, partial(interpreted, make=partial(EagerGroup, 2))):
        paged = Paged(program, weights, make=how)
        backend: Any = paged.backend
        accelerator, sizes = backend._accelerator, (20, 1, 20)
        sequences = [paged.sequence(TOKENS[:size]) for size in sizes]
        batches = [
            batch_of([(one, n)], paged.block_size, ids=paged.ids)
            for one, n in zip(sequences, sizes, strict=True)
        ]
        backend.execute(batches[0])
        logits = backend._forward(batches[1]).values[backend._output]
        width = logits.shape[1]
        kept = accelerator.allocate(logits.num_bytes).part(0, logits.shape, logits.dtype)
        accelerator.launch(Launch("take_columns", (1, 1, 1), (kept, logits, width, width, 0), {"BLOCK": 128}))
        backend.execute(batches[2])
        found += [
            rank.fetch(accelerator.on(number, kept)).result() for number, rank in enumerate(accelerator.ranks)
        ]
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


def test_memory_of_each_rank_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights, of blocks, of a step, and of an image in a tower."""
    monkeypatch.setattr("quire.backends.cuda.device._TOKEN_BYTES", 4 * 24)
    both, one = (CudaDevice(own, "interpreted") for own in (InterpretedGroup(2), InterpretedAccelerator()))
    program, of = fuse(wide("qwen2", hidden_size=256).program), model("gemma4_small")
    plan, whole_plan = (plan_weights(device, program, None, None, all_in("bf16")) for device in (both, one))
    assert plan.layout.nbytes < 0.6 * whole_plan.layout.nbytes
    spec = program.cache_groups[0]
    assert 2 * both.block_bytes(spec, "int8", 16) == one.block_bytes(spec, "int8", 16)
    paged = Paged(program, random_weights(program), make=group(2))
    backend: Any = paged.backend
    before = backend._accelerator.ranks[1].num_bytes
    paged.prefill(paged.sequence(range(20)))
    planned = both.step_bytes(program, plan, 20) - MEMORY_BYTES + 2048
    assert 0.5 * planned < backend._accelerator.ranks[1].num_bytes - before <= planned
    plan = plan_weights(both, whole(of.program, of.vision), None, None, all_in("bf16"))
    backend = on_gpu(of, accelerator=InterpretedGroup(2)).backend
    before = backend._accelerator.ranks[1].num_bytes
    patches = of.vision.patching.patches(pixels_of(of.images[0]))
    backend._images._begin(slice_of(patches, 2))
    planned = both.step_bytes(of.vision.program, plan, len(patches), 2)
    assert 0.7 * planned < backend._accelerator.ranks[1].num_bytes - before <= planned


def test_the_kernels_of_exchanges_are_compiled() -> None:
    compiled = {variant.key for variant in variants()}
    paged = Paged(program := fuse(wide("mixtral").program), random_weights(program), make=group(2))
    paged.prefill(paged.sequence(TOKENS[:5]))
    accelerator: Any = paged.backend
    loaded = accelerator._accelerator.ranks[0].loaded
    own = {key for key in loaded if key.startswith(("put_part", "join_parts"))}
    assert len(own) == 2
    assert own <= compiled


def test_adapters_are_divided_as_their_weights_are() -> None:
    """In float32 and float16, for all weights and for some, and rows of none."""
    program = fuse(adaptable(wide("qwen2", num_hidden_layers=1, vocab_size=48).program))
    weights, found = stored(program, "bf16"), []
    adapters = {"a": parts_of(program, 1, 5, "f32"), "b": parts_of(program, 2, 3, "f16", every=2)}
    for how in (interpreted, group(2)):
        paged = Paged(program, weights, make=how)
        for name, parts in adapters.items():
            paged.backend.add_adapter(name, parts)
        sequences = [paged.sequence(TOKENS[first : first + 5]) for first in (0, 5, 10)]
        found.append(np.concatenate(rows_of(paged, sequences, [5, 5, 5], ("a", "", "b"))))
    assert same_bits(*found)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma4", "internvl"])
def test_images_are_seen_by_all_ranks(name: str) -> None:
    of = model(name)
    assert scores(of, on_gpu(of, accelerator=InterpretedGroup(2))) == scores(of, on_gpu(of))


@pytest.mark.parametrize("options", [{}, {"max_images": 0}], ids=["sees", "text"])
def test_a_model_that_sees_is_planned_and_loaded(tmp_path: Path, options: dict[str, Any]) -> None:
    """The weights of its tower are divided too, by one plan for both."""
    write_qwen3_vl(tmp_path, QWEN)
    found = []
    for ranks in (1, 2):
        llm = make(str(tmp_path), tensor_parallel_size=ranks, **options)
        (output,) = llm.generate([{"prompt_token_ids": TOKENS[:9]}], SHORT, use_tqdm=False)
        found.append(fingerprint(output))
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_requests_have_the_bits_of_one_gpu(tmp_path: Path, quantization: str | None) -> None:
    """Sampled on the accelerator, with graphs and drafts; steps in flight. Each rounds its own weights."""
    model, found = write_checkpoint(tmp_path), []
    for options in ({}, {"tensor_parallel_size": 2, "speculative": "auto"}):
        llm = make(model, max_steps_in_flight=2, quantization=quantization, **options)
        found.append([fingerprint(output) for output in ask(llm)])
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("heads", [1, 2])
def test_blocks_are_kept_for_as_many_gpus(
    heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs find what two have kept, and not what one has: of divided heads, and of one that all have."""
    monkeypatch.setattr(Fetches, "_compute_s", lambda _, first, end: 60.0 * (end - first))
    model = write_checkpoint(tmp_path, wide_config("qwen3", num_hidden_layers=1, num_key_value_heads=heads))
    found, cached = [], []
    for ranks in (1, 2, 2):
        llm = make(model, prefix_cache_dir=str(tmp_path / "blocks"), tensor_parallel_size=ranks)
        store = llm.engine.exchange.store
        wait_until(lambda store=store: store.ready)
        outputs = ask(llm)
        found.append([fingerprint(output) for output in outputs])
        cached.append(sum(output.num_cached_tokens for output in outputs))
        llm.close()
    assert found[0] == found[1] == found[2]
    assert cached[2] > cached[1] == cached[0]


@pytest.mark.parametrize("first", [0, 1])
def test_events_order_the_streams_of_gpus(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With graphs and steps in flight, whichever GPU is as far ahead as events let it be."""
    model = write_checkpoint(tmp_path)
    llm = make(model, max_steps_in_flight=2)
    wanted = [fingerprint(output) for output in ask(llm)]
    llm.close()
    monkeypatch.setattr("quire.backends.cuda.interpreted.InterpretedGroup", lambda n: Machine(n, first).group)
    llm = make(model, max_steps_in_flight=2, tensor_parallel_size=2)
    assert [fingerprint(output) for output in ask(llm)] == wanted
    llm.close()
