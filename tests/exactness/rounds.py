"""A round: the same requests on engines without and with drafts, and where their outputs differ."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tiny import VOCAB

from exactness.asked import Asked, Asking, Dice, Tokens
from exactness.engines import (
    Kind,
    Settings,
    context_variant,
    draw_kind,
    draw_law,
    draw_settings,
    new_engine,
)
from exactness.guesses import Guesser, Name
from quire.engine.drafter import Drafter
from quire.engine.engine import Engine
from quire.program.caches import MAX_DRAFTED
from quire.speculate.text_drafter import TextDrafter
from quire.types import Draft, Output, PositionLogprobs, Step, StepResult

GRAMMARS = ("a", "b", "c")


@dataclass
class Answer:
    """Everything that a sequence was given, log-probabilities as bits."""

    token_ids: Tokens = ()
    logprobs: tuple[bytes, ...] = ()
    prompt_logprobs: tuple[bytes, ...] = ()
    end: tuple[Any, ...] = ()  # finish reason, stop reason, error

    def take(self, output: Output) -> None:
        """Append an output."""
        assert not self.end, "an output after the last"
        self.token_ids += output.token_ids
        self.logprobs += tuple(map(_bits, output.logprobs))
        self.prompt_logprobs += tuple(map(_bits, output.prompt_logprobs))
        if output.finish_reason is not None:
            self.end = (output.finish_reason, output.stop_reason, output.error)

    def cut(self, count: int) -> Answer:
        """Return the first `count` tokens, as of a sequence that was aborted after them."""
        return Answer(self.token_ids[:count], self.logprobs[:count], self.prompt_logprobs, ("abort",))


def _bits(entries: PositionLogprobs) -> bytes:
    return b"".join(struct.pack("<idi", *entry) for entry in entries)


@dataclass
class Tally:
    """Counts of what was compared, and of drafts by their source."""

    requests: int = 0
    tokens: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)


class Watching:
    """A runner that counts the drafted and accepted tokens of the steps that pass, and checks their form.

    It also listens to what is offered to the scheduler, to know where drafted tokens come from, and asks a
    draft model for other numbers of tokens.
    """

    def __init__(self, engine: Engine, settings: Settings, tally: Tally, dice: Dice) -> None:
        self.inner, self._tally, self._dice = engine.runner, tally, dice
        self._offer, self._drafts = engine.scheduler.draft, settings.drafts
        # The scheduler would plan no step ahead of one that proposes.
        self._proposes = settings.draft_model and settings.drafts == "all" and settings.in_flight == 1
        self._sources: dict[Tokens, str] = {}  # of drafts, the last offered at the end
        self.given: dict[int, tuple[Draft, ...]] = {}  # drafts of the last results, by slot

    def draft(self, request_id: str, sequence: int, drafts: tuple[Draft, ...]) -> bool:
        """Pass drafts on to the scheduler."""
        for draft in reversed(drafts):
            self._sources.pop(draft.token_ids, None)
            self._sources[draft.token_ids] = draft.source
        return self._offer(request_id, sequence, drafts)

    def launch(self, step: Step) -> _Watched:
        if step.num_proposed or self._proposes:
            step = replace(step, num_proposed=self._dice.choice([1, 2, 3, 9, MAX_DRAFTED]))
        return _Watched(self, self.inner.launch(step), step)

    def count(self, step: Step, result: StepResult) -> None:
        """Count the drafts of a step."""
        for row, got in zip(step.rows, result.rows, strict=True):
            self.given[row.slot] = got.drafts
            if not row.drafted or got.error is not None:
                continue
            accepted = len(got.token_ids) - 1
            assert got.token_ids[:accepted] == row.drafted[:accepted], "accepted tokens that were not drafted"
            given = reversed(self._sources.items())
            source = next(source for ids, source in given if ids[: len(row.drafted)] == row.drafted)
            self._tally.drafted[source] += len(row.drafted)
            self._tally.accepted[source] += accepted
            self._tally.events[f"tokens drafted as {self._drafts}"] += len(row.drafted)


@dataclass(frozen=True)
class _Watched:
    watching: Watching
    pending: Any
    step: Step

    def result(self) -> StepResult:
        result = self.pending.result()
        self.watching.count(self.step, result)
        return result


def run(
    engine: Engine,
    settings: Settings,
    wave: Sequence[Asked],
    tally: Tally,
    dice: Dice,
    drafter: Drafter | None = None,
) -> dict[Name, Answer]:
    """Run requests to their ends. The drafts of a `drafter` are offered whether or not the scheduler asks.

    Now and then the law changes by which the scheduler predicts times, and so chooses drafts.
    """
    scheduler = engine.scheduler
    watching = engine.runner = Watching(engine, settings, tally, dice)
    scheduler.draft = watching.draft  # type: ignore[method-assign]
    left = sorted(wave, key=lambda asked: asked.after)
    limits = {asked.request.request_id: asked.abort_after for asked in wave}
    answers: dict[Name, Answer] = {}
    number = 0
    while engine.has_work or left:
        while left and (left[0].after <= number or not engine.has_work):
            request = left.pop(0).request
            engine.add(request)
            if drafter is not None:
                drafter.add(request)
            for sequence in range(request.params.num_sequences):
                answers[request.request_id, sequence] = Answer()
        if dice.chance(0.1):
            scheduler.calibrate(draw_law(dice), draw_law(dice) if settings.draft_model else None)
        if drafter is not None:
            _draft(engine, drafter, watching.given, dice)
        outputs = engine.step()
        if drafter is not None:
            drafter.observe(outputs)
        for output in outputs:
            answer, limit = answers[output.request_id, output.sequence], limits[output.request_id]
            answer.take(output)
            if limit is not None and len(answer.token_ids) >= limit:
                engine.abort(output.request_id, output.sequence)
        if number % 8 == 0:
            scheduler.check()
        number += 1
    assert scheduler.num_free_blocks == scheduler.caches.num_blocks, "blocks are held by nobody"
    tally.events["preemptions"] += scheduler.num_preemptions
    tally.events["cached tokens"] += scheduler.num_cached_tokens
    engine.runner = watching.inner
    del scheduler.draft  # type: ignore[method-assign]
    assert all(answer.end for answer in answers.values())
    return answers


def _draft(engine: Engine, drafter: Drafter, given: Mapping[int, tuple[Draft, ...]], dice: Dice) -> None:
    """Offer to every running sequence what came with its last result, and what a drafter proposes."""
    running = list(engine.scheduler.running)
    names = [(sequence.request.new.request_id, sequence.index) for sequence in running]
    for sequence, name, drafts in zip(running, names, drafter.propose(names), strict=True):
        both = [*given.get(sequence.slot, ()), *drafts]
        dice.shuffle(both)
        engine.scheduler.draft(*name, tuple(both))


@dataclass
class Round:
    """The parts of a round, drawn by its number."""

    seed: str
    devices: tuple[str, ...] = (*("native",) * 9, "reference")
    threads: tuple[int, ...] = (*(1,) * 56, 2, 2, 4)
    dice: Dice = field(init=False)
    kind: Kind = field(init=False)
    off: Settings = field(init=False)
    ways: tuple[Settings, ...] = field(init=False)
    waves: list[tuple[Asked, ...]] = field(default_factory=list)
    asked: dict[str, Asked] = field(default_factory=dict)
    expected: dict[Name, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dice = Dice(self.seed)
        self.kind = draw_kind(self.dice, self.devices)
        self.off = replace(draw_settings(self.dice, self.threads), drafts="off", draft_model="")
        ways = (
            replace(self.off, drafts="all"),
            draw_settings(self.dice, self.threads),
            draw_settings(self.dice, self.threads),
        )
        self.ways = (*ways[:2], replace(ways[2], drafts="chosen"))

    def run_plain(self, tally: Tally) -> None:
        """Draw two waves of requests, and run them without drafts."""
        asking = Asking(self.dice, VOCAB, self.kind.longest, GRAMMARS)
        engine, earlier = new_engine(self.kind, self.off), []
        for _ in range(2):
            wave = tuple(self._fitting(one) for one in asking.wave(self.dice.randint(2, 6), earlier))
            found = run(engine, self.off, wave, tally, self.dice)
            self.waves.append(wave)
            self.asked |= {one.request.request_id: one for one in wave}
            self.expected |= found
            earlier = [
                self.asked[name].request.prompt_token_ids + got.token_ids for (name, _), got in found.items()
            ]
        tally.requests += len(self.asked)
        tally.tokens += sum(len(answer.token_ids) for answer in self.expected.values())
        tally.kinds.update(kind for one in self.asked.values() for kind in kinds_of(one))
        tally.kinds[f"device {self.kind.device}"] += len(self.asked)

    def _fitting(self, asked: Asked) -> Asked:
        """Give a request the rope frequencies for its longest context."""
        request, most = asked.request, self.kind.longest
        longest = min(most, len(request.prompt_token_ids) + (request.params.max_tokens or most))
        return replace(
            asked,
            request=replace(request, context_variant=context_variant(self.kind.model, longest)),
        )

    def run_drafted(self, tally: Tally, ways: int | None = None, guesses: str = "") -> list[str]:
        """Run the same requests with drafts, in engines of the first `ways`; return what differs.

        With `guesses` all drafts are of this kind (exactness.guesses).
        """
        known, problems = {name: answer.token_ids for name, answer in self.expected.items()}, []
        for settings in self.ways[:ways]:
            drafter: Drafter | None = Guesser(self.dice, VOCAB, known, guesses)
            if not guesses and self.dice.chance(0.4):
                drafter = TextDrafter()
            if settings.drafts == "chosen":
                engine, drafter = new_engine(self.kind, settings, drafter), None
            else:
                engine = new_engine(self.kind, settings)
            found: dict[Name, Answer] = {}
            for wave in self.waves:
                found |= run(engine, settings, wave, tally, self.dice, drafter)
            problems += differences(self.asked, self.expected, found)
        return problems


def differences(
    asked: Mapping[str, Asked], expected: Mapping[Name, Answer], found: Mapping[Name, Answer]
) -> Iterator[str]:
    """Yield a line for each sequence whose answers differ; of aborted ones, what both have is compared."""
    for name, wanted in expected.items():
        got, limit = found[name], asked[name[0]].abort_after
        if limit is not None:
            common = min(len(wanted.token_ids), len(got.token_ids))
            wanted, got = wanted.cut(common), got.cut(common)
        for part in ("token_ids", "logprobs", "prompt_logprobs", "end"):
            mine, theirs = getattr(got, part), getattr(wanted, part)
            if mine != theirs:
                yield f"{name}: {part} differ: {_where(mine, theirs)}; {asked[name[0]].request}"
                break


def _where(mine: Sequence[Any], theirs: Sequence[Any]) -> str:
    pairs = enumerate(zip(mine, theirs, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
    return f"at {at}: {mine[at : at + 3]} of {len(mine)}, expected {theirs[at : at + 3]} of {len(theirs)}"


def kinds_of(asked: Asked) -> Iterator[str]:
    """Yield the kinds of requests that one belongs to."""
    request, params = asked.request, asked.request.params
    yield "greedy" if params.temperature == 0 else "sampled"
    features = {
        "aborted": asked.abort_after is not None,
        "several choices": params.n > 1,
        "grammar": bool(request.grammar),
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "penalties": (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        != (1, 0, 0),
        "top_k, top_p or min_p": (params.top_k, params.top_p, params.min_p) != (0, 1, 0),
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad words": bool(params.bad_words_token_ids),
        "min_tokens": params.min_tokens > 0,
        "stop_token_ids": bool(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "prediction": bool(request.predicted_token_ids),
        "salt": bool(request.cache_salt),
    }
    yield from (name for name, holds in features.items() if holds)
