"""Recurrences: matrices as states (delta rules, Mamba-2's state space) and elementwise ones.

A program computes one row, token by token, for one head and some columns of its values, with everything in
registers: the state at the boundary of the chunk of 64 positions, and the keys, u and G of the positions
since (quire.program.ops.delta). A token takes the same instructions wherever its row begins, so its bits are
those of its position alone. See states.py for what slots keep, and for `saves`.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.activations import sigmoid, softplus

CHUNK = tl.constexpr(64)
_PIECE = tl.constexpr(16)
_EPS = tl.constexpr(1e-6)


@triton.jit
def _kept_at(head, key_head, key_heads, key_size, value_size, heads, d, e):
    """Return where a position keeps the key of a head, its u and its G; and how many numbers it keeps."""
    values = key_heads * key_size
    totals = values + heads * value_size
    return key_head * key_size + d, values + head * value_size + e, totals + head, totals + heads


@triton.jit
def _since_boundary(own_ring, begin, place, history, at, key_in, value_in):
    """Return keys [64, KEYS], u [64, VALUES] and G [64] of the positions from `begin` on, `place` of them."""
    s = tl.arange(0, CHUNK)
    key_at, u_at, total_at, width = at
    row = own_ring + ((begin + s) % history).to(tl.int64) * width
    old = s < place
    keys = tl.load(row[:, None] + key_at[None, :], mask=old[:, None] & key_in[None, :], other=0.0)
    u = tl.load(row[:, None] + u_at[None, :], mask=old[:, None] & value_in[None, :], other=0.0)
    return keys, u, tl.load(row + total_at, mask=old, other=0.0)


@triton.jit
def _passed(z, keys, u, totals):
    """Return the state at the next boundary."""
    total = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, totals, 0.0), 0)
    weighted = u * tl.exp(total - totals)[:, None]
    keys = tl.reshape(keys, (CHUNK // _PIECE, _PIECE, keys.shape[1]))
    weighted = tl.reshape(weighted, (CHUNK // _PIECE, _PIECE, u.shape[1]))
    piece = tl.arange(0, CHUNK // _PIECE)[:, None, None]
    z = tl.exp(total) * z
    for i in range(CHUNK // _PIECE):  # all at once would not fit the registers
        own_keys = tl.sum(tl.where(piece == i, keys, 0.0), 0)
        own = tl.sum(tl.where(piece == i, weighted, 0.0), 0)
        z = tl.dot(tl.trans(own_keys), own, z, input_precision="ieee")
    return z


@triton.jit
def _save(to, own_rows, place, reach, z, z_at, z_in, chunk, at, key_in, value_in, writes_keys, writes_totals):
    """Write a snapshot: the state at the boundary, and what was kept since; zeros for positions before it."""
    keys, u, totals = chunk
    key_at, u_at, total_at, width = at
    tl.store(to + z_at, z, mask=z_in)
    s = tl.arange(0, CHUNK)
    row = (s - place + reach + CHUNK) % CHUNK  # places before this one are the last rows, others the first
    held = row < reach
    to_row = own_rows + row.to(tl.int64) * width
    known = s < place
    key_mask = held[:, None] & key_in[None, :] & writes_keys
    tl.store(to_row[:, None] + key_at[None, :], tl.where(known[:, None], keys, 0.0), mask=key_mask)
    value_mask = held[:, None] & value_in[None, :]
    tl.store(to_row[:, None] + u_at[None, :], tl.where(known[:, None], u, 0.0), mask=value_mask)
    tl.store(to_row + total_at, tl.where(known, totals, 0.0), mask=held & writes_totals)


@triton.jit
def _step(z, keys, u, totals, place, query, key, value, g, beta, DELTA: tl.constexpr):
    """Return (out, keys, u, totals) after a position: see the formulas of ops.DeltaRule, ops.StateSpace."""
    s = tl.arange(0, CHUNK)
    total = g + tl.sum(tl.where(s == place - 1, totals, 0.0), 0)
    totals = tl.where(s == place, total, totals)
    keys = tl.where((s == place)[:, None], key[None, :], keys)
    fallen = tl.exp(tl.where(s <= place, total - totals, float("-inf")))
    since = tl.exp(total)
    new = value
    if DELTA:
        weights = tl.where(s < place, tl.sum(keys * key[None, :], 1) * fallen, 0.0)
        told = since * tl.sum(z * key[:, None], 0) + tl.sum(u * weights[:, None], 0)
        new = beta * (value - told)
    u = tl.where((s == place)[:, None], new[None, :], u)
    weights = tl.where(s <= place, tl.sum(keys * query[None, :], 1) * fallen, 0.0)
    out = since * tl.sum(z * query[:, None], 0) + tl.sum(u * weights[:, None], 0)
    return out, keys, u, totals


@triton.jit
def _unit(x):
    """Return x divided by its length."""
    return tl.div_rn(x, tl.sqrt_rn(tl.sum(x * x, 0) + _EPS))


@triton.jit
def _token(own, columns, key_in, value_in, gates, low, high, scale, DELTA: tl.constexpr):
    """Return query, key, value, g and beta of a token, and the value as it came.

    own = its row of x; gates = (decay or step, beta, A_log, dt_bias) of the head.
    """
    query = tl.load(own + columns[0], mask=key_in, other=0.0)
    key = tl.load(own + columns[1], mask=key_in, other=0.0)
    value = tl.load(own + columns[2], mask=value_in, other=0.0)
    step = softplus(tl.load(gates[0]) + tl.load(gates[3]))
    brought, beta = value, 1.0
    if DELTA:
        query, key = _unit(query) * scale, _unit(key)
        beta = sigmoid(tl.load(gates[1]) + tl.zeros((1,), tl.float32))
    else:
        step = tl.minimum(tl.maximum(step, low, propagate_nan=tl.PropagateNan.ALL), high, tl.PropagateNan.ALL)
        value = step * value
    return query, key, value, -tl.exp(tl.load(gates[2])) * step, beta, brought


@triton.jit
def _columns(key_head, key_heads, key_size, keys_first, values, d, DELTA: tl.constexpr):
    """Return the columns of x with the query, the key and the value of a head."""
    own = key_head * key_size + d
    if DELTA:
        return own, keys_first + own, 2 * keys_first + values
    else:
        return keys_first + key_heads * key_size + own, keys_first + own, values


@triton.jit
def _keep(to, at, key, u, totals, place, masks):
    """Write what is kept of a position."""
    here = tl.arange(0, CHUNK) == place
    tl.store(to + at[0], key, mask=masks[0])
    tl.store(to + at[1], tl.sum(tl.where(here[:, None], u, 0.0), 0), mask=masks[1])
    tl.store(to + at[2], tl.sum(tl.where(here, totals, 0.0), 0), mask=masks[2])


@triton.jit
def recurrence(
    out,
    kept,
    borders,
    ring,
    snapshot_borders,
    snapshot_ring,
    x,
    decays,
    betas,
    rates,
    biases,
    skips,
    positions,
    row_offsets,
    slots,
    saves,
    layer,
    layers,
    num_slots,
    heads,
    key_heads,
    key_size,
    value_size,
    x_width,
    keys_first,
    history,
    direct,
    low,
    high,
    scale,
    DELTA: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """out [T, heads * value_size] = ops.DeltaRule, or ops.StateSpace if not DELTA, of x [T, x_width].

    x has queries, keys and values of a token if DELTA, else values, keys (B) from keys_first on and queries
    (C). What is kept of each token goes to the ring of its slot if `direct`, as in short_convolution, else to
    kept [T, numbers], for keep_inputs. borders [layers, slots, 2, heads, key_size, value_size], ring [layers,
    slots, history, numbers]; snapshots as in restore_states. Grid (rows, heads, value_size / VALUES). Reads a
    state and what was kept since once a row; 8 operations a number of the state and of a chunk a token.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = tl.load(row_offsets + row), tl.load(row_offsets + row + 1)
    start, slot = tl.load(positions + first), tl.load(slots + first)
    live, each = slot < num_slots, heads // key_heads
    d, e = tl.arange(0, KEYS), part * VALUES + tl.arange(0, VALUES)
    key_in, value_in = d < key_size, e < value_size
    at = _kept_at(head, head // each, key_heads, key_size, value_size, heads, d, e)
    columns = _columns(head // each, key_heads, key_size, keys_first, head * value_size + e, d, DELTA)
    writes_keys, writes_totals = (part == 0) & (head % each == 0), part == 0
    size = (heads * key_size).to(tl.int64) * value_size
    z_at = (head * key_size + d)[:, None] * value_size + e[None, :]
    z_in = key_in[:, None] & value_in[None, :]
    own = (layer * num_slots + slot).to(tl.int64)
    own_borders, own_ring = borders + own * 2 * size, ring + own * history * at[3]
    begin = start // CHUNK * CHUNK
    z = tl.load(own_borders + begin // CHUNK % 2 * size + z_at, mask=z_in & (begin > 0), other=0.0)
    keys, u, totals = _since_boundary(own_ring, begin, start - begin, history, at, key_in, value_in)
    for token in range(first, last + 1):
        position = start + token - first
        place = position % CHUNK
        if (place == 0) & (position > begin):
            z = _passed(z, keys, u, totals)
            tl.store(own_borders + position // CHUNK % 2 * size + z_at, z, mask=z_in & live)
            keys, u, totals = tl.zeros_like(keys), tl.zeros_like(u), tl.zeros_like(totals)
        snapshot = tl.load(saves + 2 * token - (token == last).to(tl.int32))
        if snapshot >= 0:
            taken = snapshot.to(tl.int64) * layers + layer
            to, rows = snapshot_borders + taken * size, snapshot_ring + taken * (CHUNK - 1) * at[3]
            chunk = (keys, u, totals)
            _save(
                to,
                rows,
                place,
                CHUNK - 1,
                z,
                z_at,
                z_in,
                chunk,
                at,
                key_in,
                value_in,
                writes_keys,
                writes_totals,
            )
        if token < last:
            here = tl.cast(token, tl.int64)
            gates = (decays + here * heads + head, betas + here * heads + head, rates + head, biases + head)
            query, key, value, g, beta, brought = _token(
                x + here * x_width, columns, key_in, value_in, gates, low, high, scale, DELTA
            )
            given, keys, u, totals = _step(z, keys, u, totals, place, query, key, value, g, beta, DELTA)
            if not DELTA:
                given += tl.load(skips + head) * brought
            tl.store(out + here * heads * value_size + head * value_size + e, given, mask=value_in)
            to = kept + tl.where(direct > 0, own * history + position % history, here) * at[3]
            masks = (key_in & writes_keys & live, value_in & live, writes_totals & live)
            _keep(to, at, key, u, totals, place, masks)
