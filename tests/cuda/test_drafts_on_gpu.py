"""Draft models and prediction layers on the interpreted accelerator: they change no output, and are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import predicted
import pytest
from constrained import verify_all
from drafted import PARAMS as KINDS
from drafted import PLAIN, Drafts, check_equal, proposed
from on_accelerator import REFUSED, wide, wide_config
from safetensors.numpy import save_file
from test_cuda_engine import make
from test_exactness import fingerprint
from test_whole_models import stored
from tiny import VOCAB, random_weights

from quire import SamplingParams
from quire.backends.backend import Capacity
from quire.backends.cuda import drafts as drafts_module
from quire.backends.cuda import interpreted
from quire.backends.cuda.accelerator import DeviceFault
from quire.backends.cuda.asked import _row, require_compiled
from quire.backends.cuda.backend import CudaBackend
from quire.backends.cuda.device import CudaDevice
from quire.backends.cuda.drafts import DevicePasses
from quire.backends.cuda.interpreted import InterpretedAccelerator
from quire.backends.cuda.sampler import sampling_bytes
from quire.backends.cuda.segments import MEMORY_BYTES
from quire.backends.cuda.weights import place_weights, plan_layout
from quire.backends.device import plan_weights
from quire.backends.draft_model import DraftModel, spare_blocks
from quire.backends.reference import ReferenceBackend
from quire.config import EngineConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.models import read_model, read_prediction
from quire.program import Program
from quire.program.passes import fuse, hand_out_hidden
from quire.quantize.kinds import Dense
from quire.types import Admission, Grant, Row, Step
from quire.weights.plan import all_in

CONFIG = wide_config("glm4_moe", num_hidden_layers=1, first_k_dense_replace=1)
_RANDOM = np.random.default_rng(4)
TEXTS = [_RANDOM.integers(0, VOCAB, n).tolist() for n in (18, 14)]
PROMPTS = [_RANDOM.integers(3, VOCAB, n).tolist() for n in (10, 3)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=7, logprobs=1, ignore_eos=True, detokenize=False),
    SamplingParams(
        temperature=0.9, seed=7, max_tokens=7, repetition_penalty=1.3, ignore_eos=True, detokenize=False
    ),
]
ON_DEVICE = replace(PLAIN, logprobs=0)
SLOTS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of one layer and a prediction layer, with random weights."""
    folder = tmp_path_factory.mktemp("predicts")
    program, layer = read_model(CONFIG).program, read_prediction(CONFIG, lambda _: False)
    assert layer is not None
    weights = random_weights(replace(program, ops=(*program.ops, *layer.ops)))
    save_file({name: weight.array for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def ask(llm: Any) -> list[Any]:
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(asked, PARAMS, use_tqdm=False)
    llm.engine.scheduler.check()
    return outputs


@pytest.fixture(scope="module")
def plain(model: str) -> list[str]:
    """The answers without any drafts."""
    llm = make(model)
    found = [fingerprint(output) for output in ask(llm)]
    llm.close()
    return found


@pytest.fixture
def drafted(model: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes engines that verify whatever is proposed."""
    monkeypatch.setattr("quire.engine.speculation.choose_lengths", verify_all)
    return lambda speculative, **more: make(model, speculative=speculative, **more)


def counts(llm: Any) -> tuple[int, int]:
    records = llm.engine.records
    return sum(one.num_drafted for one in records), sum(one.num_accepted for one in records)


def test_a_model_that_drafts_for_itself(model: str, plain: list[str], drafted: Callable[..., Any]) -> None:
    """It is always right, greedy and drawn with penalties; with steps in flight, and on cached blocks."""
    llm = drafted(model, max_steps_in_flight=2)
    assert [fingerprint(output) for output in ask(llm)] == plain
    again = ask(llm)
    assert [fingerprint(output) for output in again] == plain
    assert sum(output.num_cached_tokens for output in again) > 0
    assert counts(llm)[0] == counts(llm)[1] > 12
    llm.close()


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_prediction_layer(
    plain: list[str], drafted: Callable[..., Any], num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random weights it is sometimes right; prompts are in chunks."""
    monkeypatch.setattr("quire.backends.cuda.divided.LEAST_SIZE", 0)
    llm = drafted("mtp", max_num_batched_tokens=9, tensor_parallel_size=num_gpus)
    assert [fingerprint(output) for output in ask(llm)] == plain
    assert 0 < counts(llm)[1] < counts(llm)[0]
    llm.close()


def on_gpu(program: Program, draft: Program, weights: dict[str, Any], shared: bool) -> CudaBackend:
    """A backend with a draft model, whose weights are among those of the program, or are placed apart."""
    accelerator, kept = InterpretedAccelerator(), {name: Dense(w.array) for name, w in weights.items()}
    whole = replace(program, ops=(*program.ops, *draft.ops)) if shared else program
    own = None if shared else place_weights(draft, kept, accelerator)
    capacity = Capacity([8] * len(program.cache_groups), 16, "float32", SLOTS)
    placed = place_weights(whole, kept, accelerator)
    return CudaBackend(program, placed, accelerator, capacity, DraftModel(draft, own, 512, 256))


def programs(name: str, **others: Any) -> tuple[Program, Program, dict[str, Any]]:
    """A model that hands out its hidden states, its prediction layer, and weights for both."""
    config = wide_config(name, **others)
    program = hand_out_hidden(fuse(read_model(config).program))
    layer = read_prediction(config, lambda _: False)
    assert program is not None
    assert layer is not None
    layer = fuse(layer)
    return program, layer, random_weights(replace(program, ops=(*program.ops, *layer.ops)))


@pytest.mark.parametrize(("name", "num_layers"), [("deepseek_v3", 1), ("qwen3_5", 2)])
def test_what_a_layer_proposes_is_what_its_formula_gives(name: str, num_layers: int) -> None:
    """From hidden states of prompts, chunks and graphs; rows sampled on the host and on the accelerator."""
    program, layer, weights = programs(name, num_hidden_layers=num_layers)
    drafts = Drafts(program, on_gpu(program, layer, weights, shared=True), 8)
    sequences = [
        drafts.admit(slot, text, params)
        for (slot, text), params in zip(enumerate(TEXTS), (PLAIN, ON_DEVICE), strict=True)
    ]
    found = predicted.run(drafts, sequences, 21, chunk=11)
    assert len(found) > 5
    assert drafts.num_drafted > drafts.num_accepted
    predicted.check_found(found, sequences, program, layer, weights)


def llama() -> CudaBackend:
    """A model that drafts for itself."""
    program = fuse(wide("llama", num_hidden_layers=1).program)
    return on_gpu(program, program, random_weights(program), shared=False)


def test_passes_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for their tokens behind the last one. Those of one token a row have graphs."""
    events, draw, result = list[str](), DevicePasses.draw, interpreted._Fetched.result

    def drawn(self: DevicePasses, batch: Any, drawings: Any) -> Any:
        events.append("pass")
        return draw(self, batch, drawings)

    def waited(self: Any) -> Any:
        events.append("wait")
        return result(self)

    monkeypatch.setattr(DevicePasses, "draw", drawn)
    monkeypatch.setattr(interpreted._Fetched, "result", waited)
    backend = llama()
    drafts = Drafts(backend.program, backend, 8)
    sequences = [drafts.admit(slot, text, ON_DEVICE) for slot, text in enumerate(TEXTS)]
    drafts.run(sequences, 30)
    assert drafts.num_accepted == drafts.num_drafted > 12
    assert events[:7] == ["wait", *["pass"] * 3, *["wait"] * 3]
    assert backend._drafts is not None
    assert {rows for rows, _ in backend._drafts._passes._graphs._graphs} == {1, 2}


def test_guesses_beyond_the_blocks_of_several_sequences() -> None:
    """Each has spare blocks of its own: all reach the ends of their blocks in the same steps."""
    backend = llama()
    drafts = Drafts(backend.program, backend, 8)
    texts = [np.random.default_rng(i).integers(0, VOCAB, 14).tolist() for i in range(3)]
    drafts.run([drafts.admit(slot, text, ON_DEVICE) for slot, text in enumerate(texts)], 30, 4)
    assert drafts.num_accepted == drafts.num_drafted > 30


def test_penalties_count_proposed_tokens() -> None:
    """Tokens that are wanted as much take turns, as each one lowers the chance of itself."""
    backend = llama()
    drafts = Drafts(backend.program, backend, 8)
    how = replace(ON_DEVICE, logit_bias={3: 20.0, 9: 19.5, 12: 19.0}, frequency_penalty=2.0)
    sequences = [drafts.admit(slot, text, how) for slot, text in enumerate(TEXTS)]
    drafts.run(sequences, 34, 4)
    assert drafts.num_accepted == drafts.num_drafted > 12
    assert {3, 9, 12} <= set(sequences[0].tokens[18:])


def proposals(backend: Any, program: Program, hows: list[SamplingParams]) -> list[Any]:
    """What is proposed for sequences of these parameters, step by step, with prompts in chunks."""
    drafts, found = Drafts(program, backend, 8), []
    sequences = [drafts.admit(slot, TEXTS[slot % 2], how) for slot, how in enumerate(hows)]
    while left := [one for one in sequences if len(one.tokens) < 32]:
        rows = [(one, min(11, len(one.tokens) - one.computed)) for one in left]
        results = drafts.step(rows, (4, 2, 0)[drafts.num_steps % 3])
        found.append([proposed(result) for result in results])
    return [found, drafts.num_accepted, drafts.num_drafted]


def test_proposals_are_those_of_the_reference() -> None:
    """With penalties, biases and chances; where a token has no numbers, and up to the longest context."""
    program = fuse(wide("llama", num_hidden_layers=1).program)
    weights = {name: Dense(weight.array) for name, weight in random_weights(program).items()}
    spoilt = {name: Dense(weight.array.copy()) for name, weight in weights.items()}
    unseen = sorted(set(range(VOCAB)).difference(*TEXTS))
    spoilt["model.embed_tokens.weight"].array[unseen[::2]] = np.nan
    hows = [replace(KINDS[name], logprobs=None) for name in ("greedy", "likely", "penalized", "allowed")]
    found = list[Any]()
    for on_device in (True, False):
        if on_device:
            accelerator = InterpretedAccelerator()
            kept, own = (
                place_weights(program, weights, accelerator),
                place_weights(program, spoilt, accelerator),
            )
            capacity = Capacity([8], 16, "float32", SLOTS)
            backend: Any = CudaBackend(program, kept, accelerator, capacity, DraftModel(program, own, 64, 30))
        else:
            draft: Any = DraftModel(program, spoilt, 64, 30)
            backend = ReferenceBackend(
                program, weights, num_blocks=[8], block_size=16, num_slots=SLOTS, draft=draft
            )
        found.append(proposals(backend, program, hows))
    assert found[0] == found[1]
    steps, num_accepted, num_drafted = found[0]
    assert num_accepted == num_drafted > 12
    lengths = [len(tokens) for step in steps for tokens in step]
    assert {2, 3, 4} <= set(lengths)


@pytest.mark.parametrize("more", [8, -8])
def test_a_draft_model_with_another_vocabulary(more: int) -> None:
    """It proposes tokens that the target has, and is right if it has all of them."""
    program, draft = (
        fuse(wide("llama", num_hidden_layers=1, vocab_size=size).program) for size in (VOCAB, VOCAB + more)
    )
    weights = {name: Dense(weight.array) for name, weight in random_weights(program).items()}
    own = dict(weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        table = np.concatenate([own[name].array, 10 * own[name].array[:8]])[: VOCAB + more]
        own[name] = Dense(np.ascontiguousarray(table))
    accelerator, capacity = InterpretedAccelerator(), Capacity([8], 16, "float32", SLOTS)
    kept, others = place_weights(program, weights, accelerator), place_weights(draft, own, accelerator)
    backend = CudaBackend(program, kept, accelerator, capacity, DraftModel(draft, others, 512, 256))
    steps, num_accepted, num_drafted = proposals(backend, program, [ON_DEVICE, PLAIN])
    assert max(token for step in steps for tokens in step for token in tokens) < VOCAB + min(more, 0)
    assert num_accepted > 2
    assert more < 0 or num_accepted == num_drafted


def test_rows_that_the_host_samples() -> None:
    """Their drafts are drawn on the GPU, without what it has no kernels for."""
    program = fuse(wide("llama", num_hidden_layers=1).program)
    backend = on_gpu(program, program, random_weights(program), shared=False)
    _, num_accepted, num_drafted = proposals(backend, program, [KINDS["drawn"], KINDS["constrained"]])
    assert num_drafted - 3 <= num_accepted
    assert num_accepted > 12


def test_steps_in_flight() -> None:
    """The step after one with proposals waits for them; others do not, and drafts are right after these."""
    backend = llama()
    admission = Admission(0, "a", 0, replace(ON_DEVICE, temperature=0.9), (), 14)
    first = Row(0, 0, 14, tuple(TEXTS[1]), True, 1)
    steps = [
        Step(0, (first,), (admission,), (Grant(0, 0, 0, (5, 3)),), num_proposed=2),
        *(Step(n, (Row(0, 13 + n, 1, (), True, 1),), num_proposed=2 * (n == 3)) for n in (1, 2, 3, 4, 5)),
    ]
    proposals, tokens = [], list[int]()
    for pair, begins in ((steps[:2], False), (steps[2:4], True), (steps[4:], True)):
        launched: Any = [backend.launch(step) for step in pair]
        assert (launched[1].begun is not None) == begins
        for one in launched:
            (result,) = one.result().rows
            tokens += result.token_ids
            proposals.append(proposed(result))
    assert [len(one) for one in proposals] == [2, 0, 0, 2, 0, 0]
    assert tokens[1:3] == list(proposals[0])
    assert tokens[4:6] == list(proposals[3])


def test_replaced_blocks() -> None:
    """Blocks whose contents were replaced have nothing of the draft model, which computes them anew."""
    backend = llama()
    drafts = Drafts(backend.program, backend, 8)
    first, other = drafts.admit(0, TEXTS[0], PLAIN), drafts.admit(1, TEXTS[0][::-1], ON_DEVICE)
    drafts.step([(first, 18), (other, 18)], 3)
    own, others = first.blocks[0][:1], other.blocks[0][:1]
    drafts.driver.release(other)
    backend.write_blocks(0, others, backend.read_blocks(0, own))
    again = drafts.admit(2, TEXTS[0], PLAIN, start=16, shared=other)
    drafts.num_drafted = drafts.num_accepted = 0
    drafts.run([again, first], 30)
    check_equal([again], [first])
    assert drafts.num_accepted == drafts.num_drafted > 8


@pytest.mark.parametrize("works", [True, False])
def test_faults_while_drafting(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    """One that leaves the accelerator at work costs its drafts alone; any other is that of the step."""
    draw, calls = DevicePasses.draw, list[int]()

    def failing(self: DevicePasses, batch: Any, drawings: Any) -> Any:
        calls.append(batch.num_tokens)
        if len(calls) == 2:
            raise DeviceFault("no memory", works=works)
        return draw(self, batch, drawings)

    monkeypatch.setattr(DevicePasses, "draw", failing)
    backend = llama()
    drafts = Drafts(backend.program, backend, 8)
    sequence = drafts.admit(0, TEXTS[1], ON_DEVICE)
    if not works:
        with pytest.raises(DeviceFault, match="no memory"):
            drafts.step([(sequence, 14)], 2)
        return
    (result,) = drafts.step([(sequence, 14)], 2)
    assert (len(result.token_ids), result.error, result.drafts) == (1, None, ())
    (result,) = drafts.step([(sequence, 1)], 2)
    assert len(proposed(result)) == 2
    drafts.step([(sequence, 1)])
    assert drafts.num_accepted == 2


def test_changes_of_block_tables_that_a_fault_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: DevicePasses, *_: object) -> Any:
        self._tables.changes()
        raise DeviceFault("no memory", works=True)

    backend = llama()
    drafts = Drafts(backend.program, backend, 8)
    sequences = [drafts.admit(0, TEXTS[1], ON_DEVICE)]
    drafts.run(sequences, 20)
    sequences.append(drafts.admit(1, TEXTS[0], ON_DEVICE))
    with monkeypatch.context() as patch:
        patch.setattr(DevicePasses, "draw", failing)
        drafts.step([(sequences[1], 18)], 2)
    drafts.run(sequences, 30)
    assert drafts.num_accepted == drafts.num_drafted > 8


def test_its_memory_is_counted(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches with spare blocks and the arrays of passes are planned; hidden states are the host's."""
    config = EngineConfig(model=model, device="cuda-interpreted", max_model_len=64, max_num_seqs=2)
    taken, facts = [], [describe(replace(config, speculative=one)) for one in ("off", "mtp")]
    allocate, sizes = InterpretedAccelerator.allocate, list[int]()

    def counting(self: InterpretedAccelerator, num_bytes: int) -> Any:
        sizes.append(num_bytes)
        return allocate(self, num_bytes)

    monkeypatch.setattr(InterpretedAccelerator, "allocate", counting)
    for one in facts:
        sizes.clear()
        backend = one.device.build(one.program, one.weights, one.capacity, None, one.draft)
        drafts = Drafts(one.program, backend, one.memory.blocks[0])
        drafts.step([(drafts.admit(0, TEXTS[0], ON_DEVICE), 18)], 2 if one.draft else 0)
        taken.append(sum(sizes))
    off, mtp = facts
    assert mtp.draft is not None
    assert mtp.memory.draft is not None
    block_bytes = mtp.memory.draft.block_bytes
    assert block_bytes == 16 * mtp.draft.program.kv_token_bytes(4)
    caches = (mtp.memory.blocks[0] + 2 * spare_blocks(16)) * block_bytes
    assert caches < taken[1] - taken[0] <= mtp.memory.draft_bytes
    assert mtp.memory.total_bytes - off.memory.total_bytes >= mtp.memory.draft_bytes


def test_arrays_of_passes_are_counted() -> None:
    """Also hidden states on their way to a pass, here of a wide model, beside its sampling."""
    program, layer, weights = programs("glm4_moe", hidden_size=2048)
    backend: Any = on_gpu(program, layer, weights, shared=True)
    before, count = backend._accelerator.num_bytes, 40
    backend._drafts._passes._memory.put(_row(layer, count, count, 16))
    device = CudaDevice(backend._accelerator, "interpreted")
    plan = plan_weights(device, layer, None, None, all_in("f32"))
    others = MEMORY_BYTES + sampling_bytes(layer.output.width, count)
    assert backend._accelerator.num_bytes - before <= device.step_bytes(layer, plan, count) - others


def test_hidden_states_that_do_not_fit(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=model, device="cuda-interpreted", max_model_len=64, speculative="mtp")
    describe(config)
    monkeypatch.setattr(drafts_module, "available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="hidden states of all cached tokens take"):
        describe(config)
    describe(replace(config, speculative=model))


@pytest.mark.parametrize("format", ["bf16", "int8"])
@pytest.mark.parametrize("name", [name for name in predicted.FAMILIES if name not in REFUSED])
def test_every_launch_of_a_layer_was_compiled(name: str, format: str) -> None:
    layer = programs(name)[1]
    layout = plan_layout(layer, {n: weight.storage for n, weight in stored(layer, format).items()})
    capacity = Capacity([8, 0], 16, "bfloat16", SLOTS)
    require_compiled(layer, layout, capacity, InterpretedAccelerator())


def test_launches_of_a_layer_are_looked_up(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=model, device="cuda-interpreted", max_model_len=64, speculative="mtp")
    monkeypatch.setattr(
        InterpretedAccelerator, "has_kernel", lambda _, key: not key.startswith("join_columns")
    )
    describe(replace(config, speculative="off"))
    with pytest.raises(ConfigError, match="no kernel join_columns"):
        describe(config)
