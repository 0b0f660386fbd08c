"""The native implementation of the Backend protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.backends.backend import GetMasks, LaunchedStep
from quire.backends.native import _core
from quire.backends.native.caches import allocate
from quire.backends.native.lower import Lowering, Matrices, Vectors
from quire.backends.native.sampling import row_results, slot_params
from quire.backends.slots import Deferred
from quire.program.batch import Batch
from quire.program.passes import gather_products
from quire.program.program import Program
from quire.types import Failure, RowResult, Step, StepResult


class NativeBackend:
    """Runs a program with the kernels of one instruction set. Bits depend on it, not on threads.

    With `ahead`, steps compute as soon as they are launched; otherwise when they are collected.
    """

    name = "native"

    def __init__(
        self,
        program: Program,
        matrices: Matrices,
        vectors: Vectors,
        *,
        num_blocks: Sequence[int],
        block_size: int,
        kv_cache_dtype: str,
        isa: str,
        num_threads: int,
        max_num_seqs: int = 64,
        num_snapshots: int = 0,
        ahead: bool = False,
    ) -> None:
        self.program = gather_products(program)
        self._native = _core.Native(isa, num_threads)
        caches = allocate(
            self.program,
            kv_dtype=kv_cache_dtype,
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=max_num_seqs,
            num_snapshots=num_snapshots,
        )
        lowering = Lowering(self._native, self.program, matrices, vectors, caches)
        self._output, self._width = lowering.output, program.output.width
        self._ropes = lowering.ropes
        self._steps = _core.Steps(self._native, self._output, max_num_seqs, len(num_blocks), self._width)
        self._ahead = ahead
        self._num_deferred = 0
        self._variants: set[int] = set()
        self.isa = isa
        self.num_threads = num_threads

    def launch(self, step: Step, masks: GetMasks | None = None) -> LaunchedStep:
        """See Backend.launch.

        Steps computed ahead run in a thread of the core. A step with masks, which Python computes, does not,
        nor does any later step until it was collected: these run in the thread that collects them.
        """
        plan = self._plan(step)
        if masks is None and self._ahead and not self._num_deferred:
            self._steps.launch(plan)
            return _Ahead(self._steps, plan)
        self._num_deferred += 1
        return Deferred(lambda: self._run(plan, masks))

    def _plan(self, step: Step) -> _core.Step:
        slots, starts, counts, _, samples, logits, drafted = zip(*step.rows, strict=True)
        plan = _core.Step(slots, starts, counts, logits, samples)
        if any(drafted):
            for row, token_ids in enumerate(drafted):
                plan.draft(row, token_ids)
        if step.released:
            plan.release(step.released)
        for grant in step.granted:
            plan.grant(*grant)
        if step.admitted:
            self._admit(step, plan)
        if step.restored:
            plan.restore(step.restored)
        if step.saved:
            plan.save(step.saved)
        return plan

    def _admit(self, step: Step, plan: _core.Step) -> None:
        brought = {row.slot: row.token_ids for row in step.rows}
        for admission in step.admitted:
            variant = admission.context_variant
            if variant not in self._variants:
                for rope, table in self._ropes.items():
                    plan.frequencies(self._native, table, variant, rope.frequencies(variant))
                self._variants.add(variant)
            params = slot_params(admission, self._width)
            plan.admit(admission.slot, variant, brought[admission.slot], params)

    def _run(self, plan: _core.Step, masks: GetMasks | None) -> StepResult:
        self._steps.forward(plan)
        found = masks() if masks is not None else {}
        failed = {row: mask for row, mask in found.items() if isinstance(mask, Failure)}
        bits = [(row, [] if isinstance(mask, Failure) else [mask]) for row, mask in found.items()]
        self._steps.sample(plan, bits)
        self._num_deferred -= 1
        result = _result(plan)
        if not failed:
            return result
        rows = (RowResult(error=failed[i]) if i in failed else row for i, row in enumerate(result.rows))
        return replace(result, rows=tuple(rows))

    def execute(self, batch: Batch) -> np.ndarray:
        """Return the logits [L, vocab] of the batch's logit rows; the next call overwrites them."""
        self._add_frequencies(batch)
        return self._native.run(
            batch.token_ids,
            batch.positions,
            batch.row_offsets,
            batch.block_tables,
            batch.slots,
            batch.variants,
            batch.logit_rows,
            batch.restored,
            batch.saved,
            self._output,
            self._width,
        )

    def _add_frequencies(self, batch: Batch) -> None:
        """Pass the rope frequencies of new context variants to the core."""
        for variant in set(batch.variants.tolist()) - self._variants:
            for rope, table in self._ropes.items():
                self._native.frequencies(table, variant, rope.frequencies(variant))
            self._variants.add(variant)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A step that computes in the core's own thread."""

    steps: _core.Steps
    plan: _core.Step

    def result(self) -> StepResult:
        self.steps.wait(self.plan)
        return _result(self.plan)


def _result(plan: _core.Step) -> StepResult:
    times = plan.began_s, plan.ended_s, plan.mask_s, plan.sampling_s, plan.core_wait_s
    return StepResult(row_results(plan.results), *times)
