"""Build an engine from an EngineConfig, and record what was chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.adapters import Adapters
from quire.backends.backend import Backend
from quire.backends.device import Device
from quire.cache_plan import SNAPSHOT_TOKENS
from quire.config import EngineConfig
from quire.description import Description, describe
from quire.engine.caches import BlockGroup, Group, StateGroup
from quire.engine.engine import Engine, request_limits
from quire.engine.scheduler import Scheduler
from quire.engine.status import Facts
from quire.errors import ConfigError
from quire.memory import MemoryPlan, gigabytes, misfit, summary
from quire.prefix_store import open_store, store_summary
from quire.roofline.calibrate import Calibration
from quire.roofline.folded import FoldedCost
from quire.roofline.law import fold_costs, fold_draft_costs, law_at_the_roof
from quire.roofline.meter import StepMeter
from quire.roofline.probe import Ceilings, cached, keep, measure
from quire.runner.masks import GrammarSource
from quire.runner.runner import Runner
from quire.speculate.text_drafter import TextDrafter
from quire.text.tokenizer import need_tokenizer
from quire.weights.kinds_report import in_a_line

Progress = Callable[[int, int], None]  # (bytes done, bytes in total)
Announce = Callable[[str, int], None]
Measuring = Callable[[], None]
CreateScheduler = Callable[..., Scheduler]


@dataclass(frozen=True, slots=True)
class Built:
    """An engine ready to run, and a readable record of what was chosen for it."""

    description: Description
    engine: Engine
    runner: Runner
    backend: Backend
    costs: FoldedCost
    drafter: TextDrafter | None  # none if nothing is to be drafted
    adapters: Adapters | None  # none if no folder of them is configured
    chosen: dict[str, str] = field(default_factory=dict)
    ceilings: Ceilings | None = None  # of this machine, if they are known

    @property
    def facts(self) -> Facts:
        """Return the facts for the clients of the engine."""
        described = self.description
        return Facts(
            self.chosen,
            request_limits(self.engine.scheduler, self.engine.vocab_size),
            described.longest_context,
            described.fingerprint,
            self.ceilings.by_name() if self.ceilings is not None else None,
            self.engine.scheduler.law,
            described.model_facts,
            self.costs.coefficients(),
            () if self.adapters is None else self.adapters.loaded,
        )


def build(
    config: EngineConfig,
    progress: Progress | None = None,
    announce: Announce | None = None,
    measuring: Measuring | None = None,
    create: CreateScheduler = Scheduler,
    available_bytes: int | None = None,
    num_sharing: int = 1,
    adapters: Mapping[str, str] | None = None,
) -> Built:
    """Load a model and assemble its engine.

    `announce` is called before loading, with a summary of the memory plan and the bytes of weights;
    `progress` is called with bytes loaded. With `measuring` the ceilings of this machine are measured if they
    are not in the cache, after a call of it. `create` makes the scheduler from its arguments.
    `available_bytes` of memory are planned with; by default all that is free. `num_sharing` engines of this
    machine share their weights. `adapters` are those to be loaded, folders by name, by default all.
    """
    described = describe(config, available_bytes=available_bytes, num_sharing=num_sharing)
    return assemble(described, progress, announce, measuring, create, adapters)


def assemble(
    description: Description,
    progress: Progress | None = None,
    announce: Announce | None = None,
    measuring: Measuring | None = None,
    create: CreateScheduler = Scheduler,
    chosen_adapters: Mapping[str, str] | None = None,
) -> Built:
    """Load the weights of a model and assemble its engine, as `build` does."""
    config, memory = description.config, description.memory
    if (error := misfit(memory, config, description.device)) is not None:
        raise error
    if announce is not None:
        announce(summary(memory), memory.working_bytes)
    ceilings = _ceilings(description.device, measuring)
    draft = description.draft
    backend = description.device.build(
        description.program,
        description.weights,
        description.capacity,
        progress,
        draft,
        description.model.vision,
    )
    for plan in (description.weights, *([draft.weights] if draft and draft.weights else [])):
        plan.need_tensors().close()
    adapters = Adapters.of(config, backend, description.program, chosen_adapters)
    scheduler = make_scheduler(config, memory, create)
    vocab_size = description.model.config.vocab_size
    drafter = None if config.speculative == "off" else TextDrafter()
    runner = Runner(backend, lambda: _grammars(description), drafts=drafter is not None)
    costs = fold_costs(description)
    meter = _meter(costs, fold_draft_costs(description), ceilings)
    engine = Engine(
        scheduler,
        runner,
        vocab_size=vocab_size,
        meter=meter,
        drafter=drafter,
        blocks=runner,
        store=open_store(description, backend.block_layout()),
        adapters=adapters,
    )
    chosen = _chosen(description)
    if adapters is not None:
        nbytes = sum(own.nbytes for own in adapters.loaded)
        chosen["adapters"] = f"{len(adapters.loaded)}, {gigabytes(nbytes)}"
    if ceilings is not None:
        chosen["ceilings"] = str(ceilings)
    return Built(description, engine, runner, backend, costs, drafter, adapters, chosen, ceilings)


def make_scheduler(
    config: EngineConfig, memory: MemoryPlan, create: CreateScheduler = Scheduler
) -> Scheduler:
    """Return the scheduler of an engine with this configuration and cache."""
    return create(
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
        speculation=config.speculative != "off",
        draft_model=memory.draft is not None,
    )


def _ceilings(device: Device, measuring: Measuring | None) -> Ceilings | None:
    """Return the ceilings of this machine from the cache or, with `measuring`, by measuring them."""
    try:
        loops = device.loops()
    except ConfigError:  # a device without ceilings
        return None
    found = cached(loops)
    if found is None and measuring is not None:
        measuring()
        found = keep(measure(loops))
    return found


def _meter(costs: FoldedCost, draft_costs: FoldedCost | None, ceilings: Ceilings | None) -> StepMeter:
    """Return a meter that begins with the laws assumed for these ceilings."""
    if ceilings is None:
        return StepMeter()
    calibration = Calibration(law_at_the_roof(costs, ceilings))
    draft_law = None if draft_costs is None else law_at_the_roof(draft_costs, ceilings)
    return StepMeter(calibration.law(), calibration, draft_law)


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
        "drafts": config.drafts,
    }
    chosen |= store_summary(config)
    if (draft := description.draft) is not None:
        name = "prediction layer" if draft.weights is None else Path(draft.name).name
        chosen["draft_model"] = f"{name}, {gigabytes(memory.draft_bytes)}"
    if (vision := description.model.vision) is not None:
        most = vision.patching.most_of_all
        chosen["images"] = f"{config.max_images} in a request, of up to {most:,} tokens"
    if description.no_gpu:
        chosen["gpu"] = f"not used: {description.no_gpu}"
    if description.own_head:
        chosen["output_matrix"] = "lm_head.weight, though config.json ties it to the embedding"
    if description.weights.summary:
        chosen["checkpoint"] = in_a_line(description.weights)
    if description.weights.notes:
        chosen["unused"] = "; ".join(description.weights.notes)
    return chosen | {name: str(fact) for name, fact in description.device.facts().items()}
