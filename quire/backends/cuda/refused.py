"""Refusals, by name and before anything is loaded, of models that the cuda backend has no kernels for."""

from __future__ import annotations

from collections.abc import Mapping

from quire.backends.cuda.coded_form import coded_form
from quire.backends.cuda.kernels.variant import MOST_EXPERTS
from quire.backends.cuda.kernels.variants import MOST_CHOSEN, MULTIPLE, SAMPLING_BLOCK, SURVEYED_PARTS
from quire.backends.cuda.lower import is_lowered
from quire.backends.cuda.products import is_narrow
from quire.backends.cuda.recurrences import Recurrence, require_recurrence
from quire.errors import ConfigError
from quire.program import ops
from quire.program.program import Op, Program, WeightSpec
from quire.quantize.kinds import DTYPES, Storage

_ON_CPU = "use device='native'"

# Ops without kernels: what they are for, and what to do instead.
_FOR: dict[type[Op], tuple[str, str]] = {
    ops.GatedRecurrence: ("recurrent states", _ON_CPU),
    ops.Compress: ("compressed attention", _ON_CPU),
    ops.CompressedAttention: ("attention to vectors that are keys and values", _ON_CPU),
    ops.ChoosePositions: ("attention to positions that an indexer chooses", _ON_CPU),
    ops.RepeatStreams: ("hyper-connections", _ON_CPU),
    ops.StreamWeights: ("hyper-connections", _ON_CPU),
    ops.CollapseStreams: ("hyper-connections", _ON_CPU),
    ops.MixStreams: ("hyper-connections", _ON_CPU),
}


def require_kernels(program: Program, storage: Mapping[str, Storage]) -> None:
    """Raise ConfigError if a program, with weights in these storage kinds, needs what has no kernel."""
    for op in program:
        if type(op) in _FOR:
            use, hint = _FOR[type(op)]
            raise ConfigError(f"the cuda backend has no kernels for {use}", hint)
        if (unlike := _unlike_kernels(op)) is not None:
            raise ConfigError(f"the cuda backend has no kernels for {unlike}", _ON_CPU)
        if not is_lowered(op):
            raise ConfigError(f"the cuda backend has no kernel for {type(op).__name__}", _ON_CPU)
        if isinstance(op, ops.Experts):
            _require_experts(op)
        if isinstance(op, Recurrence):
            require_recurrence(op)
        if isinstance(op, ops.MixedRows):
            hint = f"set max_images=0, or {_ON_CPU}"
            _require_floats(op.table, "learned positions of patches", storage, hint)
        if isinstance(op, ops.RowAttention) and op.distances is not None:
            _require_floats(op.distances.table, "biases of distances", storage, _ON_CPU)
    if (width := program.output.width) > (most := SAMPLING_BLOCK * SURVEYED_PARTS):
        raise ConfigError(
            f"the cuda backend has no kernels to sample from {width:,} tokens", f"at most {most:,}"
        )
    for op in program:
        _require_multiples(op, storage)
        _require_in_order(op, storage)
    if others := {value.dtype for op in program for value in op.outputs()} - {"float32"}:
        raise ConfigError(f"the cuda backend computes in float32, and this model has {min(others)}", _ON_CPU)


def _unlike_kernels(op: Op) -> str | None:
    """Return what an op computes that kernels for others of its class do not, None if they compute it."""
    if isinstance(op, ops.Rotary) and (op.first or op.inverse):
        return "rotations of other than the first numbers of heads, or back"
    if isinstance(op, ops.GatedActivation) and op.limit is not None:
        return "gates with a limit"
    if isinstance(op, ops.Experts) and op.limit is not None and not op.shifted:
        return "experts whose gates have a limit"
    if isinstance(op, ops.Experts) and (op.routing.listed or op.routing.affinity == "sqrtsoftplus"):
        return "experts that are listed by token, or chosen by the square root of a softplus"
    return None


def _require_floats(spec: WeightSpec, what: str, storage: Mapping[str, Storage], hint: str) -> None:
    if (kept := storage[spec.name]).kind not in DTYPES:
        raise ConfigError(f"the cuda backend has no kernels for {what} in {kept}", hint)


def _require_multiples(op: Op, storage: Mapping[str, Storage]) -> None:
    """Raise ConfigError for rows of matrices or of caches that kernels would not read 16 bytes at a time."""
    sizes = dict[str, int]()
    if isinstance(op, ops.LatentAttention):
        sizes = {f"latents have {value.width} numbers": value.width for value in (op.c, op.r)}
    elif isinstance(op, ops.Linear | ops.LinearByHead | ops.GatedLinear | ops.Experts):
        matrices = op.experts.matrices() if isinstance(op, ops.Experts) else op.weights()
        for spec in matrices:
            adapted = isinstance(op, ops.Linear) and op.adapted
            narrow = isinstance(op, ops.Linear) and is_narrow(spec)
            form = coded_form(kept := storage[spec.name])
            wide = kept.kind in DTYPES and not narrow
            if len(spec.shape) > 1 and (adapted or wide or (form and form.kind.is_float)):
                sizes[f"{spec.name} has {spec.shape[-1]} inputs"] = spec.shape[-1]
    elif isinstance(op, ops.Attention | ops.Rotary):
        # SharedAttention has queries as an Attention has keys.
        values = (op.x,) if isinstance(op, ops.Rotary) else (op.k, op.v)
        sizes = {f"heads have {value.shape[-1]} numbers": value.shape[-1] for value in values}
    for what, size in sizes.items():
        if size % MULTIPLE:
            problem = f"the cuda backend has no kernels for sizes that are no multiples of {MULTIPLE}: {what}"
            raise ConfigError(problem, _ON_CPU)


def _require_in_order(op: Op, storage: Mapping[str, Storage]) -> None:
    """Raise ConfigError for inputs in another order where kernels take them as they are."""
    if isinstance(op, ops.Embed):
        form = coded_form(storage[op.table.name])
        if form is not None and form.ordered:
            what = "tables of embeddings whose inputs are in another order"
            raise ConfigError(f"the cuda backend has no kernels for {what}", _ON_CPU)


def _require_experts(op: ops.Experts) -> None:
    number, chosen = op.num_experts, op.routing.chosen
    if number > MOST_EXPERTS or chosen > MOST_CHOSEN:
        problem = f"the cuda backend has no kernels for {chosen} of {number} experts"
        raise ConfigError(problem, f"at most {MOST_CHOSEN} of {MOST_EXPERTS}: {_ON_CPU}")
