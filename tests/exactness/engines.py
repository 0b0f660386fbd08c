"""Engines on tiny models: the models and formats of rounds, and the settings that must not change outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from lowered import ISAS, plain, scheme, tensors
from test_engine_caches import mixed
from test_native_exactness import model_of
from tiny import CONFIGS, VOCAB, random_weights

from exactness.asked import Dice
from exactness.automata import Automata
from quire.backends.backend import Backend, Capacity
from quire.backends.device import plan_weights
from quire.backends.draft_model import DraftModel, shared_table
from quire.backends.native.device import NativeDevice
from quire.backends.reference import ReferenceDevice
from quire.engine.caches import BlockGroup, Group, StateGroup
from quire.engine.drafter import Drafter
from quire.engine.engine import Engine
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import Stage, StepLaw
from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Program, SlotState
from quire.program.features import LEADING
from quire.program.passes import fuse
from quire.runner.runner import Runner
from quire.weights.plan import WeightPlan, all_in

SHORT, LONG = 96, 1100  # tokens of a sequence at most; attention computes more than 512 in several parts
DRAFT_MODELS = {"": "", "the model itself": "", "another": "qwen3", "smaller": "llama", "larger": "llama"}
TINY = (
    "llama",
    "gemma3",
    "mistral",
    "qwen3_moe",
    "gpt_oss",
    "gpt2",
    "hybrid",
    "llama-dynamic",
    "phi3-longrope",
)


@dataclass(frozen=True)
class Kind:
    """The choices that decide the bits: a model, its numbers and, if native, the instruction set."""

    model: str
    device: str = "reference"
    format: str = "f32"
    kv_dtype: str = "float32"
    isa: str = ISAS[0]
    longest: int = SHORT


@dataclass(frozen=True)
class Settings:
    """The choices that must not change outputs.

    `room`: blocks as a multiple of those that one sequence needs at most. `drafts`: "off", "chosen" by the
    scheduler's rule, or "all" that are offered, as far as there is room. `draft_model`: one of DRAFT_MODELS.
    """

    block_size: int = 16
    room: float = 8.0
    budget: int = 256
    max_num_seqs: int = 8
    in_flight: int = 1
    threads: int = 1
    cached: bool = True
    policy: str = "fcfs"
    spare: int = 1
    snapshots: int = 8
    every: int = 1
    drafts: Literal["off", "chosen", "all"] = "all"
    draft_model: str = ""
    itl_goal_s: float | None = None


def draw_kind(dice: Dice, devices: tuple[str, ...]) -> Kind:
    """Draw a model; those in few bits are wide enough for several panels of weights."""
    device = dice.choice(devices)
    if device == "reference":
        return Kind(dice.choice(TINY), device, kv_dtype=dice.choice(["float32", "float16"]))
    kv_dtype = dice.choice(["float32", "bfloat16", "int8", "int8"])
    isa = dice.choice([ISAS[0], ISAS[0], *ISAS])
    if dice.chance(0.6):
        return Kind(dice.choice(TINY), device, "f32", kv_dtype, isa)
    wide, format = dice.choice(["wide", "wide-experts"]), dice.choice(["int8", "int4", "bf16"])
    return Kind(wide, device, format, kv_dtype, isa, dice.choice([SHORT, SHORT, SHORT, LONG]))


def draw_settings(dice: Dice, threads: tuple[int, ...]) -> Settings:
    """Draw settings; a third of them have so few blocks that sequences are preempted."""
    return Settings(
        block_size=dice.choice([8, 16, 32]),
        room=dice.choice([1.0, 1.7, 8.0, 8.0, 8.0, 8.0]),
        budget=dice.choice([9, 17, 40, 64, 256, 256]),
        max_num_seqs=dice.choice([1, 3, 8, 8]),
        in_flight=dice.choice([1, 2]),
        threads=dice.choice(threads),
        cached=dice.chance(0.8),
        policy=dice.choice(["fcfs", "fcfs", "priority", "fair"]),
        spare=dice.choice([0, 1]),
        snapshots=dice.choice([2, 8, 30]),
        every=dice.choice([1, 4]),
        draft_model=dice.choice(["", *DRAFT_MODELS]),
        itl_goal_s=dice.choice([None, None, 0.02]),
    )


def draw_law(dice: Dice) -> StepLaw:
    """Draw a law of steps whose weights take some time, and each token a share of it."""
    weights_s, share = dice.choice([1e-4, 3e-3, 0.05]), dice.choice([0.0, 0.02, 0.3])
    stage = Stage((weights_s, 0.0, 0.0, 0.0), (0.0, 0.0, 3 * share * weights_s, 0.0))
    overhead = (dice.choice([0.0, weights_s]), 0.0, share * weights_s, 0.0)
    return StepLaw(LEADING, (stage,), overhead, (stage,), dice.choice([0.0, 1e-4]), tail=1.0)


@cache
def program_of(model: str) -> Program:
    """Return the program of a model, as both backends take it."""
    return plain(mixed()) if model == "hybrid" else plain(fuse(model_of(model).program))


def context_variant(model: str, num_tokens: int) -> int:
    return 0 if model == "hybrid" else model_of(model).context_variant(num_tokens)


@cache
def draft_program(model: str, draft_model: str) -> Program:
    """Return the program of a draft model for a model; its vocabulary may be smaller or larger."""
    name = DRAFT_MODELS[draft_model]
    if not name:
        return program_of(model)
    size = {"smaller": VOCAB - 8, "larger": VOCAB + 8}.get(draft_model, VOCAB)
    return plain(fuse(read_model({**CONFIGS[name], "vocab_size": size}).program))


def may_draft(model: str, draft_model: str) -> bool:
    """Return True if a draft model can share the block tables of a model."""
    try:
        shared_table(program_of(model), draft_program(model, draft_model))
    except ConfigError:
        return False
    return True


def new_backend(kind: Kind, capacity: Capacity, settings: Settings) -> Backend:
    """Load the random weights of a model, and of its draft model, into its device."""
    device: Any = ReferenceDevice()
    if kind.device == "native":
        device = NativeDevice("test", num_threads=settings.threads, packed_cache=False)
        device.isa = kind.isa

    def weights(program: Program) -> WeightPlan:
        checkpoint = tensors(random_weights(program), kind.format)
        return plan_weights(device, program, checkpoint, scheme(kind.format), all_in("bf16"))

    program, draft = program_of(kind.model), None
    if settings.draft_model and may_draft(kind.model, settings.draft_model):
        drafting = draft_program(kind.model, settings.draft_model)
        draft = DraftModel(drafting, weights(drafting), settings.budget, kind.longest)
    return device.build(program, weights(program), capacity, draft=draft)


def new_engine(kind: Kind, settings: Settings, drafter: Drafter | None = None) -> Engine:
    """Return an engine with these settings."""
    specs, size = program_of(kind.model).cache_groups, settings.block_size
    needed = -(-kind.longest // size) + 1
    blocks = [0 if isinstance(spec, SlotState) else int(settings.room * needed) for spec in specs]
    capacity = Capacity(
        blocks, size, kind.kv_dtype, settings.max_num_seqs, settings.snapshots, settings.in_flight
    )
    backend = new_backend(kind, capacity, settings)
    runner = Runner(backend, lambda: Automata(VOCAB), drafts=settings.drafts != "off")
    groups: list[Group] = [
        StateGroup(settings.snapshots, settings.every)
        if isinstance(spec, SlotState)
        else BlockGroup(count, spec.window)
        for spec, count in zip(specs, blocks, strict=True)
    ]
    scheduler = Scheduler(
        groups=groups,
        block_size=size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.budget,
        max_model_len=kind.longest,
        enable_prefix_caching=settings.cached,
        policy=settings.policy,
        num_spare_blocks=settings.spare,
        max_steps_in_flight=settings.in_flight,
        speculation=settings.drafts == "chosen",
        draft_model=bool(settings.draft_model) and may_draft(kind.model, settings.draft_model),
        itl_goal_s=settings.itl_goal_s,
    )
    return Engine(scheduler, runner, vocab_size=VOCAB, drafter=drafter)
