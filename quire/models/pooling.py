"""Programs that give a vector or a score for each text, of its hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from quire.errors import ConfigError
from quire.models.purpose import Method, Pooling
from quire.program import Builder, Names, Op, Program, Rows, Value, WeightSpec, ops
from quire.program.ops.attention import Distances
from quire.program.ops.embedding import PoolingMethod

_TINY = 1e-24  # of the mean square: a vector of zeros stays one


def pooled_decoder(program: Program, pooling: Pooling) -> Program:
    """Return the program of a decoder with another end: a vector of its last hidden states, or a score."""
    place, head = _head(program)
    if pooling.answers is None:
        ignored = (*program.ignored, *(source for spec in head.weights() for source in spec.sources))
        body = replace(program, ops=program.ops[:place], output=head.x, ignored=ignored)
        if pooling.method != "last":
            body = _of_all_tokens(body)
            b = Builder(body)
            out = pool(b, body.output, pooling.method)
            body = b.program(out, ignored, program.left_out)
        return ended(body, pooling)
    weight, bias, ignored = head.weight, head.bias, program.ignored
    if pooling.head is not None:
        name = f"{pooling.head}.weight"
        weight, bias = WeightSpec(name, (len(pooling.answers), head.x.width), (name,)), None
        ignored = (*ignored, *(source for spec in head.weights() for source in spec.sources))
    vocab_size = weight.shape[0]
    if max(pooling.answers) >= vocab_size:
        raise ConfigError(f"token {max(pooling.answers):,} is not among the {vocab_size:,} of the model")
    rows = Rows(vocab_size, tuple((token, 1) for token in pooling.answers))
    out = Value(1 + max(value.index for op in program for value in op.outputs()), "L", (2,))
    linear = ops.Linear(out, head.x, _some(weight, rows), bias and _some(bias, rows))
    return replace(program, ops=(*program.ops[:place], linear), output=out, pooled=True, ignored=ignored)


def _some(weight: WeightSpec, rows: Rows) -> WeightSpec:
    """Return some outputs of a weight, as a weight with a name of its own."""
    if weight.rows is not None:
        raise ConfigError(f"{weight.name} is part of a matrix, of which no outputs can be taken")
    name, shape = f"{weight.name}.answers", (rows.taken, *weight.shape[1:])
    return replace(weight, name=name, shape=shape, rows=rows, quantizable=False)


def _head(program: Program) -> tuple[int, ops.Linear]:
    """Return the product that gives the logits, with its index."""
    for place in range(len(program.ops) - 1, -1, -1):
        op = program.ops[place]
        if isinstance(op, ops.Linear) and op.out.count == "L":
            return place, op
    raise ConfigError("the model has no output matrix, so its last hidden states cannot be found")


def _of_all_tokens(program: Program) -> Program:
    """Return the program with every token computed where only those that need logits were."""
    chosen = {op.out.index: op.x for op in program if isinstance(op, ops.SampledRows)}

    def of_all(value: Value) -> Value:
        return chosen.get(value.index) or replace(value, count="T")

    kept = tuple(_changed(op, of_all) for op in program if op.out.index not in chosen)
    return replace(program, ops=kept, output=of_all(program.output))


def _changed(op: Op, change: Callable[[Value], Value]) -> Op:
    """Return an op with other values in place of those that it reads and writes."""
    values = {f.name: getattr(op, f.name) for f in fields(op)}
    return replace(op, **{name: change(x) for name, x in values.items() if isinstance(x, Value)})


def ended(program: Program, pooling: Pooling) -> Program:
    """Return a pooled program, with the layers that follow pooling."""
    b, x = Builder(program), program.output
    for module in pooling.dense:
        if module.in_features != x.width:
            problem = f"{module.folder} takes {module.in_features:,} numbers, and gets {x.width:,}"
            raise ConfigError(f"{problem} of the module before it", "its config.json is of another model")
        w = Names(module.folder) / "linear"
        x = b.linear(x, w, module.out_features, bias=module.bias)
        x = b.activation(x, module.activation) if module.activation else x
    if pooling.normalized:
        x = b.scale(b.rms_norm(x, None, _TINY), x.width**-0.5)
    return replace(b.program(x, program.ignored, program.left_out), pooled=True)


def attend_both(
    b: Builder,
    q: Value,
    k: Value,
    v: Value,
    reach: int | None = None,
    scale: float | None = None,
    biases: Distances | None = None,
    window: int | None = None,
) -> Value:
    """Attend from q over k and v of the same text, [T, heads, dim] each, on both sides of each token.

    Or within windows of so many tokens at most, as the batch has them.
    """
    (heads, dim), (groups, _), (_, value_dim) = q.shape, k.shape, v.shape
    if heads % groups:
        raise ConfigError(f"{heads} query heads cannot share {groups} key heads evenly")
    if reach is not None and reach < 1:
        raise ConfigError(f"tokens that see {reach} positions on either side are not supported")
    out = b.value((heads * value_dim,))
    scale = dim**-0.5 if scale is None else scale
    return b.record(ops.RowAttention(out, q, k, v, scale, reach, biases, window)).out


def embed_segments(b: Builder, w: Names, count: int, hidden_size: int, separator: int) -> Value:
    table = WeightSpec(w / "weight", (count, hidden_size), (w / "weight",))
    return b.record(ops.EmbedSegments(b.value((hidden_size,)), table, separator)).out


def pool(b: Builder, x: Value, method: Method) -> Value:
    """Return one vector for each text, [L, n]."""
    if method == "last":
        return b.sampled_rows(x)
    kind: PoolingMethod = method
    return b.record(ops.PoolRows(b.value(x.shape, "L"), x, kind)).out
