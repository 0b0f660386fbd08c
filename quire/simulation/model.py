"""A model to simulate: on this machine, or on one of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.backends.device import without_gpu
from quire.build import make_scheduler
from quire.config import EngineConfig
from quire.description import Description, describe
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import StepLaw
from quire.errors import ConfigError
from quire.memory import MemoryPlan
from quire.roofline.law import fold_costs, law_at_the_roof
from quire.roofline.machines import find
from quire.roofline.plan import MachinePlan
from quire.roofline.planning import make_plan
from quire.roofline.probe import Ceilings, ceilings


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model on this machine, or on `plan`'s of the catalogue, and its cache."""

    config: EngineConfig
    description: Description
    memory: MemoryPlan
    plan: MachinePlan | None = None

    @classmethod
    def of(cls, config: EngineConfig, machine: str | None) -> SimulatedModel:
        """Describe a model. Raises ConfigError where it does not fit the machine."""
        description = describe(config if machine is None else without_gpu(config), weights=False)
        if machine is None:
            return cls(config, description, description.memory)
        plan = make_plan(config, find(machine), described=description)
        if not plan.fit.fits:
            needed = plan.fit.cards(plan.machine)
            raise ConfigError(
                f"{config.model} does not fit {plan.machine.name}", f"it needs {needed} such devices"
            )
        longest, sizing = plan.fit.longest, plan.fit.sizing
        blocks = sizing.fit(int(plan.fit.free_bytes), config.max_num_seqs, longest, longest)
        length = config.max_model_len or sizing.longest(blocks, longest)
        memory = replace(description.memory, blocks=blocks, max_model_len=length)
        return cls(config, description, memory, plan)

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of the blocks of a prompt in all cache groups, for each token."""
        return self.memory.kv_block_bytes / self.config.block_size

    def scheduler(self, law: StepLaw) -> Scheduler:
        """Return a fresh scheduler, which knows the law of steps if it has a goal, and drafts nothing."""
        scheduler = make_scheduler(replace(self.config, speculative="off"), self.memory)
        if self.config.itl_goal is not None:
            scheduler.calibrate(law if law.tail else law._replace(tail=1.0))
        return scheduler

    def ceilings(self) -> Ceilings:
        return ceilings(self.description.device.loops())

    def roof(self) -> StepLaw:
        """Return the law at the ceilings of this machine, or at the peaks of the other one."""
        if self.plan is not None:
            return self.plan.law
        return law_at_the_roof(fold_costs(self.description), self.ceilings())
