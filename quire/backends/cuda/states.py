"""The states of slots in the memory of an accelerator, their snapshots, and what a step says of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from quire.backends.cuda.accelerator import Accelerator, DeviceArray, Launch, Memory
from quire.backends.cuda.kernels.state_variants import STATE_BLOCK
from quire.backends.cuda.memory import ReusedMemory
from quire.errors import ConfigError
from quire.program.batch import Batch
from quire.program.caches import SlotState
from quire.program.ops.slot_states import CHUNK
from quire.program.program import Program
from quire.types import Snapshot

_FLOAT32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class GroupStates:
    """The states of layers with one spec, of `num_slots` slots, and snapshots of them; all float32.

    A slot has the states at the last two boundaries between chunks, and of each of the last `history`
    positions what the layer keeps of it; a snapshot one state and `reach` positions.
    """

    spec: SlotState
    num_layers: int
    num_slots: int
    borders: DeviceArray  # [layers, slots, 2, size]
    ring: DeviceArray  # [layers, slots, history, inputs]
    snapshot_borders: DeviceArray  # [snapshots, layers, size]
    snapshot_ring: DeviceArray  # [snapshots, layers, reach, inputs]

    @property
    def size(self) -> int:
        """The numbers of a state."""
        return prod(self.spec.shape)

    @property
    def snapshots(self) -> tuple[DeviceArray, ...]:
        """The arrays with the contents of snapshots."""
        return tuple(array for array in (self.snapshot_borders, self.snapshot_ring) if array.shape[-1])


@dataclass(frozen=True, slots=True)
class LayerState:
    """The state of a layer: number `index` of the layers of its group."""

    group: GroupStates
    index: int


def require_states(spec: SlotState) -> SlotState:
    """Return the spec of a state. Raises ConfigError for one that has no kernels."""
    if spec.dtype != "float32":
        problem = f"the cuda backend keeps states in float32, and this model has {spec.dtype}"
        raise ConfigError(problem, "use device='native'")
    return spec


def state_groups(
    memory: Memory, program: Program, num_slots: int, num_snapshots: int
) -> dict[int, GroupStates]:
    """Allocate the states of a program, by cache group."""
    found, layers = dict[int, GroupStates](), program.layer_groups
    for group, spec in enumerate(program.cache_groups):
        if isinstance(spec, SlotState):
            number, size = layers.count(group), prod(require_states(spec).shape)
            slots, snapshots = (number, num_slots), (num_snapshots, number)
            shapes = (
                (*slots, 2, size),
                (*slots, spec.history, spec.inputs),
                (*snapshots, size),
                (*snapshots, spec.reach, spec.inputs),
            )
            arrays = [memory.allocate(max(1, prod(shape) * 4)).part(0, shape, _FLOAT32) for shape in shapes]
            found[group] = GroupStates(spec, number, num_slots, *arrays)
    return found


class Restores:
    """Sets slots to snapshots, before the rows of a step begin."""

    def __init__(self, accelerator: Accelerator, groups: Mapping[int, GroupStates]) -> None:
        self._accelerator = accelerator
        self._groups = groups
        self._uploads = ReusedMemory(accelerator)

    def launch(self, restored: Sequence[Snapshot]) -> None:
        """Launch what restores these snapshots."""
        lists = {
            group: np.array([(s.slot, s.position, s.snapshot) for s in restored if s.group == group], _INT32)
            for group in sorted({snapshot.group for snapshot in restored})
        }
        placed = self._uploads.upload(list(lists.values())) if lists else []
        for (number, entries), array in zip(lists.items(), placed, strict=True):
            group = self._groups[number]
            width, reach = group.spec.inputs, group.spec.reach
            blocks = -(-(group.size + reach * width) // STATE_BLOCK)
            states = (group.borders, group.ring, group.snapshot_borders, group.snapshot_ring)
            args = (*states, array, group.num_slots, group.size, width, reach, group.spec.history)
            how = {"CHUNK": CHUNK, "BLOCK": STATE_BLOCK}
            grid = (len(entries), group.num_layers, blocks)
            self._accelerator.launch(Launch("restore_states", grid, args, how))


@dataclass(frozen=True, slots=True)
class StateArrays:
    """Arrays of a step that only layers with a state need: see kernels.states."""

    slots: DeviceArray  # [T]
    earlier: DeviceArray  # [T]
    later: DeviceArray  # [T]
    saves: Mapping[int, DeviceArray]  # by cache group, [T, 2]

    @classmethod
    def of(cls, arrays: Sequence[DeviceArray], groups: Sequence[int]) -> StateArrays:
        """Return the arrays of `state_integers` on an accelerator."""
        slots, earlier, later, *saves = arrays
        return cls(slots, earlier, later, dict(zip(groups, saves, strict=True)))


def state_integers(batch: Batch, groups: Sequence[int]) -> list[np.ndarray]:
    """Return the slot of each token, how many tokens of its row are before and after it, and its snapshots.

    The last are [T, 2] for each of the cache groups: those taken before a token and, if it is the last of its
    row, after it; -1 for none. Sizes depend on the number of tokens alone.
    """
    numbers, rows = np.arange(batch.num_tokens), batch.token_rows
    firsts = batch.row_offsets[:-1]
    found = [batch.slots[rows], numbers - firsts[rows], batch.row_offsets[1:][rows] - 1 - numbers]
    row_of = {slot: row for row, slot in enumerate(batch.slots.tolist())} if batch.saved else {}
    for group in groups:
        saves = np.full((batch.num_tokens, 2), -1)
        for snapshot in batch.saved:
            if snapshot.group == group:
                first, end = batch.row_offsets[row_of[snapshot.slot] :][:2].tolist()
                token = first + snapshot.position - int(batch.positions[first])
                saves[min(token, end - 1), int(token == end)] = snapshot.snapshot
        found.append(saves)
    return found
