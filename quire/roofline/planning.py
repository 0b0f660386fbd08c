"""Make plans: describe a model, fold its costs, and take the rates of a machine."""

from __future__ import annotations

from dataclasses import replace

from quire.backends.device import without_gpu
from quire.backends.kv_cache import KV_ITEM_BYTES, KV_SCALE_BYTES
from quire.config import EngineConfig
from quire.description import Description, describe
from quire.program import ops
from quire.program.passes import plan_buffers
from quire.program.program import Load, Op
from quire.roofline.folded import FoldedCost, fold
from quire.roofline.law import fold_costs
from quire.roofline.machines import Machine, this_machine
from quire.roofline.plan import Fit, MachinePlan
from quire.roofline.probe import ceilings
from quire.roofline.shares import typical_law


def make_plan(
    config: EngineConfig, machine: Machine | None = None, cards: int = 1, described: Description | None = None
) -> MachinePlan:
    """Plan a model for a machine of the catalogue, or for this one at its ceilings.

    The ceilings are measured first if there are none in the cache. `described` saves describing the model
    again. Raises ConfigError for a model that cannot be described.
    """
    elsewhere = machine is not None and machine.measured is None
    description = described or describe(without_gpu(config) if elsewhere else config, weights=False)
    memory = description.memory
    if machine is None:
        device = description.device
        machine = this_machine(ceilings(device.loops()), memory.available_bytes)
    own = machine.kind == "cpu"
    folded = fold_costs(description) if own else _fold_for_gpu(description)
    weights = memory.working_bytes if own else memory.weight_bytes
    values = memory.activation_bytes if own else _step_bytes(description)
    fit = Fit(machine.memory_bytes * cards, weights, values, memory.sizing, description.longest_context)
    layers = len(description.program.caches)
    law = typical_law(folded, machine, cards, layers=layers)
    return MachinePlan(description, machine, cards, law, fit)


def with_options(plan: MachinePlan, **options: object) -> MachinePlan:
    """Return the plan with other options of its configuration."""
    config = replace(plan.config, **options)  # type: ignore[arg-type]
    return make_plan(config, plan.machine, plan.cards)


def _fold_for_gpu(description: Description) -> FoldedCost:
    """Fold the costs as a GPU computes: quantized activations meet int8, all else is in 16 bits.

    int4 weights are expanded to 16 bits for their products: that is what its kernels do.
    """
    weights, kv_dtype = description.weights, description.kv_dtype

    def arithmetic(op: Op) -> str:
        if not isinstance(op, ops.Linear | ops.GatedLinear | ops.Experts):
            return "bf16"
        return "int8" if weights.storage[op.weights()[0].name].kind == "int8" else "bf16"

    return fold(
        description.program,
        weights.stored_bytes,
        kv_itemsize=KV_ITEM_BYTES[kv_dtype],
        kv_scale_bytes=KV_SCALE_BYTES.get(kv_dtype, 0),
        arithmetic=arithmetic,
    )


def _step_bytes(description: Description) -> int:
    config = description.config
    tokens = config.max_num_batched_tokens
    load = Load(((0, tokens),), min(tokens, config.max_num_seqs))
    return plan_buffers(description.program).nbytes(load)
