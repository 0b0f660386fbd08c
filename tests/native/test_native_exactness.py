"""The exactness contract of the native backend: the bits of a row's logits depend on its tokens alone.

Not on the rows beside it, where chunks begin, how many threads compute, or how long blocks are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from lowered import FORMATS, ISAS, on_native, plain, tensors
from tiny import CONFIGS, VOCAB, Paged, batch_of, random_weights, same_bits, tiny

from quire.errors import ConfigError
from quire.models import Model, read_model
from quire.program.passes import fuse

BEST, PORTABLE = ISAS[0], ISAS[-1]
KV_DTYPES = ("float32", "float16", "bfloat16", "int8")

# Wider than the tiny ones: several panels of outputs and groups of inputs, and contexts of several segments.
_WIDE = {
    **CONFIGS["qwen3"],
    "hidden_size": 80,
    "intermediate_size": 150,
    "head_dim": 24,
    "max_position_embeddings": 2048,
}
_WIDE_EXPERTS = {
    **CONFIGS["gpt_oss"],
    "hidden_size": 80,
    "intermediate_size": 70,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,  # of two, a sum has no order
    "head_dim": 10,
    "sliding_window": 600,
}


_WIDE_CHOICE = {
    **CONFIGS["glm_moe_dsa"],
    "hidden_size": 80,
    "num_attention_heads": 40,
    "kv_lora_rank": 20,
    "index_topk": 530,
    "index_head_dim": 20,
    "max_position_embeddings": 2048,
}


_WIDE_ENTRIES = {
    **CONFIGS["deepseek_v4"],
    "hidden_size": 80,
    "num_attention_heads": 6,
    "head_dim": 24,
    "qk_rope_head_dim": 8,
    "sliding_window": 100,
    "index_topk": 70,
    "index_head_dim": 20,
    "max_position_embeddings": 2048,
}


@cache
def model_of(name: str) -> Model:
    wide = {"wide": _WIDE, "wide-experts": _WIDE_EXPERTS, "wide-choice": _WIDE_CHOICE}
    wide |= {"wide-entries": _WIDE_ENTRIES}
    return read_model(wide[name]) if name in wide else tiny(name)


def load(
    name: str, format: str = "f32", isa: str = BEST, threads: int = 1, spoil: float | None = None, **how: Any
) -> Paged:
    """`spoil` is put into the embedding of token 5."""
    program = plain(fuse(model_of(name).program))
    weights = random_weights(program)
    if spoil is not None:
        weights["model.embed_tokens.weight"].array[5, 77] = spoil
    return on_native(program, tensors(weights, format), format, isa, threads, **{"num_blocks": 400, **how})


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def alone(name: str, tokens: list[list[int]], *how: Any, **options: Any) -> list[np.ndarray]:
    """Each sequence whole and by itself, one thread."""
    paged = load(name, *how, **options)
    variant = model_of(name).context_variant
    return [paged.prefill(paged.sequence(ids, variant(len(ids)))) for ids in tokens]


def together(paged: Paged, name: str, tokens: list[list[int]], chunks: list[int], seed: int = 0) -> list:
    """All sequences to their end, in steps of some of them, by these numbers of tokens."""
    rng, variant = np.random.default_rng(seed), model_of(name).context_variant
    sequences = [paged.sequence(ids, variant(len(ids))) for ids in tokens]
    parts: list[list[np.ndarray]] = [[] for _ in sequences]
    while left := [i for i, s in enumerate(sequences) if s.computed < len(s.token_ids)]:
        some = rng.permutation(left)[: rng.integers(1, len(left) + 1)].tolist()
        rows = [
            (sequences[i], min(int(rng.choice(chunks)), len(sequences[i].token_ids) - sequences[i].computed))
            for i in some
        ]
        for i, logits in zip(some, paged.step(rows), strict=True):
            parts[i].append(logits)
    return [np.concatenate(part) for part in parts]


def all_same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def ways() -> Iterator[tuple[str, str, str, str, int]]:
    """(model, format of weights, of the cache, instruction set, block size): all of the best set, some of
    the others.
    """
    for name in ("wide", "wide-experts"):
        for i, format in enumerate(FORMATS):
            for j, dtype in enumerate(KV_DTYPES):
                block_size = (8, 32)[(i + j) % 2]
                yield name, format, dtype, BEST, block_size
                if i % 4 == j:
                    yield from ((name, format, dtype, isa, block_size) for isa in ISAS[1:])


@pytest.mark.parametrize(("name", "format", "dtype", "isa", "block_size"), list(ways()))
def test_any_schedule(name: str, format: str, dtype: str, isa: str, block_size: int) -> None:
    """Mixed batches of chunks and single tokens, over the borders of partitions, with two threads."""
    tokens = prompts([90, 1, 64, 33, 65, 7])
    how = {"format": format, "isa": isa, "kv_cache_dtype": dtype}
    expected = alone(name, tokens, **how)
    paged = load(name, **how, threads=2, block_size=block_size)
    assert all_same(together(paged, name, tokens, [1, 7, 64]), expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("wide", dtype) for dtype in KV_DTYPES),
        *((name, dtype) for name in ("wide-choice", "wide-entries") for dtype in ("bfloat16", "int8")),
        ("wide-experts", "float32"),
    ],
)
def test_contexts_of_several_segments(name: str, dtype: str) -> None:
    """1,100 positions: few rows of long contexts are cut among threads, and put together again."""
    tokens = prompts([1100, 530, 40])
    expected = alone(name, tokens, kv_cache_dtype=dtype)
    for block_size, threads, chunks in ((16, 4, [64, 300]), (64, 2, [2000])):
        paged = load(name, threads=threads, block_size=block_size, kv_cache_dtype=dtype)
        assert all_same(together(paged, name, tokens, chunks), expected)
    paged = load(name, threads=4, kv_cache_dtype=dtype)
    sequence = paged.sequence(tokens[0])
    paged.step([(sequence, 1080)])
    for position in range(1080, 1100):  # one row alone, by all threads
        (logits,) = paged.step([(sequence, 1)])
        assert same_bits(logits, expected[0][position : position + 1])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family(name: str) -> None:
    tokens = prompts([100, 3, 67, 40])
    expected = alone(name, tokens, isa=BEST)
    for block_size, threads in ((8, 1), (64, 3)):
        paged = load(name, isa=BEST, threads=threads, block_size=block_size)
        assert all_same(together(paged, name, tokens, [1, 5, 30, 64], seed=block_size), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_any_number_of_rows(format: str, isa: str) -> None:
    """1 to 20 sequences that are a token further each step: every place in a tile, every rest of one."""
    tokens = prompts(list(range(21, 41)))
    how = {"format": format, "isa": isa}
    expected = alone("wide", tokens, **how)
    paged = load("wide", **how, threads=2)
    sequences = [paged.sequence(ids) for ids in tokens]
    paged.step([(s, 1) for s in sequences])
    for count in range(1, 21):
        chosen = sequences[20 - count :] if count % 2 else sequences[:count]
        for sequence, logits in zip(chosen, paged.step([(s, 1) for s in chosen]), strict=True):
            at = sequence.computed - 1
            assert same_bits(logits, expected[sequences.index(sequence)][at : at + 1]), count


@pytest.mark.parametrize("isa", ISAS)
def test_logits_of_chosen_rows(isa: str) -> None:
    for name, format in (("wide", "int8"), ("wide-experts", "f32")):
        paged = load(name, format, isa, threads=2)
        first, second = prompts([20, 3])
        rows = [(paged.sequence(first), 20), (paged.sequence(second), 3)]
        whole = np.array(paged.backend.execute(batch_of(rows, 16, ids=paged.ids)))
        for some in ([19, 22, 4], [22], [], list(range(23))[::-1]):
            wanted = np.array(some, np.int64)
            found = np.array(paged.backend.execute(batch_of(rows, 16, wanted, paged.ids)))
            assert same_bits(found, whole[wanted])


@pytest.mark.parametrize("name", ["wide", "wide-experts"])
def test_many_short_steps_by_several_threads(name: str) -> None:
    """Threads that meet too early or too late show here: 200 steps must give the bits of one thread."""
    tokens = prompts([150] * 6)
    runs = []
    for threads in (1, 2, 4):
        paged = load(name, threads=threads)
        sequences, found = [paged.sequence(ids) for ids in tokens], []
        rng = np.random.default_rng(5)
        for _ in range(200):
            some = rng.permutation(6)[: rng.integers(1, 7)].tolist()
            rows = [(sequences[i], int(rng.choice([1, 1, 2, 9, 33]))) for i in some]
            for sequence, count in rows:
                sequence.computed %= 150 - count  # those at their end begin anew, over the same blocks
            found += paged.step(rows)
        runs.append(found)
    assert all(all_same(run, runs[0]) for run in runs[1:])


@pytest.mark.parametrize("isa", ISAS)
def test_what_a_row_does_depend_on_changes_its_bits(isa: str) -> None:
    """The control: another token in the past, another format, other arithmetic."""
    (tokens,) = prompts([70])
    (whole,) = alone("wide", [tokens], isa=isa)
    other = [*tokens[:3], (tokens[3] + 1) % VOCAB, *tokens[4:]]
    (changed,) = alone("wide", [other], isa=isa)
    assert same_bits(changed[:3], whole[:3])
    assert not (changed[3:] == whole[3:]).all(axis=-1).any()
    for option in ({"kv_cache_dtype": "float16"}, {"kv_cache_dtype": "int8"}, {"format": "f16"}):
        assert not same_bits(alone("wide", [tokens], isa=isa, **option)[0], whole)
    if PORTABLE == "portable":  # products there are rounded before they are added; on ARM nowhere
        elsewhere = alone("wide", [tokens], isa=PORTABLE if isa != PORTABLE else BEST)
        assert not same_bits(elsewhere[0], whole)


def test_a_cached_prefix_counts() -> None:
    """Two sequences that share blocks of a prefix, as after a cache hit, and one with blocks of another."""
    (tokens,) = prompts([60])
    (whole,) = alone("wide", [tokens])
    paged = load("wide", threads=2)
    first = paged.sequence(tokens)
    paged.step([(first, 60)])
    hit, miss = paged.sequence(tokens), paged.sequence(tokens)
    stranger = paged.sequence(prompts([60], seed=1)[0])
    paged.step([(stranger, 60)])
    hit.blocks[:2], miss.blocks[:2] = first.blocks[:2], stranger.blocks[:2]
    hit.computed = miss.computed = 32
    found, wrong = paged.step([(hit, 28), (miss, 28)])
    assert same_bits(found, whole[32:])
    assert not same_bits(wrong, whole[32:])


# What is not a number


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_a_number_reaches_the_logits(format: str, isa: str) -> None:
    """In an activation, by the embedding of a token. Other sequences have the bits they have alone."""
    for name, bad in (("wide", np.nan), ("wide", np.inf), ("wide-experts", np.nan)):
        healthy, ill = [1, 2, 3] * 9, [1, 2, 5, 3, 4]
        paged = load(name, format, isa, threads=2, spoil=bad)
        rows = [(paged.sequence(ids), len(ids)) for ids in (healthy, ill)]
        clean, lost = paged.step(rows)
        assert np.isnan(lost[2:]).all(axis=-1).all()
        assert all_same([clean], alone(name, [healthy], format=format, isa=isa))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_shared_prefix_is_not_harmed_by_what_follows_it(dtype: str, isa: str) -> None:
    """A token whose numbers are not finite, and a request that finds the blocks before it in the cache."""
    for name, bad in (("wide", np.nan), ("wide", np.inf), ("wide-experts", np.inf)):
        paged = load(name, isa=isa, spoil=bad, kv_cache_dtype=dtype, block_size=8)
        prefix = [1, 2, 3] * 8
        (expected,) = alone(name, [[*prefix, 8, 9]], isa=isa, kv_cache_dtype=dtype)
        first, second = paged.sequence([*prefix, 5, 7]), paged.sequence([*prefix, 8, 9])
        lost = paged.prefill(first, [1])  # then tiles of rows hold the prefix's last token and the next
        second.blocks[:3], second.computed = first.blocks[:3], 24
        assert np.isnan(lost[24:]).all(axis=-1).all()
        assert all_same([lost[:24], paged.prefill(second)], [expected[:24], expected[24:]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_a_number_in_a_weight_reaches_the_logits(format: str, isa: str) -> None:
    """Integers cannot hold it: loading refuses weights that it would have to round."""
    program = plain(fuse(model_of("wide").program))
    for name, spec in program.weights().items():
        weights = random_weights(program)
        weights[name].array.flat[-1] = np.nan  # of the embedding: the last token
        checkpoint = tensors(weights, format)
        if format in ("int8", "int4") and spec.quantizable:
            with pytest.raises(ConfigError, match="not finite"):
                on_native(program, checkpoint, format, isa)
        else:
            paged = on_native(program, checkpoint, format, isa)
            logits = paged.prefill(paged.sequence([VOCAB - 1, 2, 3]))
            assert np.isnan(logits).any(axis=-1).all(), name
