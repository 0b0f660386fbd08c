"""Short convolutions, and the states of slots: what is kept of positions, and what snapshots restore.

Of each layer with a state a slot keeps the state at the last two boundaries between chunks of 64 positions,
and of the last `history` positions what later ones may need, that of position p at row p % history of its
`ring` (see quire.program.caches.SlotState). Slots from `num_slots` on are those of rows that were added to a
step: they read and write no state. saves [T, 2] names the snapshot taken before each token, and that after
it if it is the last of its row; -1 is none.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.activations import activate


@triton.jit
def _input_at(x, own_ring, token, back, earlier, position, width, history, column, inside):
    """Return what the position `back` before a token has: of this step, or kept; zeros before position 0."""
    own = back <= earlier
    new = tl.load(x + (token - back) * width + column, mask=inside & own, other=0.0)
    kept = inside & (back > earlier) & (back <= position)
    row = (position - back + history) % history
    return tl.where(own, new, tl.load(own_ring + row.to(tl.int64) * width + column, mask=kept, other=0.0))


@triton.jit
def short_convolution(
    out,
    ring,
    snapshots,
    x,
    weight,
    bias,
    positions,
    slots,
    earlier,
    saves,
    layer,
    layers,
    num_slots,
    width,
    taps,
    history,
    direct,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = activation(sum over i of weight[:, i] x[t - taps + 1 + i] + bias), as ops.ShortConvolution.

    x, out [T, width]; weight [width, taps]; ring [layers, slots, history, width] has earlier positions, and
    is written if `direct`: where each row has one token, so that nothing is read that is written. Snapshots
    [n, layers, taps - 1, width] are taken. earlier [T] counts tokens of the same row before each. Grid (T,
    width / BLOCK). Reads each input `taps` times, all but once from the cache; sums in order of positions.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    position, before = tl.load(positions + token), tl.load(earlier + token)
    slot = tl.load(slots + token)
    own_ring = ring + (layer * num_slots + slot).to(tl.int64) * history * width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(taps):
        own = _input_at(x, own_ring, token, taps - 1 - i, before, position, width, history, column, inside)
        total += own * tl.load(weight + column * taps + i, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0)
    tl.store(out + token * width + column, activate(total, ACTIVATION), mask=inside)
    for after in range(2):
        snapshot = tl.load(saves + 2 * token + after)
        if snapshot >= 0:
            to = snapshots + (snapshot.to(tl.int64) * layers + layer) * (taps - 1) * width + column
            for i in range(taps - 1):
                back = taps - 1 - i - after
                own = _input_at(x, own_ring, token, back, before, position, width, history, column, inside)
                tl.store(to + i * width, own, mask=inside)
    if (direct > 0) & (slot < num_slots):
        own = tl.load(x + token * width + column, mask=inside, other=0.0)
        tl.store(own_ring + (position % history).to(tl.int64) * width + column, own, mask=inside)


@triton.jit
def keep_inputs(ring, kept, positions, slots, later, layer, num_slots, width, history, BLOCK: tl.constexpr):
    """Copy kept [T, width] of the last `history` tokens of each row to the ring of its slot.

    later [T] counts tokens of the same row after each. Grid (T, width / BLOCK). Launched when everything that
    reads the ring is done, unless it was written directly.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    if (slot < num_slots) & (tl.load(later + token) < history):
        place = (layer * num_slots + slot).to(tl.int64) * history + tl.load(positions + token) % history
        own = tl.load(kept + token * width + column, mask=column < width, other=0.0)
        tl.store(ring + place * width + column, own, mask=column < width)


@triton.jit
def restore_states(
    borders,
    ring,
    snapshot_borders,
    snapshot_ring,
    restored,
    num_slots,
    size,
    width,
    reach,
    history,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set slots to snapshots: restored [n, 3] has (slot, position, snapshot).

    borders [layers, slots, 2, size] and ring [layers, slots, history, width], snapshots [n, layers, size] and
    [n, layers, reach, width]. Grid (n, layers, (size + reach * width) / BLOCK). Reads and writes each number
    once.
    """
    entry, layer, layers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    slot, position = tl.load(restored + 3 * entry), tl.load(restored + 3 * entry + 1)
    source = tl.load(restored + 3 * entry + 2).to(tl.int64) * layers + layer
    own = (layer * num_slots + slot).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    border = tl.load(snapshot_borders + source * size + at, mask=at < size)
    tl.store(borders + (own * 2 + position // CHUNK % 2) * size + at, border, mask=at < size)
    number = at - size
    row, column = number // width, number % width
    before = position - reach + row
    held = (number >= 0) & (row < reach) & (before >= 0)
    value = tl.load(snapshot_ring + (source * reach + row) * width + column, mask=held)
    tl.store(ring + (own * history + before % history) * width + column, value, mask=held)
