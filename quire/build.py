"""Build an engine from an EngineConfig, and record what was chosen for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire import __version__
from quire.backends.backend import Backend, Capacity
from quire.backends.device import Device, device_for, kv_dtype, plan_weights
from quire.cache_plan import SNAPSHOT_TOKENS
from quire.config import EngineConfig
from quire.engine.caches import BlockGroup, Group, StateGroup
from quire.engine.engine import Engine, request_limits
from quire.engine.scheduler import Scheduler
from quire.engine.status import Facts
from quire.errors import ConfigError
from quire.memory import MemoryPlan, gigabytes, misfit, plan_memory, summary
from quire.models import Model, read_model
from quire.program.passes import fuse
from quire.program.program import Program
from quire.runner.masks import GrammarSource
from quire.runner.runner import Runner
from quire.text.tokenizer import need_tokenizer
from quire.weights.hub import open_model
from quire.weights.load import has_own_head
from quire.weights.plan import WeightPlan
from quire.weights.source import ModelSource

DTYPE_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

Progress = Callable[[int, int], None]  # (bytes done, bytes in total)
Announce = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Description:
    """A model on this machine, before its weights are loaded: what `quire inspect` shows.

    `longest_context` is the maximum number of tokens of a sequence, memory permitting.
    """

    config: EngineConfig
    source: ModelSource
    model: Model
    program: Program
    device: Device
    weights: WeightPlan
    kv_dtype: str  # of cached keys and values: float32, float16, bfloat16 or int8
    memory: MemoryPlan
    longest_context: int
    weights_here: bool
    own_head: bool  # config.json ties the head to the embedding, but the checkpoint has one, which is used

    @property
    def fingerprint(self) -> str:
        """Identify everything that determines the bits of an answer."""
        weights = self.config.quantization or "stored"
        return f"quire-{__version__}-{self.device.arithmetic}-{weights}-{self.kv_dtype}"


@dataclass(frozen=True, slots=True)
class Built:
    """An engine ready to run, and a readable record of what was chosen for it."""

    description: Description
    engine: Engine
    runner: Runner
    backend: Backend
    chosen: dict[str, str] = field(default_factory=dict)

    @property
    def facts(self) -> Facts:
        """Return the facts for the clients of the engine."""
        limits = request_limits(self.engine.scheduler, self.engine.vocab_size)
        return Facts(self.chosen, limits, self.description.longest_context, self.description.fingerprint)


def describe(config: EngineConfig, *, weights: bool = True) -> Description:
    """Read everything about a model except its weights. Raises ConfigError for anything invalid.

    Without `weights` the weight files may be missing (the number format is then that of config.json), and
    those of a hub model are not downloaded.
    """
    source = open_model(config.model, config.revision, weights=weights)
    raw = source.config()
    model = read_model(raw)
    _check_length(config, model)
    tensors = source.tensors() if weights or source.has_weights else None
    tied = model.tied_tensor
    own_head = tensors is not None and tied is not None and has_own_head(tensors, tied)
    if own_head:
        model = read_model({**raw, "tie_word_embeddings": False})
    program = fuse(model.program)
    stated = DTYPE_NAMES.get(str(raw.get("dtype") or raw.get("torch_dtype")), "bf16")
    device = device_for(config)
    plan = plan_weights(device, program, tensors, config.quantization, stated)
    longest = config.max_model_len or model.max_context
    return Description(
        config=config,
        source=source,
        model=model,
        program=program,
        device=device,
        weights=plan,
        kv_dtype=kv_dtype(device, config.kv_cache_dtype, plan.floats),
        memory=plan_memory(device, program, plan, config, longest),
        longest_context=longest,
        weights_here=source.has_weights,
        own_head=own_head,
    )


def _check_length(config: EngineConfig, model: Model) -> None:
    longest = model.max_context
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len = {config.max_model_len:,}, but the model was made for {longest:,} positions",
            f"give at most {longest:,}",
        )


def build(config: EngineConfig, progress: Progress | None = None, announce: Announce | None = None) -> Built:
    """Load a model and assemble its engine.

    `announce` is called before loading, with a summary of the memory plan and the bytes of weights;
    `progress` is called with bytes loaded.
    """
    description = describe(config)
    memory = description.memory
    if (error := misfit(memory, config, description.device)) is not None:
        raise error
    if announce is not None:
        announce(summary(memory), memory.working_bytes)
    steps_in_flight = config.max_steps_in_flight or 1
    capacity = Capacity(
        num_blocks=memory.blocks,
        block_size=config.block_size,
        kv_dtype=description.kv_dtype,
        max_num_seqs=config.max_num_seqs,
        num_snapshots=memory.num_snapshots,
        max_steps_in_flight=steps_in_flight,
    )
    backend = description.device.build(description.program, description.weights, capacity, progress)
    description.weights.need_tensors().close()
    scheduler = make_scheduler(config, memory)
    vocab_size = description.model.config.vocab_size
    runner = Runner(backend, lambda: _grammars(description))
    engine = Engine(scheduler, runner, vocab_size=vocab_size)
    return Built(description, engine, runner, backend, _chosen(description))


def make_scheduler(config: EngineConfig, memory: MemoryPlan) -> Scheduler:
    """Return the scheduler of an engine with this configuration and cache."""
    return Scheduler(
        groups=_groups(memory),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_prefill_tokens=config.max_num_prefill_tokens,
        itl_goal_s=config.itl_goal,
        max_model_len=memory.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=config.scheduling_policy,
        max_steps_in_flight=config.max_steps_in_flight or 1,
    )


def _groups(memory: MemoryPlan) -> list[Group]:
    """Return the cache groups in the form the scheduler takes."""
    sizing = memory.sizing
    every = max(1, SNAPSHOT_TOKENS // sizing.block_size)
    return [
        BlockGroup(num_blocks, group.window) if group.block_bytes else StateGroup(memory.num_snapshots, every)
        for num_blocks, group in zip(memory.blocks, sizing.groups, strict=True)
    ]


def _grammars(description: Description) -> GrammarSource:
    """Load the grammars, for the first request that has one: this takes time and memory."""
    from quire.grammar import grammars

    tokenizer = need_tokenizer(description.source)
    return grammars.Grammars(tokenizer, description.model.config.vocab_size)


def _chosen(description: Description) -> dict[str, str]:
    config, memory = description.config, description.memory
    chosen = {
        "model": config.model,
        "architecture": description.model.architecture,
        "backend": description.device.name,
        "weights": config.quantization or "as stored",
        "kv_cache_dtype": description.kv_dtype,
        "kv_cache_tokens": f"{memory.num_tokens:,}",
        "kv_cache_memory": f"{gigabytes(memory.kv_bytes)} ({memory.kv_reason})",
        "max_model_len": f"{memory.max_model_len:,}",
        "memory": gigabytes(memory.total_bytes),
    }
    if description.own_head:
        chosen["output_matrix"] = "lm_head.weight, though config.json ties it to the embedding"
    return chosen | {name: str(fact) for name, fact in description.device.facts().items()}
