"""Encoders and vectors of texts on the interpreted accelerator: those of the reference, in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowered import OneOp, distance
from on_accelerator import interpreted, wide_config
from tiny import Dense, Paged, batch_of, random_weights, same_bits
from tiny_encoders import ENCODERS, write_bert, write_decoder

from quire import LLM
from quire.backends.cuda.kernels.variants import variants
from quire.backends.cuda.refused import require_kernels
from quire.errors import ConfigError
from quire.models.encoders import read_encoder
from quire.models.pooling import attend_both
from quire.models.purpose import Pooling
from quire.program import Program, WeightSpec
from quire.program.ops.attention import Distances
from quire.program.passes import fuse
from quire.quantize.kinds import FloatStorage
from quire.quantize.round_to_nearest import SCHEMES

SIZES = {"hidden_size": 64, "intermediate_size": 32, "dim": 64, "hidden_dim": 32, "num_hidden_layers": 1}
SIZES |= {"n_layers": 1}
# Of one token, of two segments, and of more than a reach and a partition of attention.
TEXTS = [[2, 9, 3], [2, 7, 8, 3, 11, 12, 3], [5], [2, *range(5, 40), 3]]


def encoder(name: str, method: Any = "mean") -> Program:
    config = {key: SIZES.get(key, value) for key, value in ENCODERS[name].items()}
    if name == "ModernBert":  # whose first layer sees everything, and the second one its reach
        config["num_hidden_layers"] = 2
    return fuse(read_encoder(f"{name}Model", config, Pooling("embed", method, separator=3)).program)


def vectors(paged: Paged, texts: list[list[int]]) -> np.ndarray:
    rows = [(paged.sequence(text), len(text)) for text in texts]
    last = np.cumsum([len(text) for text in texts]) - 1
    return np.array(paged.backend.execute(batch_of(rows, paged.block_size, last, ids=())))


@pytest.mark.parametrize(
    ("name", "method"), [("Bert", "mean"), ("Roberta", "cls"), ("ModernBert", "mean"), ("MPNet", "mean")]
)
def test_texts_of_a_step(name: str, method: str) -> None:
    program = encoder(name, method)
    weights = random_weights(program)
    wanted = vectors(Paged(program, weights), TEXTS)
    own = Paged(program, weights, make=interpreted)
    found = vectors(own, TEXTS)
    assert np.abs(found - wanted).max() < 2e-5 * np.abs(wanted).max()
    for place in (1, 3):
        assert same_bits(vectors(own, TEXTS[place : place + 1]), found[place : place + 1])
    keys = {key for key in own.backend._accelerator.loaded if key.startswith(("attend", "pool"))}  # type: ignore[attr-defined]
    assert keys <= {variant.key for variant in variants()}


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "reach", "longest"),
    [(4, 2, 8, None, 150), (3, 1, 64, None, 512), (6, 6, 16, 30, 200), (2, 2, 64, 1, 160)],
)
def test_biases_of_distances(heads: int, groups: int, dim: int, reach: int | None, longest: int) -> None:
    """Texts that fill partitions and tiles, or do not: near the reference, and with the bits of one alone."""
    lengths, rng = (150, 1, 65, 64, 20), np.random.default_rng(longest)
    sizes = ((heads, dim), (groups, dim), (groups, dim))
    inputs = [2 * rng.standard_normal((sum(lengths), *size)).astype(np.float32) for size in sizes]
    biases = Distances(WeightSpec("distances", (32, heads), ("distances",)), longest)
    op = OneOp(inputs, lambda b, q, k, v: attend_both(b, q, k, v, reach, biases=biases), lengths)
    op.weights["distances"] = Dense(rng.standard_normal((32, heads)).astype(np.float32))
    wanted, own = op.run(Paged(op.program, op.weights)), Paged(op.program, op.weights, make=interpreted)
    found = op.run(own)
    assert distance(found, wanted) < 3e-6
    text = own.sequence(range(151, 216))
    assert same_bits(own.step([(text, 65)])[0], found[151:216])


def test_what_is_not_finite_stays_in_its_text() -> None:
    """Its tile has tokens of other texts, which keep their bits."""
    program = encoder("MPNet")
    weights = random_weights(program)
    wanted = vectors(Paged(program, weights, make=interpreted), TEXTS[:3])
    weights["embeddings.word_embeddings.weight"].array[8] = np.nan  # of the second text alone
    found = vectors(Paged(program, weights, make=interpreted), TEXTS[:3])
    assert np.isnan(found[1]).all()
    assert same_bits(found[[0, 2]], wanted[[0, 2]])


def test_biases_of_distances_in_codes_are_refused() -> None:
    program = encoder("MPNet")
    storage = {name: FloatStorage("f32") for name in program.weights()}
    require_kernels(program, storage)
    table = "encoder.relative_attention_bias.weight"
    with pytest.raises(ConfigError, match="biases of distances in int8"):
        require_kernels(program, {**storage, table: SCHEMES["int8"].storage})


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_engines(tmp_path: Path, kind: str) -> None:
    """Encoders, and decoders whose vector is a hidden state: alone, together, and on the reference."""
    if kind == "bert":
        folder = write_bert(tmp_path / kind, **SIZES)
    else:
        folder = write_decoder(tmp_path / kind, wide_config("qwen3", num_hidden_layers=1), "last")
    texts, found = ["the fox", "a", "one lantern and a fox"], []
    for device in ("reference", "cuda-interpreted"):
        with LLM(str(folder), device=device) as llm:
            found.append([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])
            alone = llm.embed(texts[2:], use_tqdm=False)[0].outputs.embedding
            assert alone == found[-1][2]
    assert np.abs(np.array(found[0]) - np.array(found[1])).max() < 1e-5
