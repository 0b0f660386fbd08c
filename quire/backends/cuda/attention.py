"""Attention as launches: rotation and the write of keys and values, then sums over the context."""

from __future__ import annotations

from quire.backends.cuda.accelerator import Argument, Constant, DeviceArray, Launch
from quire.backends.cuda.caches import LayerCache
from quire.backends.cuda.fused import RotatedAttention
from quire.backends.cuda.image_arrays import visible_ends
from quire.backends.cuda.kernels.variants import CACHES, attention_rows
from quire.backends.cuda.launch_list import LaunchList, padded_dim
from quire.backends.cuda.segments import NOTHING, SegmentShape
from quire.backends.cuda.step_arrays import StepArrays
from quire.errors import ConfigError
from quire.program import ops
from quire.program.program import Value

# As Triton calls them.
_CACHE_TYPES = {"bfloat16": "bf16", "int8": "i8", "float16": "fp16", "float32": "fp32"}


def cache_kind(cache: LayerCache) -> str:
    """Return the format of a cache, as Triton calls it."""
    return _CACHE_TYPES[cache.keys.dtype.name]


def attention(op: ops.Attention, to: LaunchList) -> None:
    """Record the write of keys and values, and the attention over the cache."""
    own = _Layer(op, to)
    k, v = to.at(op.k), to.at(op.v)
    to.add(
        "write_kv",
        lambda step: (step.counts["T"], own.groups, 1),
        lambda step: (
            *own.cache,
            k(step),
            v(step),
            *own.places(step),
            own.groups,
            own.dim,
            own.value_dim,
            to.block_size,
        ),
        DIM=own.padded,
        VALUE_DIM=own.padded,
        SCALED=own.scaled,
    )
    _attend(own, op.q)


def shared_attention(op: ops.SharedAttention, to: LaunchList) -> None:
    """Record an attention over the cache of another layer, of all tokens or of those that need logits."""
    _attend(_Layer(op, to), op.q)


def rotated_attention(op: RotatedAttention, to: LaunchList) -> None:
    """Record norms of heads, rotation and the write of keys and values as one launch, then the attention."""
    own, arrays = _Layer(op.attention, to), [to.at(value) for value in (op.q, op.k, op.v)]
    turned, rope, norms = to.at(op.turned), op.rope, op.norms
    weights = (to.none, to.none) if norms is None else tuple(to.array(norm.weight) for norm in norms)
    eps, offset = (0.0, 0.0) if norms is None else (norms[0].eps, norms[0].offset)
    to.add(
        "rope_and_kv",
        lambda step: (step.counts["T"], own.heads + own.groups, 1),
        lambda step: (
            turned(step),
            *own.cache,
            *(at(step) for at in arrays),
            *weights,
            *step.rotations[rope, op.q.count],
            *own.places(step),
            own.heads,
            own.groups,
            own.dim,
            own.value_dim,
            rope.dim,
            to.block_size,
            eps,
            offset,
        ),
        NORM=norms is not None,
        ROPE="halves",
        DIM=own.padded,
        VALUE_DIM=own.padded,
        SCALED=own.scaled,
    )
    _attend(own, op.turned)


class _Layer:
    """The sizes of an attention, and the arguments that its launches share."""

    def __init__(self, op: ops.Attention | ops.SharedAttention, to: LaunchList) -> None:
        self.op, self.to, self.count = op, to, op.q.count
        self.heads, self.dim = op.q.shape
        self.softcap, self.chunked, self.sinks = None, False, None
        if isinstance(op, ops.SharedAttention):
            self.groups, self.value_dim = op.spec.num_heads, op.spec.value_dim
        else:
            self.groups, self.value_dim = op.k.shape[0], op.v.shape[1]
            self.softcap, self.chunked, self.sinks = op.softcap, op.chunked, op.sinks
        self.padded = padded_dim(self.dim, self.value_dim)
        self.table = to.groups[op.layer]
        cache = to.paged(op.layer)
        self.scaled, self.kind = cache.key_scales is not None, cache_kind(cache)
        scales = (cache.key_scales or to.none, cache.value_scales or to.none)
        self.cache: tuple[DeviceArray, ...] = (cache.keys, cache.values, *scales)
        self.shared = self.heads // self.groups
        self.constants: dict[str, Constant] = {
            "CAP": self.softcap is not None,
            "SCALED": self.scaled,
            "PRECISION": CACHES[self.kind],
            "DIM": self.padded,
            "VALUE_DIM": self.padded,
        }

    def places(self, step: StepArrays) -> tuple[Argument, ...]:
        """Return where tokens are in the cache."""
        table = step.block_tables[self.table]
        return *step.places[self.count], table, table.shape[1]

    @property
    def sizes(self) -> tuple[Argument, ...]:
        widths = (self.heads, self.groups, self.dim, self.value_dim, self.to.block_size)
        return (*widths, self.op.window or 0, int(self.chunked))


def _attend(own: _Layer, queries: Value) -> None:
    op, to, softcap = own.op, own.to, own.softcap or 0.0
    out, q, sinks, has_sinks = to.at(op.out), to.at(queries), to.array(own.sinks), int(own.sinks is not None)
    fewest, most = (attention_rows(decode, own.kind, own.padded) for decode in (True, False))
    if own.shared > most:
        problem = f"the cuda backend has no kernel for {own.shared} query heads that share a key head"
        raise ConfigError(problem, f"at most {most} may, with this kv_cache_dtype: use device='native'")
    shape = SegmentShape(own.table, op.window or 0, own.chunked, own.heads, own.groups, own.value_dim)
    tiles = to.tiled(own.count, most // own.shared)
    by_segments = CACHES[own.kind] == "bf16" and own.softcap is None and own.shared <= fewest

    def launch(step: StepArrays) -> Launch:
        if by_segments and to.segments.most(shape, step):
            return NOTHING
        count = step.counts[own.count]
        block, of_step = fewest if step.num_rows == count and own.shared <= fewest else most, tiles(step)
        positions, token_rows, table, stride = own.places(step)
        ends = None if op.causal else step.texts.get(visible_ends(own.count))
        where = (positions, token_rows, ends or positions, step.context_lens, table, stride)
        flags = (int(ends is not None), has_sinks, op.scale, softcap)
        args = (out(step), q(step), *own.cache, sinks, *where, of_step, *own.sizes, *flags)
        grid = (of_step.shape[0] - 1, own.groups, 1)
        return Launch("attend", grid, args, {**own.constants, "BLOCK_M": block})

    to.launches.append(launch)
    if by_segments:
        to.launches += to.segments.launches(
            shape,
            "attend_segments",
            {**own.constants, "BLOCK_M": fewest},
            own.padded,
            lambda step: (
                q(step),
                *own.cache,
                *own.places(step),
                step.counts["T"],
                *own.sizes,
                op.scale,
                softcap,
            ),
            lambda step: (out(step), sinks, has_sinks),
        )
