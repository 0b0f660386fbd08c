"""Interference in receipts against what it is: the time with a neighbour less the time without.

    python benchmarks/interference.py                        a prompt of 2,000 beside one answer of s135, int4
    python benchmarks/interference.py --streams 8            in both runs, so many others generate
    python benchmarks/interference.py --prompt 0 --answer 64   a neighbour that only generates

Runs come in pairs: an answer alone, and one during which a prompt comes; in half of the pairs the other way
round. A pair's error is interference / (time with - time without) - 1, of which the second is as noisy as the
machine: its spread between answers alone is printed beside, and medians decide. An answer alone must report
none at all. Before, warm-up steps of many sizes let the engine calibrate its law.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics

from peers import checkpoints

from quire import LLM, SamplingParams
from quire.engine.engine import Engine
from quire.types import NewRequest, RequestMetrics

WORDS, OWN_PROMPT, LATER = range(300, 1300), 32, 12  # the neighbour comes after so many tokens of the answer
LONE_SHARE, ERROR = 0.02, 0.15  # what is to be kept


class Pairs:
    """An engine that gives the same answer alone and beside others."""

    def __init__(self, engine: Engine, asked: argparse.Namespace) -> None:
        self.engine, self.asked = engine, asked
        self._numbers = itertools.count()
        self._random = random.Random(1)

    def add(self, num_prompt: int, num_tokens: int) -> str:
        """Add a request; nothing of its prompt is cached."""
        name = str(next(self._numbers))
        prompt = tuple(self._random.choices(WORDS, k=num_prompt))
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, seed=0, ignore_eos=True)
        self.engine.add(NewRequest(name, prompt, params, self.engine.clock()))
        return name

    def answer(self, beside: bool) -> RequestMetrics:
        """Return the times of an answer during which, if `beside`, the neighbour comes."""
        for _ in range(self.asked.streams):
            self.add(OWN_PROMPT, 4 * self.asked.tokens)
        for _ in range(8 if self.asked.streams else 0):
            self.engine.step()
        name, num_tokens, metrics = self.add(OWN_PROMPT, self.asked.tokens), 0, None
        while metrics is None:
            for output in self.engine.step():
                if output.request_id == name:
                    num_tokens += len(output.token_ids)
                    metrics = output.metrics if output.finish_reason else None
            if beside and num_tokens >= LATER:
                self.add(self.asked.prompt or OWN_PROMPT, self.asked.answer)
                beside = False
        for number in range(int(name) - self.asked.streams, int(name) + 2):
            self.engine.abort(str(number))
        self.finish()
        return metrics

    def finish(self) -> None:
        """Compute all that is open."""
        while self.engine.has_work:
            self.engine.step()

    def warm_up(self) -> None:
        """Compute steps of many sizes."""
        for num_prompt, num_rows in itertools.product((8, 40, 150, 600, 2000), (1, 4, 8)):
            for _ in range(num_rows):
                self.add(num_prompt, 12 if num_prompt > 100 else 40)
            self.finish()


def total_s(times: RequestMetrics) -> float:
    assert times.finished_s is not None
    return times.finished_s - times.arrival_s


def interference_s(times: RequestMetrics) -> float:
    return times.prefill_interference_s + times.decode_interference_s


def report(alone: list[RequestMetrics], beside: list[RequestMetrics], with_streams: bool) -> bool:
    """Print all pairs and what they say; return whether it is within the bounds."""
    own = [interference_s(times) for times in alone]
    added = [total_s(one) - total_s(other) for one, other in zip(beside, alone, strict=True)]
    told = [interference_s(times) - before for times, before in zip(beside, own, strict=True)]
    print(f"{'alone':>9} {'with':>9} {'added':>9} {'told':>9} {'of prompts':>11} {'error':>7}   (ms)")
    errors = []
    for one, other, more, said in zip(alone, beside, added, told, strict=True):
        errors.append(said / more - 1)
        prompts_ms = other.prefill_interference_s * 1e3
        figures = (total_s(one) * 1e3, total_s(other) * 1e3, more * 1e3, said * 1e3)
        print(" ".join(f"{figure:9.1f}" for figure in figures), f"{prompts_ms:11.1f} {errors[-1]:+7.1%}")
    error = statistics.median(told) / statistics.median(added) - 1
    within = sum(abs(one) <= ERROR for one in errors)
    spread = statistics.stdev(map(total_s, alone)) / statistics.mean(map(total_s, alone))
    lone = max(share / total_s(times) for share, times in zip(own, alone, strict=True))
    print(
        f"told over added, by medians: {error:+.1%}; median error of pairs {statistics.median(errors):+.1%}"
    )
    print(
        f"{within} of {len(errors)} pairs within {ERROR:.0%}; answers alone vary by {spread:.1%} (std. dev.)"
    )
    if with_streams:
        return abs(error) <= ERROR
    print(f"interference of an answer alone: at most {lone:.2%} (bound {LONE_SHARE:.0%})")
    return abs(error) <= ERROR and lone <= LONE_SHARE


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", default="s135", choices=sorted(checkpoints.SHAPES))
    parser.add_argument("--kind", default="int4", help="int4, int8 or bf16")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="of the answer")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the neighbour's prompt")
    parser.add_argument("--answer", type=int, default=1, help="tokens of the neighbour's answer")
    parser.add_argument("--streams", type=int, default=0, help="that generate in both runs of a pair")
    checkpoints.add_work_option(parser)
    asked = parser.parse_args()
    model = checkpoints.make(asked.model, asked.work)
    quantization = None if asked.kind == "bf16" else asked.kind
    llm = LLM(
        str(model),
        quantization=quantization,
        max_model_len=4096,
        max_num_seqs=asked.streams + 16,
        enable_prefix_caching=False,
        speculative="off",
    )
    pairs = Pairs(llm.engine, asked)
    pairs.warm_up()
    if not llm.engine.records[-1].predicted_s:
        raise SystemExit("the engine has no law of its steps: measure the ceilings with `quire probe`")
    alone, beside = [], []
    for number in range(asked.pairs):
        for with_prompt in ((False, True), (True, False))[number % 2]:
            (beside if with_prompt else alone).append(pairs.answer(with_prompt))
    if not report(alone, beside, asked.streams > 0):
        raise SystemExit("out of bounds")


if __name__ == "__main__":
    main()
