"""The native implementation of the Backend protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire.backends.backend import GetMasks, LaunchedStep
from quire.backends.block_memory import BlockMemory, layout_of
from quire.backends.draft_model import DraftModel, shared_table, spare_blocks
from quire.backends.native import _core
from quire.backends.native.adapters import pack_adapter
from quire.backends.native.caches import NativeCaches, allocate
from quire.backends.native.lower import Lowering, Matrices, Vectors
from quire.backends.native.sampling import row_results, slot_params
from quire.backends.slot_images import UnseenImages, patches_of, windows_of
from quire.backends.slots import Deferred, Slots
from quire.errors import ConfigError
from quire.images.positions import RotaryPositions
from quire.images.vision import Vision
from quire.program.batch import Batch
from quire.program.passes import gather_products
from quire.program.program import LowRank, Program
from quire.types import Draft, Failure, RowResult, Step, StepResult


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
        nodes: _core.Nodes,
        max_num_seqs: int = 64,
        num_snapshots: int = 0,
        ahead: bool = False,
        draft: DraftModel[tuple[Matrices, Vectors]] | None = None,
        vision: Vision | None = None,
    ) -> None:
        self.program = gather_products(program)
        try:
            self._native, self._nodes = _core.Native(isa, nodes), nodes
        except RuntimeError as error:
            hint = "lower num_threads, or raise the limit of processes (ulimit -u, or that of the container)"
            raise ConfigError(f"{nodes.num_threads} threads cannot be started: {error}", hint) from error
        caches = allocate(
            self.program,
            kv_dtype=kv_cache_dtype,
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=max_num_seqs,
            num_snapshots=num_snapshots,
            nodes=nodes,
        )
        self._memory, self._drafted_group = caches.memory, -1
        specs, layers = self.program.cache_groups, self.program.layer_groups
        self._layout = layout_of(self.name, kv_cache_dtype, block_size, specs, layers)
        lowering = Lowering(self._native, self.program, matrices, vectors, caches)
        self._output, self._hidden, self._width = lowering.output, lowering.hidden, program.output.width
        self._sites, self._adapters = lowering.sites, dict[str, _core.Adapter]()
        self._ropes = [(self._native, table, rope) for rope, table in lowering.ropes.items()]
        self._steps = _core.Steps(self._native, self._output, max_num_seqs, len(num_blocks), self._width)
        # Vectors are results as they are, so steps of pooled programs need nothing of the core's sampling.
        self._pooled = Slots(self._width, block_size, len(num_blocks)) if program.pooled else None
        if draft is not None:
            shared = draft.weights or (matrices, vectors)
            self._draft_with(draft, shared, num_blocks, block_size, kv_cache_dtype, isa, max_num_seqs)
        self._vision, self._unseen = vision, UnseenImages()
        if vision is not None:
            self._see_with(vision, matrices, vectors, kv_cache_dtype, isa)
        self._ahead = ahead
        self._num_deferred = 0
        self._variants: set[int] = set()
        self.isa = isa
        self.num_threads = nodes.num_threads

    def _draft_with(
        self,
        draft: DraftModel[tuple[Matrices, Vectors]],
        weights: tuple[Matrices, Vectors],
        num_blocks: Sequence[int],
        block_size: int,
        kv_dtype: str,
        isa: str,
        num_slots: int,
    ) -> None:
        """Record the draft model, with caches of its own, beside the program."""
        table, spare = shared_table(self.program, draft.program), spare_blocks(block_size)
        self._drafted_group = table.group
        own_blocks, groups = num_blocks[table.group], len(draft.program.cache_groups)
        program = gather_products(draft.program)
        caches = allocate(
            program,
            kv_dtype=kv_dtype,
            num_blocks=[own_blocks + num_slots * spare] * groups,
            block_size=block_size,
            num_slots=0,
            num_snapshots=0,
            nodes=self._nodes,
        )
        native = _core.Native(isa, self._native)
        lowering = Lowering(native, program, *weights, caches)
        self._ropes += [(native, number, rope) for rope, number in lowering.ropes.items()]
        self._steps.draft_with(
            native,
            output=lowering.output,
            width=program.output.width,
            groups=groups,
            group=table.group,
            window=table.window or 0,
            reach=table.reach or 0,
            blocks=own_blocks,
            block_size=block_size,
            spare=spare,
            max_tokens=draft.max_tokens,
            max_len=draft.max_len,
            hidden=draft.hidden_width,
            given=self._hidden,
            own=lowering.hidden,
        )

    def _see_with(
        self, vision: Vision, matrices: Matrices, vectors: Vectors, kv_cache_dtype: str, isa: str
    ) -> None:
        """Record the vision tower beside the program, with the cache's precision in its attention."""
        program = gather_products(vision.program)
        native = _core.Native(isa, self._native)
        caches = NativeCaches({}, {}, BlockMemory([]), halves=kv_cache_dtype in ("bfloat16", "int8"))
        lowering = Lowering(native, program, matrices, vectors, caches)
        self._steps.see_with(native, lowering.output, program.output.width)

    def launch(self, step: Step, masks: GetMasks | None = None) -> LaunchedStep:
        """See Backend.launch.

        Steps computed ahead run in a thread of the core. A step with masks, which Python computes, does not,
        nor does any later step until it was collected: these run in the thread that collects them.
        """
        if (pooled := self._pooled) is not None:
            return Deferred(lambda: pooled.run(step, self.execute, masks))
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
        if step.num_proposed:
            plan.num_proposed = step.num_proposed
        if step.released:
            plan.release(step.released)
        for grant in step.granted:
            plan.grant(*grant)
        if step.admitted:
            self._admit(step, plan)
        if self._vision is not None:
            for slot, image, share, begun in self._unseen.encodings(step):
                patches = None if begun else patches_of(self._vision, image)
                where = image.first, image.rows, image.columns, image.gap
                windows = windows_of(self._vision, image)
                plan.show(slot, *where, image.whole, share, patches, *windows)
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
                for native, table, rope in self._ropes:
                    plan.frequencies(native, table, variant, rope.frequencies(variant))
                self._variants.add(variant)
            params = slot_params(admission, self._width)
            adapter = self._adapters[admission.adapter] if admission.adapter else None
            plan.admit(admission.slot, variant, brought[admission.slot], params, adapter)
            if admission.images:
                positions = RotaryPositions.of(admission.images)
                plan.rotate(admission.slot, positions.known.reshape(-1), positions.shift)

    def _run(self, plan: _core.Step, masks: GetMasks | None) -> StepResult:
        self._steps.forward(plan)
        found = masks() if masks is not None else {}
        failed = {row: own for row, own in found.items() if isinstance(own, Failure)}
        bits: list[tuple[int, Sequence[Any]]] = [
            (row, () if isinstance(own, Failure) else own) for row, own in found.items()
        ]
        self._steps.sample(plan, bits)
        self._num_deferred -= 1
        result = _result(plan)
        if not failed:
            return result
        rows = (RowResult(error=failed[i]) if i in failed else row for i, row in enumerate(result.rows))
        return replace(result, rows=tuple(rows))

    def add_adapter(self, adapter: str, parts: Mapping[str, LowRank]) -> None:
        self._adapters[adapter] = pack_adapter(parts, self._sites, self.isa)

    def drop_adapter(self, adapter: str) -> None:
        del self._adapters[adapter]

    def block_layout(self) -> str:
        return self._layout

    def block_bytes(self, group: int) -> int:
        return self._memory.num_bytes[group]

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        return self._memory.read(group, block_ids)

    def write_blocks(
        self, group: int, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]
    ) -> None:
        self._memory.write(group, block_ids, contents)
        if group == self._drafted_group:
            self._steps.forget_drafted(block_ids)

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
            [self._adapters.get(admission.adapter) for admission in batch.admissions],
            batch.visible_ends,
        )

    def _add_frequencies(self, batch: Batch) -> None:
        """Pass the rope frequencies of new context variants to the core."""
        for variant in set(batch.variants.tolist()) - self._variants:
            for native, table, rope in self._ropes:
                native.frequencies(table, variant, rope.frequencies(variant))
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
    times = (
        plan.began_s,
        plan.ended_s,
        plan.mask_s,
        plan.sampling_s,
        plan.core_wait_s,
        plan.draft_s,
        plan.image_s,
    )
    rows = row_results(plan.results)
    if proposed := plan.proposed:
        drafts = [(Draft(tuple(token_ids), "model"),) if token_ids else () for token_ids in proposed]
        rows = tuple([row._replace(drafts=more) for row, more in zip(rows, drafts, strict=True)])
    return StepResult(rows, *times)
