"""Mamba-2's mixer (arXiv:2405.21060), as hybrids have it beside attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import ConfigError, quoted
from quire.models.config import MAX_HEAD_DIM, MAX_KERNEL, Fields, ModelConfig
from quire.program import Builder, Names, Value

MAMBA = "mamba"  # the older name of LINEAR layers


@dataclass(frozen=True, slots=True)
class Mixer:
    """The sizes and options of the mixers of a model.

    `limits` are those of steps; `in_bias`, `out_bias` and `conv_bias` tell which parts have biases.
    """

    heads: int
    dim: int
    groups: int
    state_dim: int
    kernel: int
    activation: str
    limits: tuple[float, float]
    in_bias: bool
    out_bias: bool
    conv_bias: bool

    @property
    def inner(self) -> int:
        return self.heads * self.dim

    @property
    def shared(self) -> int:
        """The width of B, and of C."""
        return self.groups * self.state_dim


def mixer_of(cfg: ModelConfig, inner: int, out_bias: bool) -> Mixer:
    """Return the mixers of a config.json with keys `mamba_*`, whose heads have `inner` channels together."""
    heads, dim = cfg.size("mamba_n_heads"), cfg.get("mamba_d_head")
    dim = Fields({"mamba_d_head": inner // heads if dim == "auto" else dim}).size(
        "mamba_d_head", MAX_HEAD_DIM
    )
    if heads * dim != inner:
        raise ConfigError(f"config.json: {heads} heads of {dim} channels are not {inner} (mamba_d_head)")
    return Mixer(
        heads=heads,
        dim=dim,
        groups=cfg.size("mamba_n_groups"),
        state_dim=cfg.size("mamba_d_state"),
        kernel=cfg.size("mamba_d_conv", MAX_KERNEL),
        activation=cfg.hidden_act,
        limits=step_limits(cfg.get("time_step_limit")),
        in_bias=cfg.flag("mamba_proj_bias"),
        out_bias=out_bias,
        conv_bias=cfg.flag("mamba_conv_bias"),
    )


def step_limits(stated: object) -> tuple[float, float]:
    """Return the least and the largest step, as stated; the largest may be infinite."""
    if isinstance(stated, list | tuple) and len(stated) == 2:
        low, high = (_number(limit) for limit in stated)
        if 0 <= low <= high and low < math.inf:
            return low, high
    raise ConfigError(f"config.json: time_step_limit = {quoted(stated)} is not two limits in order")


def _number(limit: object) -> float:
    """Return a limit as a number, or NaN; {"__float__": "Infinity"} is how transformers writes infinity."""
    if limit == {"__float__": "Infinity"}:
        return math.inf
    return float(limit) if isinstance(limit, int | float) and not isinstance(limit, bool) else math.nan


def mixer(
    b: Builder,
    h: Value,
    p: Names,
    m: Mixer,
    gated: Callable[[Value, Value], Value],
    scaled: Callable[[Value], Value] = lambda packed: packed,
) -> Value:
    """Return out(gated(state_space(conv(x, B, C), step), gate)), with all five from one product.

    `gated` gets the state space's output and the gate; `scaled` gets the product.
    """
    conv = m.inner + 2 * m.shared
    packed = scaled(b.linear(h, p / "in_proj", m.inner + conv + m.heads, bias=m.in_bias))
    gate, x = b.slice(packed, 0, m.inner), b.slice(packed, m.inner, conv)
    step = b.slice(packed, m.inner + conv, m.heads)
    x = b.short_convolution(x, p / "conv1d", m.kernel, bias=m.conv_bias, activation=m.activation)
    y = b.state_space(x, step, p, m.groups, m.state_dim, m.limits)
    return b.linear(gated(y, gate), p / "out_proj", h.width, bias=m.out_bias)
