"""Rotary position embedding: the frequencies of every rule against its published formula, the spellings
of config.json, and the rotation itself.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIGS, Sequence, batch_of, same_bits
from tiny_encoders import ENCODERS

from quire.errors import ConfigError
from quire.models import read_model
from quire.models.encoders import read_encoder
from quire.models.purpose import Pooling
from quire.program import Builder, Names
from quire.program.ops import Rotary
from quire.program.program import Run
from quire.program.rope import Rope, rope_from_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 2.0, 4.0, 9.0]}


def rope(scaling: dict[str, Any] | None = None, **sizes: Any) -> Rope:
    return rope_from_config(scaling, **{"dim": 16, "theta": 10000.0, "max_position": 4096, **sizes})


def plain(dim: int = 16, theta: float = 10000.0) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def close(actual: np.ndarray, expected: list[float]) -> None:
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


# Frequencies


@pytest.mark.parametrize(("dim", "theta"), [(2, 10000.0), (16, 10000.0), (128, 500000.0), (6, 1e6)])
def test_standard(dim: int, theta: float) -> None:
    """theta^(-2i/d): RoFormer, section 3.2.2."""
    close(rope(dim=dim, theta=theta).frequencies(), plain(dim, theta))


def test_linear() -> None:
    """Positions divided by the factor: arXiv:2306.15595, equation 3."""
    close(rope({"type": "linear", "factor": 4.0}).frequencies(), [f / 4 for f in plain()])


@pytest.mark.parametrize("limit", [4097, 5000, 20000])
def test_dynamic_ntk(limit: int) -> None:
    """The base grows with the length: theta (s L / L0 - (s - 1))^(d / (d - 2))."""
    r = rope({"rope_type": "dynamic", "factor": 2.0})
    base = 10000.0 * (2.0 * limit / 4096 - 1.0) ** (16 / 14)
    close(r.frequencies(r.variant(limit)), plain(theta=base))
    close(r.frequencies(r.variant(4096)), plain())


@pytest.mark.parametrize("original", [64, 1024, 8192])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_llama3(original: int, theta: float) -> None:
    """Meta's reference: by wavelength against the original context over the two factors."""
    r = rope({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": original}, theta=theta)
    expected = []
    for f in plain(theta=theta):
        wavelength = 2 * math.pi / f
        if wavelength < original / 4.0:
            expected.append(f)
        elif wavelength > original / 1.0:
            expected.append(f / 8.0)
        else:
            smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * f / 8.0 + smooth * f)
    close(r.frequencies(), expected)


def test_llama3_with_one_threshold() -> None:
    """Llama 4 Scout: a wavelength is scaled or not, none in part."""
    how = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    r = rope({**how, "original_max_position_embeddings": 64})
    close(r.frequencies(), [f if 2 * math.pi / f < 64 else f / 16 for f in plain()])


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("dim", "original"), [(16, 64), (64, 2048), (128, 4096), (8, 32768)])
def test_yarn(truncate: bool, dim: int, original: int) -> None:
    """Blend by the number of turns over the original context: arXiv:2309.00071, section 3.2."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": original}
    r = rope({**scaling, "truncate": truncate}, dim=dim)

    def index(turns: float) -> float:
        """The (real) dimension whose wave makes so many turns: 2 pi turns = original theta^(-2i/d)."""
        return dim * math.log(original / (2 * math.pi * turns), 10000.0) / 2

    low, high = index(32), index(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    expected = []
    for i, f in enumerate(plain(dim)):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        expected.append(f / 8.0 * ramp + f * (1 - ramp))
    close(r.frequencies(), expected)


def test_longrope() -> None:
    """One divisor for each frequency, another list beyond the original context: arXiv:2402.13753."""
    r = rope({"type": "longrope", **LONG}, dim=8, original_max_position=1024)
    assert [r.variant(n) for n in (1, 1024, 1025, 9999)] == [0, 0, 1, 1]
    base = plain(8)
    for variant, name in enumerate(("short_factor", "long_factor")):
        close(r.frequencies(variant), [f / d for f, d in zip(base, LONG[name], strict=True)])


def test_variants_only_where_the_length_matters() -> None:
    """A variant is what keeps prefixes of different frequencies apart in the cache."""
    for scaling in (
        None,
        {"type": "linear", "factor": 2.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", "factor": 2.0},
    ):
        assert rope(scaling).variant(10**6) == 0
    dynamic = rope({"type": "dynamic", "factor": 2.0})
    assert [dynamic.variant(n) for n in (1, 4096, 4097, 8000)] == [0, 0, 4097, 8000]


# The factor on cosine and sine


def test_attention_factor() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    assert rope(yarn).attention_factor == pytest.approx(0.1 * math.log(8.0) + 1)
    assert rope({**yarn, "attention_factor": 1.3}).attention_factor == 1.3
    assert rope({**yarn, "factor": 1.0}).attention_factor == 1.0
    both = {"mscale": 0.7, "mscale_all_dim": 1.4}
    ratio = (0.07 * math.log(8.0) + 1) / (0.14 * math.log(8.0) + 1)
    assert rope({**yarn, **both}).attention_factor == pytest.approx(ratio)
    assert rope({**yarn, "mscale": 0.7}).attention_factor == pytest.approx(0.1 * math.log(8.0) + 1)
    for scaling in (None, {"type": "linear", "factor": 8.0}, {"type": "dynamic", "factor": 8.0}):
        assert rope(scaling).attention_factor == 1.0


def test_attention_factor_of_longrope() -> None:
    """sqrt(1 + ln(factor) / ln(original)); a factor that is not stated is that of the lengths."""
    long = {"type": "longrope", **LONG}
    expected = math.sqrt(1 + math.log(4) / math.log(1024))
    for r in (
        rope(long, dim=8, original_max_position=1024),
        rope({**long, "original_max_position_embeddings": 1024}, dim=8),
        rope({**long, "factor": 4.0}, dim=8, max_position=1024),
        rope({**long, "factor": 4.0}, dim=8, max_position=9999, original_max_position=1024),
    ):
        assert r.attention_factor == pytest.approx(expected)
    assert rope(long, dim=8, original_max_position=4096).attention_factor == 1.0
    assert rope({**long, "attention_factor": 1.19}, dim=8, original_max_position=9).attention_factor == 1.19


# Spellings of config.json


def rotaries(name: str = "llama", **changes: Any) -> list[Rope]:
    """The ropes of the queries, layer by layer."""
    program = read_model({**CONFIGS[name], **changes}).program
    return [op.rope for op in program if isinstance(op, Rotary)][::2]


def test_spellings_that_mean_the_same() -> None:
    linear = rotaries(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    assert linear[0].theta == 5e5
    assert linear[0].factor == 2.0
    for changes in (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "type": "other", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_theta": 1.5, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": None}},
    ):
        assert rotaries(**changes) == linear


@pytest.mark.parametrize("unscaled", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_no_scaling(unscaled: Any) -> None:
    close(rotaries(rope_scaling=unscaled)[0].frequencies(), plain(4))


def test_partial_rotary() -> None:
    for changes in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        (first, _) = rotaries("phi3", **changes)
        assert first.dim == 2
        close(first.frequencies(), plain(2))
        assert [r.dim for r in rotaries("llama", **changes)] == [4, 4]
    assert [r.dim for r in rotaries("glm4")] == [2, 2]


def test_each_layer_its_own_theta() -> None:
    """Gemma 3: window layers rotate by a base of their own, unscaled, whichever way it is written."""
    old = rotaries("gemma3", rope_theta=1e6, rope_local_base_freq=20000.0)
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    }
    new = rotaries("gemma3", rope_scaling=None, rope_parameters=nested)
    for ropes in (old, new):
        close(ropes[0].frequencies(), plain(4, 20000.0))
        assert same_bits(ropes[0].frequencies(), ropes[1].frequencies())
        close(ropes[2].frequencies(), [f / 8 for f in plain(4, 1e6)])


def test_layers_without_rope() -> None:
    """SmolLM3 by list or by interval; Cohere 2 rotates its window layers only."""
    assert len(rotaries("smollm3")) == 1
    assert len(rotaries("smollm3", no_rope_layers=None, num_hidden_layers=9)) == 7
    assert len(rotaries("smollm3", no_rope_layers=None, no_rope_layer_interval=2)) == 1
    assert len(rotaries("cohere2")) == 1
    assert rotaries("cohere2")[0].interleaved
    assert not rotaries("gpt2")


BROKEN: list[dict[str, Any]] = [
    {"rope_type": "unknown"},
    {"rope_type": ["yarn"]},
    {"type": "linear"},
    {"type": "dynamic"},
    {"type": "yarn"},
    {"type": "linear", "factor": "2"},
    {"type": "linear", "factor": -2.0},
    {"type": "linear", "factor": math.nan},
    {"type": "linear", "factor": math.inf},
    {"type": "linear", "factor": True},
    {"type": "linear", "factor": 0},
    {"type": "llama3", "factor": 8.0},
    {"type": "llama3", **LLAMA3, "high_freq_factor": 0.5},
    {"type": "llama3", **LLAMA3, "original_max_position_embeddings": "8192"},
    {"type": "yarn", "factor": 2.0, "beta_fast": "32"},
    {"type": "yarn", "factor": 2.0, "attention_factor": [1]},
    {"type": "longrope", "factor": 2.0},
    {"type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0, 1.0]},
    {"type": "longrope", "factor": 2.0, "short_factor": [1.0, 0.0], "long_factor": [1.0, 1.0]},
    {"type": "longrope", "factor": 2.0, "short_factor": "ab", "long_factor": [1.0, 1.0]},
    {"type": "longrope", "factor": 2.0, "short_factor": [1.0, "1"], "long_factor": [1.0, 1.0]},
    {"rope_theta": "1e6"},
    {"rope_theta": 1.0},
    {"rope_theta": -1.0},
    {"full_attention": None},
    {"sliding_attention": {"rope_theta": 1e6}},
]


@pytest.mark.parametrize("scaling", BROKEN, ids=str)
def test_broken_scaling_is_refused(scaling: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        rotaries(rope_parameters=scaling)


@pytest.mark.parametrize("part", [0.0, 2.0, 0.25, None, "half"])
def test_a_broken_partial_rotary_is_refused(part: Any) -> None:
    with pytest.raises(ConfigError):
        rotaries("glm4", partial_rotary_factor=part)


def test_phi3_knows_longrope_alone_by_three_names() -> None:
    factors = {"short_factor": [1.0, 1.2], "long_factor": [1.5, 4.0]}
    for name in ("longrope", "su", "yarn"):
        assert rotaries("phi3", rope_scaling={"type": name, **factors})[0].rope_type == "longrope"
    for name in ("linear", "dynamic", "llama3"):
        with pytest.raises(ConfigError, match="not one of Phi-3"):
            rotaries("phi3", rope_scaling={"type": name, "factor": 2.0, **LLAMA3})


def test_the_original_length_beside_the_scaling_counts_more() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert rotaries(rope_scaling=yarn)[0].original_max_position == 32
    (beside, _) = rotaries(rope_scaling=yarn, original_max_position_embeddings=64)
    assert beside.original_max_position == 64
    dynamic = {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}
    assert rotaries(rope_scaling=dynamic)[0].original_max_position == 256


def test_a_null_truncate_is_false() -> None:
    yarn = {"type": "yarn", "factor": 4.0}
    found = [rotaries(rope_scaling={**yarn, **more})[0].truncate for more in ({}, {"truncate": None})]
    assert found == [True, False]


def test_scaling_that_is_no_object_is_refused() -> None:
    for scaling in ("linear", 3, [1], True):
        with pytest.raises(ConfigError):
            rotaries(rope_scaling=scaling)


def test_a_model_takes_the_variant_of_its_ropes() -> None:
    assert read_model(CONFIGS["llama"]).context_variant(10**6) == 0
    dynamic = read_model(CONFIGS["llama-dynamic"])
    assert [dynamic.context_variant(n) for n in (64, 65, 99)] == [0, 65, 99]
    long = read_model(CONFIGS["phi3-longrope"])
    assert [long.context_variant(n) for n in (64, 65, 99)] == [0, 1, 1]


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"type": "dynamic", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "yarn", "factor": 40, "original_max_position_embeddings": 1024}, 40960),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "linear", "original_max_position_embeddings": 1024}, 4096),
        ({"type": "llama3", **LLAMA3, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "longrope", "original_max_position_embeddings": 1024}, 4096),
    ],
)
def test_the_longest_context_of_a_scaling(scaling: dict[str, Any] | None, longest: int) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    long = {**scaling, **factors} if scaling and scaling["type"] == "longrope" else scaling
    assert rope(long).longest(4096) == longest


def test_the_longest_context_of_a_model_is_that_of_its_shortest_rope() -> None:
    def of(name: str, **changes: Any) -> tuple[int, int]:
        model = read_model({**CONFIGS[name], **changes})
        return model.max_context, model.config.max_position_embeddings

    scaling = {"rope_type": "linear", "factor": 8.0}
    assert of("llama", max_position_embeddings=100, rope_scaling=scaling) == (800, 100)
    window_layers_unscaled = of("gemma3", max_position_embeddings=100, rope_scaling=scaling)
    assert window_layers_unscaled == (100, 100)
    dynamic = {"rope_type": "dynamic", "factor": 8.0}
    assert of("gemma3", max_position_embeddings=100, rope_scaling=dynamic) == (800, 100)
    learned, stated = of("gpt2")
    assert learned == stated


def test_dynamic_scaling_reaches_its_variants_without_a_stated_length() -> None:
    scaling = {"type": "dynamic", "factor": 4}
    model = read_model({**CONFIGS["llama"], "max_position_embeddings": 64, "rope_scaling": scaling})
    assert model.max_context == 256
    assert [model.context_variant(n) for n in (64, 65, model.max_context)] == [0, 65, 256]


# The rotation


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 5), st.booleans(), st.integers(0, 5000))
def test_rotation_is_a_complex_product(heads: int, half: int, rest: int, turns: bool, start: int) -> None:
    """(a + ib) exp(i position frequency) times the attention factor; what is left of a head stays."""
    dim = 2 * half + 2
    r = Rope(dim, 10000.0, interleaved=turns, attention_factor=1.5)
    b = Builder()
    op = b.program(b.rotary(b.linear(b.embed(Names("e"), 2, 2), Names("w"), (heads, dim + rest)), r)).ops[-1]
    rows = [(Sequence([0] * (start + 3), [0], computed=start), 3), (Sequence([0] * 2, [0]), 2)]
    x = np.random.default_rng(start).standard_normal((5, heads, dim + rest)).astype(np.float32)
    out = op.reference(Run(batch_of(rows, 1 << 20), {}), x)
    for t, position in enumerate([start, start + 1, start + 2, 0, 1]):
        for h in range(heads):
            for i, frequency in enumerate(r.frequencies()):
                first, second = (2 * i, 2 * i + 1) if turns else (i, i + dim // 2)
                angle = float(np.float32(position) * frequency)
                turned = complex(x[t, h, first], x[t, h, second]) * np.exp(1j * angle) * 1.5
                assert out[t, h, first] == pytest.approx(turned.real, abs=2e-6)
                assert out[t, h, second] == pytest.approx(turned.imag, abs=2e-6)
    assert same_bits(out[..., dim:].copy(), x[..., dim:].copy())


@pytest.mark.parametrize("turns", [False, True])
def test_the_last_numbers_of_heads_rotate_and_back(turns: bool) -> None:
    """As the first numbers of heads that have no others; back is the same with positions negated."""
    r, x = Rope(6, 100.0, turns), np.random.default_rng(0).standard_normal((9, 2, 10)).astype(np.float32)
    run = Run(batch_of([(Sequence([0] * 40, [0], computed=30), 9)], 1 << 20), {})

    def rotated(x: np.ndarray, **how: Any) -> np.ndarray:
        b = Builder()
        value = b.value(x.shape[1:])
        return Rotary(b.value(x.shape[1:]), value, r, **how).reference(run, x)

    out = rotated(x, first=4)
    assert same_bits(out[..., :4].copy(), x[..., :4].copy())
    assert same_bits(out[..., 4:].copy(), rotated(x[..., 4:].copy()))
    back = rotated(out, first=4, inverse=True)
    np.testing.assert_allclose(back, x, atol=2e-6)
    angle = -np.arange(30, 39, dtype=np.float32)[:, None] * r.frequencies()
    first, second = (slice(4, None, 2), slice(5, None, 2)) if turns else (slice(4, 7), slice(7, None))
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle.astype(float))[:, None]
    found = rotated(x, first=4, inverse=True)
    np.testing.assert_allclose(found[..., first] + 1j * found[..., second], turned, atol=2e-6)


def test_rows_of_one_batch_take_their_own_variant() -> None:
    r = rope({"type": "longrope", **LONG}, dim=8, original_max_position=1024)
    b = Builder()
    op = b.program(b.rotary(b.linear(b.embed(Names("e"), 2, 2), Names("w"), (1, 8)), r)).ops[-1]
    x = np.random.default_rng(0).standard_normal((40, 1, 8)).astype(np.float32)

    def outputs(*variants: int) -> np.ndarray:
        rows = [(Sequence([0] * 20, [i], variant), 20) for i, variant in enumerate(variants)]
        return op.reference(Run(batch_of(rows, 32), {}), x[: 20 * len(rows)])

    mixed = outputs(0, 1)
    assert same_bits(mixed[:20], outputs(0, 0)[:20])
    assert same_bits(mixed[20:], outputs(1, 1)[20:])
    assert not same_bits(mixed[20:], outputs(0, 0)[20:])


_LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "full", "sliding"),
    [
        ({}, ("default", 160_000.0, 1.0), ("default", 10_000.0, 1.0)),
        ({"rope_scaling": _LINEAR}, ("linear", 160_000.0, 2.0), ("linear", 10_000.0, 2.0)),
        (
            {"rope_parameters": {"full_attention": {**_LINEAR, "rope_theta": 500.0}}},
            ("linear", 500.0, 2.0),
            ("default", 10_000.0, 1.0),
        ),
    ],
    ids=str,
)
def test_modernbert_scales_by_layer_type(changes: dict[str, Any], full: Any, sliding: Any) -> None:
    raw = {**ENCODERS["ModernBert"], **changes}
    program = read_encoder("ModernBertModel", raw, Pooling("embed", "mean")).program
    ropes = [op.rope for op in program if isinstance(op, Rotary)]
    found = [(rope.rope_type, rope.theta, rope.factor) for rope in ropes]
    assert found == [full, full, sliding, sliding]
    with pytest.raises(ConfigError, match="rope parameters of full_attention"):
        read_encoder("ModernBertModel", {**raw, "rope_scaling": "yarn"}, Pooling("embed", "mean"))


def test_a_stated_length_scales_no_rope_without_a_factor() -> None:
    for kind in ("default", "proportional"):
        own = {"rope_type": kind, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 1024}
        close(rope(own).frequencies()[:4], plain()[:4])
