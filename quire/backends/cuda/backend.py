"""The cuda implementation of the Backend protocol: programs as launches on an accelerator."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.backends.backend import Capacity, GetMasks, LaunchedStep
from quire.backends.block_memory import layout_of
from quire.backends.cuda.accelerator import Accelerator, DeviceFault, HostCopy
from quire.backends.cuda.caches import DeviceCaches
from quire.backends.cuda.device_slots import DeviceSlot, DeviceSlots
from quire.backends.cuda.drafts import DeviceDrafts, DevicePasses, HandedOut, draft_caches
from quire.backends.cuda.draws import StepDraws
from quire.backends.cuda.graphs import DecodeGraphs, decode_batch
from quire.backends.cuda.images import DeviceImages, keeps_halves
from quire.backends.cuda.launch_list import Lowered
from quire.backends.cuda.lower import lower, step_memory
from quire.backends.cuda.sampler import DeviceSampler, DrawnRows
from quire.backends.cuda.slot_tables import SlotTables
from quire.backends.cuda.step_arrays import StepArrays
from quire.backends.cuda.weights import DeviceWeight
from quire.backends.draft_model import DraftModel, shared_table
from quire.backends.slots import Deferred, Slots, row_result
from quire.errors import ConfigError
from quire.images.vision import Vision
from quire.program.batch import Batch
from quire.program.program import LowRank, Program
from quire.types import Failure, RowResult, Step, StepResult


class CudaBackend:
    """Runs a program by launches on an accelerator. Bits depend on its kernels and their target alone.

    A step is computed and sampled there as soon as it is launched, and its results are copied to the host
    when it is collected. Rows with parameters that have no kernels are sampled on the host, by the definition
    in quire.sampling. `draft` proposes tokens, in caches of its own.
    """

    name = "cuda"

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, DeviceWeight],
        accelerator: Accelerator,
        capacity: Capacity,
        draft: DraftModel[Mapping[str, DeviceWeight]] | None = None,
        vision: Vision | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._caches = DeviceCaches(
            accelerator,
            program,
            capacity.num_blocks,
            capacity.block_size,
            capacity.kv_dtype,
            capacity.max_num_seqs,
            capacity.num_snapshots,
        )
        lowered = lower(program, weights, self._caches.layers, capacity.block_size, accelerator)
        self.program, self._launches, self._output = lowered.program, lowered.launches, lowered.output
        self._memory, self._adapters = step_memory(lowered, accelerator), lowered.adapters
        num_slots, self._vocab = capacity.max_num_seqs, program.output.width
        self._slots = DeviceSlots(
            accelerator, num_slots, capacity.num_blocks, self._vocab, capacity.block_size
        )
        self._sampler = DeviceSampler(accelerator, num_slots, self._vocab)
        self._drafts: DeviceDrafts | None = None
        if draft is not None:
            self._drafts = self._draft_with(draft, draft.weights or weights, lowered, capacity)
        self._graphs = DecodeGraphs(accelerator)
        self._images = None
        if vision is not None:
            halves = keeps_halves(capacity.kv_dtype)
            tower = lower(vision.program, weights, (), 1, accelerator, halves)
            memory = step_memory(tower, accelerator)
            self._images = DeviceImages(vision, tower.launches, tower.output, memory, accelerator)
        # Vectors of texts are results as they are: steps of pooled programs need nothing of the sampling.
        self._pooled = Slots(self._vocab, capacity.block_size, len(capacity.num_blocks))
        self._open: deque[_StepOnDevice] = deque()  # launched and not collected, in order
        self._ended_s = 0.0  # when the last step was collected
        name = self.name if accelerator.num_ranks == 1 else f"{self.name} on {accelerator.num_ranks}"
        self._layout = layout_of(
            name, capacity.kv_dtype, capacity.block_size, program.cache_groups, program.layer_groups
        )

    def _draft_with(
        self,
        draft: DraftModel[Any],
        weights: Mapping[str, DeviceWeight],
        target: Lowered,
        capacity: Capacity,
    ) -> DeviceDrafts:
        """Lower a draft model, with caches of its own, beside the program."""
        accelerator, tables = self._accelerator, self._slots.tables
        caches = draft_caches(accelerator, target.program, draft.program, capacity)
        lowered = lower(draft.program, weights, caches, capacity.block_size, accelerator)
        memory, shared = step_memory(lowered, accelerator), shared_table(target.program, draft.program)
        first_spare = capacity.num_blocks[shared.group]
        passes = DevicePasses(lowered, memory, accelerator, self._sampler, first_spare, capacity)
        return DeviceDrafts(draft, passes, accelerator, target, tables, capacity)

    def launch(self, step: Step, masks: GetMasks | None = None) -> LaunchedStep:
        """See Backend.launch.

        A step begins to compute behind the one before it, unless that must be collected first: because the
        host samples rows of it, waits for masks, says which drafted tokens are accepted, or draws others.
        """
        if self.program.pooled:
            return Deferred(lambda: self._pool(step))
        self._open.append(_StepOnDevice(self, step, masks))
        self._begin_steps()
        return self._open[-1]

    def _pool(self, step: Step) -> StepResult:
        """Return the vectors of a step's texts, or the error of each."""
        began_s = time.monotonic()
        try:
            return self._pooled.run(step, self.execute, None)
        except DeviceFault as fault:
            if not fault.works:
                raise
            rows = (RowResult(error=Failure(fault.message)),) * len(step.rows)
            return StepResult(rows, began_s, time.monotonic())

    def _begin_steps(self) -> None:
        for launched in self._open:
            if launched.begun is None:
                try:
                    launched.begun = self._begin(launched.step, launched.masks)
                except (ConfigError, DeviceFault) as error:
                    launched.begun = self._failed(error)
            if launched.begun.holds:
                return

    def _begin(self, step: Step, masks: GetMasks | None) -> _Begun:
        """Launch a step's forward pass, and its sampling unless that needs something of the host."""
        began_s, slots = time.monotonic(), self._slots.apply(step)
        if self._drafts is not None:
            self._drafts.apply(step)
        for admission in step.admitted:
            self._sampler.admit(admission.slot, self._slots.slot(admission.slot))
        batch, encoded = self._slots.batch(step), None
        if self._images is not None:
            encoded = self._images.apply(step)
            batch = self._images.place(step, batch)
        arrays = self._forward(batch, self._slots.tables)
        begun = _Begun(slots, arrays.values[self._output], began_s, encoded=encoded)
        if self._drafts is not None:
            begun.handed_out = self._drafts.begin_keeping(batch, arrays)
        begun.waits = masks is not None or any(slot.sampling is None for slot in slots)
        begun.holds = begun.waits or step.num_proposed > 0 or any(row.drafted for row in step.rows)
        if not begun.waits:
            self._sample(step, begun, {})
            begun.logits = None  # their memory is freed if a larger step comes before this one is collected
        return begun

    def _failed(self, error: ConfigError | DeviceFault) -> _Begun:
        """Return a step whose rows fail with an error. Raises it if the accelerator works no more."""
        if isinstance(error, DeviceFault) and not error.works:
            raise error
        self._slots.tables.forget()
        return _Begun([], None, time.monotonic(), holds=True, error=Failure(error.message))

    def _sample(self, step: Step, begun: _Begun, masks: Mapping[int, Sequence[Any] | Failure]) -> None:
        begun.draws = StepDraws(step, begun.slots, masks)
        begun.copy = self._sampler.launch(begun.draws, begun.logits)

    def _forward(self, batch: Batch, tables: SlotTables | None = None) -> StepArrays:
        """Launch the forward pass of a batch; return where its values will be.

        Those of a batch with rows of one token are followed by those of rows that were added.
        """
        self._caches.restores.launch(batch.restored)
        decode = None if tables is None else decode_batch(batch, self._slots.spare)
        step = self._memory.put(decode or batch, tables)
        if tables is not None and batch.token_ids.min() < 0:
            self._sampler.feed(step.token_ids)
        if tables is not None and decode is not None:
            self._graphs.launch(self._launches, step, self._memory.moves + tables.moves)
        else:
            for launch in self._launches:
                self._accelerator.launch(launch(step))
        return step

    def collect(self, launched: _StepOnDevice) -> StepResult:
        """Return the results of the oldest open step, and begin those that waited for it."""
        begun = launched.begun
        if begun is None or launched is not self._open[0]:
            raise RuntimeError("steps are collected in the order of their launches")
        try:
            found = self._collect(launched.step, begun, launched.masks)
        except (ConfigError, DeviceFault) as error:
            found = self._without_results(launched.step, self._failed(error))
        self._open.popleft()
        self._begin_steps()
        return found

    def _without_results(self, step: Step, begun: _Begun) -> StepResult:
        """Return an error for each row of a step that failed."""
        for row in step.rows:
            self._slots.slot(row.slot).token_ids.append(0)  # as a next row in flight computes with it
        self._ended_s = time.monotonic()
        return StepResult((RowResult(error=begun.error),) * len(step.rows), begun.began_s, self._ended_s)

    def _collect(self, step: Step, begun: _Begun, masks_of: GetMasks | None) -> StepResult:
        """Wait for the results of a step that was begun."""
        if begun.error is not None:
            return self._without_results(step, begun)
        began_s, mask_s, sampling_s = max(begun.began_s, self._ended_s), 0.0, 0.0
        draft_s, image_s = 0.0, 0.0
        if begun.encoded is not None:
            begun.encoded.result()
            image_s = time.monotonic() - began_s
        if self._drafts is not None and begun.handed_out is not None:
            self._drafts.keep(begun.handed_out)
        on_host: dict[int, RowResult] = {}
        if begun.waits:
            computed = self._host_logits(step, begun)
            computed_s = time.monotonic()
            masks = {} if masks_of is None else masks_of()
            mask_s = time.monotonic() - computed_s
            self._sample(step, begun, masks)
            for index, logits in computed.items():
                on_host[index] = row_result(step.rows[index], begun.slots[index], logits, masks.get(index))
        rows = self._results(step, begun, on_host)
        self._ended_s = time.monotonic()
        if begun.waits:
            sampling_s = self._ended_s - computed_s - mask_s
        if self._drafts is not None and step.num_proposed:
            rows, draft_s = self._drafts.propose(step, rows, begun.slots)
            self._ended_s += draft_s
        times = (began_s, self._ended_s, mask_s, sampling_s)
        return StepResult(rows, *times, draft_s=draft_s, image_s=image_s)

    def _host_logits(self, step: Step, begun: _Begun) -> dict[int, np.ndarray]:
        """Wait for the forward pass; return the logits of the rows that the host samples."""
        copies, first = {}, 0
        for index, (row, slot) in enumerate(zip(step.rows, begun.slots, strict=True)):
            if slot.sampling is None:
                copies[index] = self._accelerator.fetch(begun.logits.rows(first, row.num_logits))
            first += row.num_logits
        last = self._accelerator.fetch(begun.logits.part(0, (min(first, 1), 1)))
        found = {index: copy.result() for index, copy in copies.items()}
        last.result()
        return found

    def _results(self, step: Step, begun: _Begun, on_host: Mapping[int, RowResult]) -> tuple[RowResult, ...]:
        """Wait for the results of the rows, and note their tokens."""
        copied = np.zeros(0, np.int32) if begun.copy is None else begun.copy.result()
        sampled = DrawnRows(begun.draws, copied, self._vocab)
        results, counted = [], []
        for index, (row, slot, own) in enumerate(zip(step.rows, begun.slots, begun.draws.rows, strict=True)):
            if (result := on_host.get(index)) is None:
                result = sampled.result(row, slot, own)
                slot.token_ids += result.token_ids
                if row.drafted and slot.sampling is not None and slot.sampling.penalizes:
                    counted += [(row.slot, token) for token in result.token_ids]
            results.append(result)
            if row.sample and not result.token_ids:
                slot.token_ids.append(0)  # any token: a next row in flight computes with it, and is dropped
        if counted:
            self._sampler.count(*zip(*counted, strict=True))
        return tuple(results)

    def execute(self, batch: Batch) -> np.ndarray:
        """Return the logits [L, vocab] of the batch's logit rows."""
        return self._accelerator.fetch(self._forward(batch).values[self._output]).result()

    def add_adapter(self, adapter: str, parts: Mapping[str, LowRank]) -> None:
        self._adapters.add(adapter, parts)

    def drop_adapter(self, adapter: str) -> None:
        self._adapters.drop(adapter)

    def block_layout(self) -> str:
        return self._layout

    def block_bytes(self, group: int) -> int:
        return self._caches.block_bytes(group)

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        return self._caches.read(group, block_ids)

    def write_blocks(
        self, group: int, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]
    ) -> None:
        self._caches.write(group, block_ids, contents)
        if self._drafts is not None:
            self._drafts.forget(group, block_ids)


@dataclass(slots=True)
class _Begun:
    """A begun step. `waits`: it is sampled when it is collected. `holds`: the next one waits for that.

    With an `error` it was not launched, or not to its end.
    """

    slots: list[DeviceSlot]  # of the rows
    logits: Any  # a DeviceArray, None if it failed, or is sampled
    began_s: float
    waits: bool = False
    holds: bool = False
    draws: StepDraws = field(init=False)
    copy: HostCopy | None = None  # of the results
    handed_out: HandedOut | None = None  # the hidden states that a draft model reads
    encoded: HostCopy | None = None  # behind the launches that encode images, if there are any
    error: Failure | None = None


@dataclass(slots=True)
class _StepOnDevice:
    """A step that was launched."""

    backend: CudaBackend
    step: Step
    masks: GetMasks | None
    begun: _Begun | None = None

    def result(self) -> StepResult:
        return self.backend.collect(self)
