"""Rotary position embedding: the frequencies of every published scaling rule.

Rotation by position (Su et al., RoFormer, arXiv:2104.09864) with frequencies theta^(-2i/dim), scaled for
longer contexts by one of: linear position interpolation (Chen et al., arXiv:2306.15595), dynamic NTK,
YaRN (Peng et al., arXiv:2309.00071), Llama-3 (Meta's reference code) or longrope (arXiv:2402.13753). Of a
"proportional" rotation (Gemma 4) only the first pairs of a head rotate, at the frequencies of the whole head.

Two rules, dynamic NTK and longrope, depend on the length of the context. That length must not change while
keys are cached, so it is fixed when a request arrives: `variant(limit)` maps the longest context the request
can reach to a small number that selects the frequencies and separates cached prefixes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from quire.errors import ConfigError, quoted
from quire.program.numerics import Array

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation parameters of one kind of layer. `dim` numbers of each head are rotated.

    `interleaved` pairs neighbours (2i, 2i + 1); otherwise i pairs with i + dim/2. The other fields are
    those of a checkpoint's rope_scaling, 0 if the type does not use them.
    With `sections` tokens of images have three positions, in time, height and width, by which the pairs
    rotate in turns: pair i by number i % 3 if i < 3 * sections[i % 3], else by the first (Qwen3-VL). If
    `in_chunks`, the first sections[0] pairs rotate by the first, the next by the second ... (Qwen2-VL).
    A token rotates as if it were so many positions `behind` its own: an entry of several tokens, in the row
    of the last, as at the first (DeepSeek-V4).
    """

    dim: int
    theta: float
    interleaved: bool = False
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    rotated_pairs: int = 0  # of "proportional": the other pairs have the frequency 0
    sections: tuple[int, ...] = ()
    in_chunks: bool = False
    behind: int = 0

    def variant(self, limit: int) -> int:
        """Return the set of frequencies for contexts up to `limit` tokens; 0: unscaled, or the only one."""
        if self.rope_type not in ("dynamic", "longrope") or limit <= self.original_max_position:
            return 0
        return limit if self.rope_type == "dynamic" else 1

    def longest(self, max_position: int) -> int:
        """Return the longest context that the scaling supports in a model with `max_position`.

        YaRN, dynamic NTK and interpolation support `factor` times the length before scaling, by default
        `max_position`; for the other types it is `max_position`.
        """
        if self.rope_type not in ("linear", "dynamic", "yarn"):
            return max_position
        return max(max_position, int(self.original_max_position * self.factor))

    def frequencies(self, variant: int = 0) -> Array:
        """Return radians per position, [dim / 2] float32."""
        return _frequencies(self, variant)

    @property
    def axes(self) -> np.ndarray:
        """Return by which of three positions each pair rotates, [dim / 2]."""
        if self.in_chunks:
            return np.repeat(np.arange(3), self.sections)
        pairs = np.arange(self.dim // 2)
        return np.where(pairs < 3 * np.array(self.sections)[pairs % 3], pairs % 3, 0)

    def cos_sin(self, positions: np.ndarray, variants: np.ndarray) -> tuple[Array, Array]:
        """Return cosine and sine for positions [T] or [T, 3] of rows with `variants` [T], each [T, dim / 2].

        The angle is rounded to float32, as in training; its cosine and sine are exact.
        """
        frequencies = np.empty((len(positions), self.dim // 2), np.float32)
        for variant in np.unique(variants):
            frequencies[variants == variant] = self.frequencies(int(variant))
        own = positions[:, None] if positions.ndim == 1 else positions[:, self.axes]
        angles = ((own - self.behind).astype(np.float32) * frequencies).astype(np.float64)
        scale = self.attention_factor
        return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)


@lru_cache(maxsize=256)
def _frequencies(rope: Rope, variant: int) -> Array:
    exponents = np.arange(0, rope.dim, 2).astype(np.float32) / np.float32(rope.dim)
    if rope.rope_type == "dynamic" and variant:
        stretch = rope.factor * variant / rope.original_max_position - (rope.factor - 1)
        return _power(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), exponents)
    base = _power(rope.theta, exponents)
    if rope.rope_type == "linear":
        return base / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        return _llama3(rope, base)
    if rope.rope_type == "yarn":
        return _yarn(rope, base)
    if rope.rope_type == "longrope":
        return base / np.asarray(rope.long_factor if variant else rope.short_factor, np.float32)
    if rope.rope_type == "proportional":
        base[rope.rotated_pairs :] = 0
        return base / np.float32(rope.factor)
    return base


def _power(theta: float, exponents: Array) -> Array:
    return (1.0 / np.power(theta, exponents.astype(np.float64))).astype(np.float32)


def _llama3(rope: Rope, base: Array) -> Array:
    """Keep short wavelengths, divide long ones by the factor, blend between."""
    wavelength = 2 * math.pi / base
    turns, low, high = rope.original_max_position / wavelength, rope.low_freq_factor, rope.high_freq_factor
    smooth = (turns - low) / (high - low) if low < high else np.where(turns > high, 1.0, 0.0)
    smooth = np.clip(smooth, 0.0, 1.0).astype(np.float32)
    return ((1 - smooth) * base / np.float32(rope.factor) + smooth * base).astype(np.float32)


def _yarn(rope: Rope, base: Array) -> Array:
    """Interpolate dimensions with fewer than beta_slow rotations over the original context."""

    def dimension(turns: float) -> float:
        length = rope.original_max_position / (turns * 2 * math.pi)
        return rope.dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (np.arange(rope.dim // 2, dtype=np.float32) - low) / (high - low if high != low else 0.001)
    interpolated = np.clip(ramp, 0.0, 1.0).astype(np.float32)
    return (base / np.float32(rope.factor) * interpolated + base * (1 - interpolated)).astype(np.float32)


def rope_from_config(
    scaling: dict[str, Any] | None,
    *,
    dim: int,
    theta: float,
    max_position: int,
    original_max_position: int | None = None,
    interleaved: bool = False,
) -> Rope:
    """Read a checkpoint's rope_scaling (or rope_parameters) in any of its spellings."""
    scaling = scaling or {}
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    rope_type = "yarn" if rope_type == "deepseek_yarn" else rope_type  # as Sarvam's models state it
    if rope_type not in ROPE_TYPES:
        raise ConfigError(f"unknown rope scaling {quoted(rope_type)}", f"known: {', '.join(ROPE_TYPES)}")
    for name, between in _RANGES.items():
        if scaling.get(name) is not None:
            _check_number(name, scaling[name], between)
    if not isinstance(scaling.get("truncate"), bool | None):
        raise ConfigError("config.json: rope scaling: truncate is not a boolean")
    stated = original_max_position or scaling.get("original_max_position_embeddings")
    original = stated if stated and rope_type != "dynamic" else max_position
    if original % 1:
        problem = f"original_max_position_embeddings = {original!r} is not a length"
        raise ConfigError(f"config.json: rope scaling: {problem}")
    unscaled = rope_type in ("default", "proportional")
    if not (factor := scaling.get("factor")) and not stated and not unscaled:
        raise ConfigError(f"config.json: rope scaling {quoted(rope_type)} needs a factor")
    factor = float(factor or (1.0 if unscaled else max_position / original))
    rope = Rope(
        dim=dim,
        theta=float(theta),
        interleaved=interleaved,
        rope_type=rope_type,
        factor=factor,
        original_max_position=int(original),
        low_freq_factor=float(scaling.get("low_freq_factor") or 0.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 0.0),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_attention_factor(rope_type, scaling, factor, int(original)),
        short_factor=_factors(scaling, "short_factor", dim // 2 if rope_type == "longrope" else 0),
        long_factor=_factors(scaling, "long_factor", dim // 2 if rope_type == "longrope" else 0),
        rotated_pairs=_rotated_pairs(scaling, dim) if rope_type == "proportional" else 0,
    )
    _check(rope)
    return rope


THETA = (10.0, 1e15)  # published models have 10,000 to about 1e11
_LONGEST = (1 << 31) - 1  # tokens
# Accepted ranges of the parameters of a scaling, wider than those of published models.
_RANGES: dict[str, tuple[float, float]] = {
    "factor": (1, 1e6),
    "original_max_position_embeddings": (1, _LONGEST),
    "low_freq_factor": (0, 1e6),
    "high_freq_factor": (0, 1e6),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "attention_factor": (1e-2, 100),
    "partial_rotary_factor": (0, 1),
    "mscale": (0, 100),
    "mscale_all_dim": (0, 100),
}
_DIVISOR = (1e-2, 1e6)


def _check_number(name: str, value: Any, between: tuple[float, float]) -> None:
    low, high = between
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        problem = f"{name} = {quoted(value)} is not a number from {low:g} to {high:g}"
        raise ConfigError(f"config.json: rope scaling: {problem}")


def _rotated_pairs(scaling: dict[str, Any], dim: int) -> int:
    """Return how many pairs of a head rotate, where the frequencies are those of the whole head."""
    part = scaling.get("partial_rotary_factor")
    return int((1.0 if part is None else part) * dim // 2)


def _factors(scaling: dict[str, Any], name: str, size: int) -> tuple[float, ...]:
    """Read one divisor per frequency; `size` 0: the type has none."""
    factors = scaling.get(name) if size else []
    if not isinstance(factors, list) or len(factors) != size:
        raise ConfigError(f"config.json: {name} of the rope scaling is not a list of {size} numbers")
    for factor in factors:
        _check_number(name, factor, _DIVISOR)
    return tuple(float(factor) for factor in factors)


def _check(rope: Rope) -> None:
    """Refuse parameters that would divide by zero, or reach beyond any context."""
    if rope.longest(1) > _LONGEST:
        raise ConfigError(f"config.json: rope scaling to {rope.longest(1):,} tokens: no context is so long")
    if rope.rope_type == "yarn" and rope.beta_fast < rope.beta_slow:
        raise ConfigError("config.json: rope scaling 'yarn' needs beta_slow < beta_fast")
    if rope.rope_type == "llama3" and not 0 < rope.low_freq_factor <= rope.high_freq_factor:
        raise ConfigError("config.json: rope scaling 'llama3' needs low_freq_factor <= high_freq_factor")
    if rope.rope_type == "dynamic" and rope.dim <= 2:
        raise ConfigError(f"config.json: rope scaling 'dynamic' cannot scale {rope.dim} numbers per head")


def _attention_factor(rope_type: str, scaling: dict[str, Any], factor: float, original: int) -> float:
    """Return the factor of cosine and sine: as stated, or by the rule of the paper for the type."""
    if (stated := scaling.get("attention_factor")) is not None:
        return float(stated)
    if rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
    if rope_type != "yarn":
        return 1.0
    own, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if own and of_all:
        return mscale(factor, own) / mscale(factor, of_all)
    return mscale(factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """Return YaRN's factor of queries and keys for a context that is `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
