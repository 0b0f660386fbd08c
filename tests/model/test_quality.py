"""What rounding costs on trained models: against GGUF's formats, computed as their own engine does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_folders import tokenizer_of

from quire.backends.reference import ReferenceBackend
from quire.cli import quality_report as report
from quire.cli.main import main
from quire.config import EngineConfig
from quire.description import describe
from quire.program import WeightSpec, numerics
from quire.program.batch import Batch
from quire.quantize.quality import Quality, agreement, compare, divergence
from quire.quantize.round_to_nearest import quantize
from quire.weights.load import load

TEXT = Path(numerics.__file__).parents[1] / "assets" / "quality.txt"
BLOCK = 16


def groups_of_32(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)


def inverse(d: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def q8_0(x: np.ndarray) -> np.ndarray:
    """ggml's quantize_row_q8_0_ref and back, [n, in]: d = amax / 127 as f16, halves away from zero."""
    groups = groups_of_32(x)
    d = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    scaled = groups * inverse(d)
    q = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    return (q * d.astype(np.float16).astype(np.float32)).reshape(len(x), -1)[:, : x.shape[1]]


def q4_0(x: np.ndarray) -> np.ndarray:
    """ggml's quantize_row_q4_0_ref and back, [n, in]: d = m / -8 as f16, m of the largest magnitude."""
    groups = groups_of_32(x)
    m = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    d = m / np.float32(-8)
    q = np.minimum(15, np.trunc(groups * inverse(d) + np.float32(8.5)))
    return ((q - 8) * d.astype(np.float16).astype(np.float32)).reshape(len(x), -1)[:, : x.shape[1]]


class Foreign:
    """A matrix in Q8_0 or Q4_0. Its products round activations to Q8_0, and are exact beyond that."""

    def __init__(self, rounded: np.ndarray) -> None:
        self.rounded = rounded.astype(np.float64)

    def product(self, x: np.ndarray) -> np.ndarray:
        return (q8_0(x).astype(np.float64) @ self.rounded.T).astype(np.float32)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        return self.rounded[ids].astype(np.float32)

    def __getitem__(self, expert: int) -> Foreign:
        return Foreign(self.rounded[expert])


class Trained:
    """A trained model on the reference backend, its quantizable weights replaced at will."""

    def __init__(self, folder: Path) -> None:
        facts = describe(EngineConfig(model=str(folder)))
        self.program, self.specs = facts.program, facts.program.weights()
        self.weights: dict[str, Any] = dict(load(facts.weights))
        ids = tokenizer_of(folder).encode(TEXT.read_text())
        self.texts = [ids[i : i + 500] for i in range(0, len(ids), 500)]
        self.base = [self.logits(text, self.weights) for text in self.texts]

    def logits(self, ids: list[int], weights: dict[str, Any], **options: Any) -> np.ndarray:
        blocks, n = np.arange(-(-len(ids) // BLOCK))[None], len(ids)
        groups = len(self.program.cache_groups)
        size = {"num_blocks": [blocks.size] * groups, "block_size": BLOCK}
        backend, tables = ReferenceBackend(self.program, weights, **size, **options), (blocks,) * groups
        zero, every = np.zeros(1, np.int64), np.arange(n)
        return backend.execute(
            Batch(np.array(ids), every, np.array([0, n]), tables, np.array([n]), zero, zero, every, BLOCK)
        )

    def quality(
        self, change: Callable[[WeightSpec, np.ndarray], Any], most_texts: int | None = None
    ) -> Quality:
        weights = {
            name: change(self.specs[name], weight.dense()) if self.specs[name].quantizable else weight
            for name, weight in self.weights.items()
        }
        pairs = list(zip(self.base, self.texts, strict=True))[:most_texts]
        return compare((base, self.logits(text, weights)) for base, text in pairs)


@cache
def trained(folder: Path) -> Trained:
    return Trained(folder)


@pytest.fixture(params=["demo", "stories260K"])
def model(request: pytest.FixtureRequest, demo_folder: Path) -> Trained:
    if request.param == "demo":
        return trained(demo_folder)
    return trained(request.getfixturevalue("shared_data") / "models" / request.param)


def test_int4_diverges_no_more_than_q4_0(model: Trained) -> None:
    ours = model.quality(lambda spec, w: quantize(spec, w, "int4"))
    theirs = model.quality(lambda spec, w: Foreign(q4_0(w)))
    assert 0.01 < ours.mean <= theirs.mean
    assert ours.agreement >= theirs.agreement


def test_int8_diverges_no_more_than_q8_0(model: Trained) -> None:
    """To within what chance decides (two standard errors); a hundredth of what int4 does."""
    ours = model.quality(lambda spec, w: quantize(spec, w, "int8"))
    theirs = model.quality(lambda spec, w: Foreign(q8_0(w)))
    assert 1e-4 < ours.mean < 0.003
    assert ours.mean <= theirs.mean + 2 * math.hypot(ours.error, theirs.error)
    assert ours.agreement > 0.95


def random(seed: int, rows: int, vocab: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def test_divergence_is_the_formula() -> None:
    base, other = random(0, 7, 50), random(1, 7, 50)
    for row, nats in enumerate(divergence(base, other)):
        p, q = (
            [math.exp(float(x)) / math.fsum(math.exp(float(y)) for y in v) for x in v]
            for v in (base[row], other[row])
        )
        assert nats == pytest.approx(math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))


def test_divergence_of_equals_is_nothing_and_of_others_is_positive() -> None:
    base = random(0, 9, 300)
    assert np.abs(divergence(base, base + np.float32(2))).max() < 1e-12
    assert (divergence(base, random(1, 9, 300)) > 0.1).all()
    extreme = np.array([[1e4, 0, -1e4], [0, 0, 0]], np.float32)
    assert divergence(extreme, extreme).tolist() == [0, 0]
    assert divergence(extreme, extreme[:, ::-1])[0] == pytest.approx(2e4)
    assert divergence(base[:0], base[:0]).shape == (0,)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    base, other = random(0, 20, 64), random(1, 20, 64)
    whole = divergence(base, other)
    monkeypatch.setattr("quire.quantize.quality._BLOCK", 64 * 3)
    assert divergence(base, other).tobytes() == whole.tobytes()


def test_agreement_and_summary() -> None:
    base = np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0]]
    other = np.eye(4, dtype=np.float32)[[0, 1, 3, 3, 1]]
    assert agreement(base, other).tolist() == [True, True, False, True, False]
    found = compare([(base[:2], other[:2]), (base[2:], other[2:])])
    nats = divergence(base, other)
    assert (found.positions, found.agreement) == (5, 0.6)
    assert found.mean == pytest.approx(nats.mean())
    assert found.error == pytest.approx(nats.std() / math.sqrt(5))
    assert found.worst == pytest.approx(nats.max())


def inspect(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *words])
    return int(ended.value.code or 0)


def test_the_report(
    demo_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `quire inspect --quality` measures is what the other tests here measure, of the first text."""
    model = trained(demo_folder)
    monkeypatch.setattr(report, "MOST_LOGITS", model.base[0].size)
    assert (
        inspect("demo", "--quality", "--json", "--device", "reference", "--max-num-batched-tokens", "99") == 0
    )
    by_name = {row["stored"]: row for row in json.loads(capsys.readouterr().out)["quality"]}
    assert list(by_name)[:2] == ["int8 weights", "int4 weights"]
    assert {"float16 KV cache", "bfloat16 KV cache"} <= set(by_name)
    for name, bits in (("int8", 8.25), ("int4", 4.25)):
        row = by_name[f"{name} weights"]
        here = model.quality(lambda spec, w, name=name: quantize(spec, w, name), most_texts=1)
        assert (row["mean"], row["agreement"]) == (here.mean, here.agreement)  # the same bits
        assert row["positions"] == len(model.texts[0])
        assert bits < row["bits"] < bits + 0.2
    half, short = by_name["float16 KV cache"], by_name["bfloat16 KV cache"]
    assert 0 < half["mean"] < short["mean"] / 10 < by_name["int8 weights"]["mean"] / 10
    assert half["bits"] == short["bits"] == 16


def test_the_report_as_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_folder: Path
) -> None:
    monkeypatch.setattr("quire.cli.quality_report.MOST_LOGITS", 2048 * 40)
    options = ("--device", "reference", "--quality")
    assert inspect("demo", *options, "--quantization", "int4") == 0
    shown = capsys.readouterr().out
    for words in (
        "over 40 tokens",
        "int4 weights",
        "4.37",
        "float16 KV cache",
        "KL: divergence",
        "parameters",
    ):
        assert words in shown
    assert "int8 weights" not in shown
    assert inspect("demo", "--quality", "--device", "null") == 1
    assert "computes nothing" in capsys.readouterr().err
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(demo_folder / name)
    assert inspect(str(tmp_path), *options) == 1
    assert "no tokenizer" in capsys.readouterr().err


def test_scales_of_an_int8_cache_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_LOGITS", 2048 * 20)
    found = {loss.stored: loss.bits for loss in report.measure("demo", {}, lambda *told: None)}
    head_dim = describe(EngineConfig()).model.config.head_dim
    assert found["int8 KV cache"] == 8 + 32 / head_dim
    assert found["float16 KV cache"] == found["bfloat16 KV cache"] == 16


def test_the_report_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_LOGITS", 2048 * 150)
    options = {"device": "reference", "quantization": "int8"}
    seen: list[tuple[str, int, int]] = []
    whole, chunked = (
        report.measure("demo", {**options, "max_num_batched_tokens": n}, lambda *told: seen.append(told))
        for n in (512, 37)
    )
    assert whole == chunked
    assert whole[0].quality.positions == 150
    once = seen[: len(seen) // 2]
    assert [name for name, _, _ in once] == ["original", *(loss.stored for loss in whole)]
    assert [done for _, done, _ in once] == [150 * i for i in range(len(once))]
    assert {total for _, _, total in once} == {150 * len(once)}
