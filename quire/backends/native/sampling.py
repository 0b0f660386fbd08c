"""Sampling by the native core: convert admissions to its parameters, and its results to RowResults."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from quire.backends.native import _core
from quire.sampling.faults import FAULTS
from quire.types import Admission, PositionLogprobs, RowResult, TokenLogprob


def slot_params(admission: Admission, vocab_size: int) -> _core.SlotParams:
    """Return the sampling parameters of a sequence.

    Token ids must be in the vocabulary and the seed a number, as for SamplerState.
    """
    params = admission.params
    if params.seed is None:
        raise ValueError("a sampler needs a seed: resolve None before admission")
    # The tokenizer may have an end token that the model cannot produce.
    stop_ids = {*params.stop_token_ids, *(i for i in admission.eos_token_ids if i < vocab_size)}
    return _core.SlotParams(
        params.temperature,
        params.top_p,
        params.min_p,
        params.top_k,
        params.seed,
        admission.sequence,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        bias_ids=list(params.logit_bias),
        biases=list(params.logit_bias.values()),
        allowed_ids=params.allowed_token_ids,
        bad_words=params.bad_words_token_ids,
        stop_ids=sorted(stop_ids),
        min_tokens=params.min_tokens,
        num_prompt_tokens=admission.num_prompt_tokens,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def row_results(results: _core.SampledResults) -> tuple[RowResult, ...]:
    """Return the results of a step's rows, in their order."""
    if results.plain:
        return tuple([RowResult((token_id,)) for token_id in results.token_ids])
    token_ids, positions, found = iter(results.token_ids), _positions(results), []
    rows = zip(results.counts, results.scored, results.listed, results.faults, strict=True)
    for num_tokens, num_scored, num_listed, fault in rows:
        scored = tuple(islice(positions, num_scored))
        listed = tuple(islice(positions, num_listed))
        found.append(RowResult(tuple(islice(token_ids, num_tokens)), listed, scored, FAULTS[fault]))
    return tuple(found)


def _positions(results: _core.SampledResults) -> Iterator[PositionLogprobs]:
    """Yield the log-probabilities of each position: of its token, then of the most likely ones."""
    ids, logprobs, first = results.listed_ids, results.logprobs, 0
    for rank, count in zip(results.ranks, results.entries, strict=True):
        end = first + count
        ranks = (rank, *range(1, count))
        yield tuple(map(TokenLogprob, ids[first:end], logprobs[first:end], ranks))
        first = end
