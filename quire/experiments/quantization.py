"""The experiment "quantization": the demo in bf16, int8 and int4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from statistics import median

from quire.experiments.demo import QUESTION, DemoEngine, question
from quire.experiments.parameters import Line, QuantizationParameters
from quire.text.detokenize import Detokenizer

KINDS = {"bf16": None, "int8": "int8", "int4": "int4"}  # the first is the demo as stored
_Answers = dict[str, list[int]]


def run(asked: QuantizationParameters) -> Iterator[Line]:
    """Answer one question with each kind of weights, step by step in turns; yield figures of each kind.

    Times are medians of the steps after the first, which computes the prompt.
    """
    engines: dict[str, DemoEngine] = {}
    for kind, quantization in KINDS.items():
        engines[kind] = DemoEngine(quantization=quantization)
        yield {"progress": len(engines) / (len(KINDS) + asked.rounds + 1)}
    prompt, ends = question(engines["bf16"])
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    answers: _Answers = {}
    for number in range(asked.rounds + 1):  # the first is not counted: memory and caches are cold
        answers, found = _answer(engines, prompt, ends, asked.num_tokens)
        for kind, seconds in found.items():
            times[kind] += seconds[1:] if number else []
        yield {"progress": (len(KINDS) + number + 1) / (len(KINDS) + asked.rounds + 1)}
    for kind, engine in engines.items():
        memory = engine.description.memory
        yield {
            "kind": {
                "kind": kind,
                "weight_bytes": memory.weight_bytes,
                **engine.step_bytes(1, len(prompt)),
                "token_ms": 1e3 * median(times[kind]),
                "num_steps": len(times[kind]),
                "pieces": _pieces(engine, prompt, answers[kind]),
                "first_difference": _difference(engines, prompt, answers, kind),
            }
        }
    yield {"done": {"question": QUESTION, "prompt_tokens": len(prompt), "rounds": asked.rounds}}


def _answer(
    engines: dict[str, DemoEngine], prompt: Sequence[int], ends: tuple[int, ...], num_tokens: int
) -> tuple[_Answers, dict[str, list[float]]]:
    """Return the answer of each engine and the times of its steps."""
    answers: _Answers = {kind: [] for kind in engines}
    times: dict[str, list[float]] = {kind: [] for kind in engines}
    for engine in engines.values():
        engine.start(prompt, num_tokens, ends=ends)
    while any(engine.has_work for engine in engines.values()):
        for kind, engine in engines.items():
            if engine.has_work:
                step = engine.step()
                answers[kind] += step.token_ids
                times[kind].append(step.seconds)
    return answers, times


def _pieces(engine: DemoEngine, prompt: Sequence[int], answer: Sequence[int]) -> list[str]:
    """Return the text of each token; together they are the text of the answer."""
    reader = Detokenizer(engine.tokenizer(), prompt)
    pieces = [reader.push([token]) for token in answer]
    return [*pieces[:-1], pieces[-1] + reader.finish()]


def _difference(
    engines: dict[str, DemoEngine], prompt: Sequence[int], answers: _Answers, kind: str
) -> Line | None:
    """Return where an answer first differs from that in bf16, and by how much; None if it does not.

    The gaps are log-probabilities, of the own choice less that of the other kind, after the tokens that are
    equal: None if the other's choice is not among the 20 most likely.
    """
    base, other = answers["bf16"], answers[kind]
    found = next((i for i, (a, b) in enumerate(zip_longest(base, other)) if a != b), None)
    if found is None:
        return None
    difference: Line = {"index": found, "bf16_gap": None, "own_gap": None}
    if found < min(len(base), len(other)):
        known = [*prompt, *base[:found]]
        difference["bf16_gap"] = _gap(engines["bf16"], known, base[found], other[found])
        difference["own_gap"] = _gap(engines[kind], known, other[found], base[found])
    return difference


def _gap(engine: DemoEngine, known: Sequence[int], chosen: int, other: int) -> float | None:
    logprobs = {one.token_id: one.logprob for one in engine.logprobs(known)}
    return logprobs[chosen] - logprobs[other] if {chosen, other} <= logprobs.keys() else None
