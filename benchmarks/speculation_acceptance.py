"""Drafting from texts, offline: real texts, the real drafter and rule, and steps on a virtual clock.

    python benchmarks/speculation_acceptance.py --data TEXTS --tokenizer LLAMA_3
    python benchmarks/speculation_acceptance.py --data TEXTS --tokenizer GPT_2 --device "l1b int8"
    python benchmarks/speculation_acceptance.py --data TEXTS --tokenizer GPT_2 --supports
    python benchmarks/speculation_acceptance.py --data TEXTS --tokenizer GPT_2 --latency

One stream: an engine is made to answer with the published answers, and its steps take the times measured for
the device (docs/performance.md) with lines between them. The time that the drafter itself takes is measured
and added. "own" drafts come from the text before, each request having a salt of its own; "shared" ones from
all earlier answers of the kind, too. "tokens" are those of a step, "ratio" is the time without drafts over
the time with them, from first to last token of all texts, and "worst" the least of a text with at least 32
tokens. `--supports` prints how often a drafted token was right whose predecessors were, by how many tokens
before it agree: those of the match and of the draft. `--latency` measures the drafter's own calls instead.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from speculating import texts
from speculating.texts import KINDS, Text

from quire.bench.report import columns
from quire.engine.caches import BlockGroup
from quire.engine.engine import Engine
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, TOKENS
from quire.sampling_params import SamplingParams
from quire.simulation.clock import VirtualClock
from quire.speculate.text_drafter import TextDrafter
from quire.types import Draft, NewRequest, Output, RowResult, Step, StepResult

# Milliseconds of a step of 1, 4 and 16 tokens.
DEVICES = {
    "l1b int4": (21.6, 23.5, 57.1),
    "l1b int8": (38.9, 41.8, 65.3),
    "s135 int4": (2.65, 3.6, 9.9),
    "s135 int8": (5.2, 6.0, 11.1),
}
HOST_S, DRAFTING_S = 60e-6, 60e-6  # between two steps, and what looking for drafts adds to that
LONG = 32
HEADING = ["device", "text", "drafts", "tokens", "ratio", "worst", "accepted", "drafter, us/step"]
SUPPORTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 25, 33)  # the first of each class


def law_of(device: str) -> StepLaw:
    """Return a law that goes through the device's times, in straight lines that grow steeper."""
    one, four, many = (1e-3 * ms for ms in DEVICES[device])
    flat, steep = (four - one) / 3, (many - four) / 12

    def by_tokens(constant: float, each: float) -> tuple[float, ...]:
        return (constant, *(each * (i == TOKENS) for i in range(1, len(LEADING))))

    stage = Stage(by_tokens(4 * (steep - flat), 0), by_tokens(0, steep - flat))
    overhead = by_tokens(one - flat - 4 * (steep - flat), flat)
    return StepLaw(LEADING, (stage,), overhead, (stage,), host_s=HOST_S, drafting_s=DRAFTING_S)


class SayingRunner:
    """A runner that answers with given texts, and whose steps take the time that a law says."""

    def __init__(self, law: StepLaw, clock: VirtualClock) -> None:
        self.said: dict[str, tuple[int, ...]] = {}  # prompt and answer, by request
        self._law, self._clock = law, clock
        self._slots: dict[int, tuple[int, ...]] = {}
        self._free_s = 0.0

    def launch(self, step: Step) -> Ended:
        """Begin a step as soon as the device is free, after the host's time."""
        clock = self._clock
        clock.advance_to(clock.now_s + self._law.host_s)
        began_s = max(clock.now_s, self._free_s)
        for admission in step.admitted:
            self._slots[admission.slot] = self.said[admission.request_id]
        results = []
        for row in step.rows:
            said, next_token = self._slots[row.slot], row.start + row.count - len(row.drafted)
            following = said[next_token : next_token + len(row.drafted)]
            pairs = enumerate(zip(row.drafted, following, strict=False))
            num_right = next((i for i, (drafted, token) in pairs if drafted != token), len(following))
            given = (*said[next_token : next_token + num_right + 1], 0)[: num_right + 1]
            results.append(RowResult(given if row.sample else ()))
        rows = [(row.start, row.count) for row in step.rows]
        num_logits = sum(row.num_logits for row in step.rows)
        self._free_s = began_s + self._law.seconds(self._law.values(rows, num_logits))
        return Ended(clock, StepResult(tuple(results), began_s, self._free_s))


class Ended:
    """A launched step."""

    def __init__(self, clock: VirtualClock, answer: StepResult) -> None:
        self._clock, self._answer = clock, answer

    def result(self) -> StepResult:
        """Let time pass until the device has ended it."""
        self._clock.advance_to(self._answer.ended_s)
        return self._answer


class TimedDrafter:
    """The drafter of texts, whose time passes on the virtual clock, and what its drafts were worth."""

    def __init__(self, said: dict[str, tuple[int, ...]], clock: VirtualClock) -> None:
        self.drafter, self.spent_s, self.num_calls = TextDrafter(), 0.0, 0
        # By source and support: drafted tokens whose predecessors were right, and the right ones of them.
        self.reached: dict[str, list[list[int]]] = defaultdict(lambda: [[0, 0] for _ in range(128)])
        self._said, self._clock = said, clock
        self._num_known: dict[str, int] = {}

    def add(self, request: NewRequest) -> None:
        self._num_known[request.request_id] = len(request.prompt_token_ids)
        self._timed(self.drafter.add, request)

    def observe(self, outputs: Iterable[Output]) -> None:
        outputs = list(outputs)
        for output in outputs:
            self._num_known[output.request_id] += len(output.token_ids)
        self._timed(self.drafter.observe, outputs)

    def propose(self, names: Sequence[tuple[str, int]]) -> list[tuple[Draft, ...]]:
        self.num_calls += 1
        found = self._timed(self.drafter.propose, names)
        for (name, _), drafts in zip(names, found, strict=True):
            for draft in drafts:
                self._compare(draft, self._said[name][self._num_known[name] :])
        return found

    def _compare(self, draft: Draft, following: tuple[int, ...]) -> None:
        for i, (drafted, token) in enumerate(zip(draft.token_ids, following, strict=False)):
            count = self.reached[draft.source][draft.match + i]
            count[1] += 1
            if drafted != token:
                return
            count[0] += 1

    def _timed(self, call: Callable[[Any], Any], given: Any) -> Any:
        began_s = time.perf_counter()
        found = call(given)
        spent_s = time.perf_counter() - began_s
        self.spent_s += spent_s
        self._clock.advance_to(self._clock.now_s + spent_s)
        return found


class Answers:
    """An engine on a virtual clock that gives one answer after the other, with drafts of texts or without."""

    def __init__(self, device: str, drafted: bool) -> None:
        law, clock = law_of(device), VirtualClock()
        self.runner = SayingRunner(law, clock)
        self.drafter = TimedDrafter(self.runner.said, clock) if drafted else None
        scheduler = Scheduler(
            groups=[BlockGroup(4096)],
            block_size=16,
            max_num_seqs=4,
            max_num_batched_tokens=2048,
            max_model_len=32768,
            max_steps_in_flight=2,
            speculation=drafted,
        )
        scheduler.calibrate(law)
        self.engine = Engine(scheduler, self.runner, clock=clock.read, drafter=self.drafter)
        self._names = map(str, itertools.count())
        self.num_drafted = self.num_accepted = self.num_steps = 0

    def answer(self, text: Text, salt: str) -> float:
        """Return the seconds from the first tokens of an answer to its last."""
        name = next(self._names)
        self.runner.said[name] = (*text.prompt, *text.answer)
        params = SamplingParams(temperature=0.0, max_tokens=len(text.answer), ignore_eos=True)
        self.engine.add(NewRequest(name, text.prompt, params, self.engine.clock(), cache_salt=salt))
        times_s, given = [], []
        while self.engine.has_work:
            for output in self.engine.step():
                times_s.append(self.engine.clock())
                given += output.token_ids
                if output.metrics is not None and output.finish_reason is not None:
                    self.num_drafted += output.metrics.num_drafted
                    self.num_accepted += output.metrics.num_accepted
        assert tuple(given) == text.answer
        self.num_steps += len(times_s) - 1
        return times_s[-1] - times_s[0]


def compare(device: str, kind: str, found: Sequence[Text], shared: bool) -> tuple[list[str], Answers]:
    """Return the row of the table, and what gave the answers with drafts."""
    on, off = Answers(device, True), Answers(device, False)
    salts = itertools.repeat("") if shared else map(str, itertools.count())
    times_s = [(on.answer(text, next(salts)), off.answer(text, "")) for text in found]
    assert on.drafter is not None
    num_timed = sum(len(text.answer) - 1 for text in found)
    long = [
        off_s / on_s for (on_s, off_s), text in zip(times_s, found, strict=True) if len(text.answer) >= LONG
    ]
    row = [
        device,
        kind,
        "shared" if shared else "own",
        f"{num_timed / on.num_steps:.2f}",
        f"**{sum(off_s for _, off_s in times_s) / sum(on_s for on_s, _ in times_s):.2f}**",
        f"{min(long, default=1.0):.2f}",
        f"{on.num_accepted:,} of {on.num_drafted:,}",
        f"{1e6 * on.drafter.spent_s / on.num_steps:.0f}",
    ]
    return row, on


def supports(on: Answers) -> list[list[str]]:
    """Return how often drafted tokens were right, by source and support."""
    assert on.drafter is not None
    rows = []
    for source, counts in on.drafter.reached.items():
        for least, end in zip(SUPPORTS, (*SUPPORTS[1:], len(counts)), strict=True):
            right, reached = (sum(one[i] for one in counts[least:end]) for i in (0, 1))
            share = f"{right / reached:.2f}" if reached else ""
            rows.append([source, f"{least}", share, f"{reached:,}"])
    return rows


def latency(found: Sequence[Text]) -> list[list[str]]:
    """Return the median time of the drafter's calls, on texts drawn from those found."""
    rng, rows = random.Random(0), [["sequences", "propose, us", "observe, us"]]
    for count in (1, 4, 16, 64):
        drafter = TextDrafter()
        for number in range(2048):  # fill the store
            text = rng.choice(found)
            drafter.add(NewRequest(f"earlier {number}", text.prompt, SamplingParams()))
            drafter.observe([Output(f"earlier {number}", 0, text.answer, finish_reason="length")])
        chosen = [rng.choice(found) for _ in range(count)]
        for number, text in enumerate(chosen):
            drafter.add(NewRequest(f"{number}", text.prompt, SamplingParams()))
        names = [(f"{number}", 0) for number in range(count)]
        times: list[list[float]] = [[], []]
        for place in range(200):
            tokens = [text.answer[place % len(text.answer)] for text in chosen]
            outputs = [Output(f"{number}", 0, (token,)) for number, token in enumerate(tokens)]
            began_s = time.perf_counter()
            drafter.observe(outputs)
            observed_s = time.perf_counter()
            drafter.propose(names)
            times[0].append(time.perf_counter() - observed_s)
            times[1].append(observed_s - began_s)
        rows.append([f"{count}", *(f"{1e6 * statistics.median(one[20:]):.1f}" for one in times)])
    prompt = tuple(itertools.islice(itertools.cycle(t for text in found for t in text.prompt), 100_000))
    drafter = TextDrafter()
    drafter.add(NewRequest("long", prompt, SamplingParams()))
    began_s = time.perf_counter()
    drafter.observe([Output("long", 0, (1,))])
    rows.append(["a prompt of 100,000 tokens", "", f"{1e6 * (time.perf_counter() - began_s):,.0f}"])
    return rows


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    texts.add_options(parser)
    devices = ["l1b int4"]
    parser.add_argument("--device", nargs="+", choices=DEVICES, default=devices, help="default: l1b int4")
    words = "; ".join(f"{name}: {what}" for name, (_, _, what) in KINDS.items())
    parser.add_argument("--texts", nargs="+", choices=KINDS, default=list(KINDS), metavar="TEXT", help=words)
    parser.add_argument(
        "--count", type=int, default=400, metavar="N", help="texts of each kind; default: 400"
    )
    parser.add_argument("--supports", action="store_true", help="print how often drafted tokens were right")
    parser.add_argument("--latency", action="store_true", help="measure the drafter's calls instead")
    options = parser.parse_args()
    encode = texts.reader(options.tokenizer)
    rows = [HEADING]
    for kind in options.texts:
        found = list(texts.texts(kind, options.data, encode))[: options.count]
        if options.latency:
            print(f"{kind}\n{columns(latency(found))}\n", flush=True)
            continue
        for device, shared in itertools.product(options.device, (False, True)):
            row, on = compare(device, kind, found, shared)
            rows.append(row)
            print("  ".join(row), flush=True)
            if options.supports:
                print(columns([["source", "support", "right", "reached"], *supports(on)]), flush=True)
    if not options.latency:
        print("\n" + columns(rows))


if __name__ == "__main__":
    main()
