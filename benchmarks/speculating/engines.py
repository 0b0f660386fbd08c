"""Engines that are compared, each in a process of its own, which answers lines of JSON.

    python -m speculating.engines '{"model": "demo", "speculative": "off"}'

The options are EngineConfig's. A line is a load: requests, and how many are open at a time; the answer has
the figures of Run.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from quire.build import Built, build
from quire.config import EngineConfig
from quire.engine.engine import PendingStep, StepRunner
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, Output, Step
from speculating.forced import ForcedRunner, Said

FOLDER = Path(__file__).parents[1]


@dataclass(frozen=True)
class Asked:
    """A request. With `said` the model is made to say these tokens; otherwise it generates `num_tokens`.

    It generates fewer if one of `eos` comes.
    """

    prompt: tuple[int, ...]
    said: tuple[int, ...] = ()
    num_tokens: int = 0
    eos: tuple[int, ...] = ()
    salt: str = ""
    grammar: str = ""
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answered:
    """The times of one answer: seconds from its first tokens to its last, and between its chunks."""

    num_tokens: int
    digest: int  # of its tokens
    decode_s: float
    gaps_s: list[float]
    num_drafted: int
    num_accepted: int
    saved_s: float

    @property
    def num_timed(self) -> int:
        """Tokens after the first chunk, which is one token."""
        return self.num_tokens - 1


@dataclass(frozen=True)
class Run:
    """A load that ended: the answers, in the order asked, and sums over its steps."""

    answers: list[Answered]
    elapsed_s: float
    num_steps: int
    device_s: float
    idle_s: float
    draft_s: float
    num_passes: int  # of the draft model

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_s(self) -> float:
        return self.num_tokens / self.elapsed_s

    @property
    def decode_s(self) -> float:
        return sum(answer.decode_s for answer in self.answers)


class EngineProcess:
    """The caller's side. Raises SystemExit if the process does not start or dies."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        command = [sys.executable, "-m", "speculating.engines", json.dumps(options, default=str)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=FOLDER)
        self._read()

    def run(
        self,
        requests: Sequence[Asked],
        streams: int = 1,
        earlier: Sequence[Asked] = (),
        right: float | None = None,
    ) -> Run:
        """Answer requests, `streams` at a time, after the drafter has been told of `earlier` answers.

        `right`: see ForcedRunner.
        """
        load = {"requests": [asdict(one) for one in requests], "streams": streams, "right": right}
        self._write(load | {"earlier": [asdict(one) for one in earlier]})
        found = self._read()
        return Run(**found | {"answers": [Answered(**one) for one in found["answers"]]})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _write(self, load: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(load), file=self._process.stdin, flush=True)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine {self.name!r} has ended")
        return json.loads(line)


class _Open:
    """A request that runs, and the times of its chunks."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.times_s: list[float] = []
        self.token_ids: tuple[int, ...] = ()

    def take(self, output: Output, now: float) -> Answered | None:
        """Return the answer if the output is its last."""
        if output.error is not None:
            raise SystemExit(f"a request failed: {output.error}")
        self.times_s.append(now)
        self.token_ids += output.token_ids
        if output.finish_reason is None:
            return None
        metrics = output.metrics
        assert metrics is not None
        gaps_s = [after - before for before, after in itertools.pairwise(self.times_s)]
        return Answered(
            len(self.token_ids),
            hash(self.token_ids),
            self.times_s[-1] - self.times_s[0],
            gaps_s,
            metrics.num_drafted,
            metrics.num_accepted,
            metrics.drafting_saved_s,
        )


class _Counting:
    """A runner that counts the passes of the draft model."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self.num_passes = 0

    def launch(self, step: Step) -> PendingStep:
        self.num_passes += step.num_proposed
        return self.runner.launch(step)


class Driver:
    """Runs loads on an engine in this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.built: Built = build(EngineConfig(**options), measuring=lambda: None)
        self.engine = self.built.engine
        self.plain = self.built.engine.runner
        self.forced = ForcedRunner(self.built)
        self.names = map(str, itertools.count())

    def request(self, asked: dict[str, Any], name: str, seed: int = 0) -> NewRequest:
        num_tokens = len(asked["said"]) or asked["num_tokens"]
        params = {"temperature": 0.0, "seed": seed, "ignore_eos": not asked["eos"]} | asked["params"]
        return NewRequest(
            name,
            tuple(asked["prompt"]),
            SamplingParams(max_tokens=num_tokens, **params),
            time.monotonic(),
            eos_token_ids=tuple(asked["eos"]),
            cache_salt=asked["salt"],
            grammar=asked["grammar"],
        )

    def tell(self, earlier: list[dict[str, Any]]) -> None:
        """Tell the drafter of answers as if the engine had given them."""
        drafter = self.built.drafter
        for asked in earlier if drafter is not None else ():
            request = self.request(asked, next(self.names))
            drafter.add(request)
            drafter.observe([Output(request.request_id, 0, tuple(asked["said"]))])
            drafter.observe([Output(request.request_id, 0, finish_reason="length")])

    def run(self, requests: list[dict[str, Any]], streams: int) -> Run:
        forced = any(asked["said"] for asked in requests)
        self.engine.runner = counting = _Counting(self.forced if forced else self.plain)
        waiting, open_, answers = list(enumerate(requests))[::-1], {}, {}
        records, num_steps = self.engine.records, 0
        device_s = idle_s = draft_s = 0.0
        began_s = time.monotonic()
        while waiting or open_:
            while waiting and len(open_) < streams:
                index, asked = waiting.pop()
                name = next(self.names)
                request = self.request(asked, name, index)
                if asked["said"]:
                    self.forced.said[name] = Said((*asked["prompt"], *asked["said"]), index)
                open_[name] = _Open(index)
                self.engine.add(request)
            outputs, now = self.engine.step(), time.monotonic()
            for output in outputs:
                if (answer := open_[output.request_id].take(output, now)) is not None:
                    answers[open_.pop(output.request_id).index] = answer
                    self.forced.said.pop(output.request_id, None)
            record = records[-1]
            num_steps += 1
            device_s, idle_s = device_s + record.device_s, idle_s + record.idle_s
            draft_s += record.draft_s
        elapsed_s = time.monotonic() - began_s
        found = [answers[index] for index in range(len(requests))]
        return Run(found, elapsed_s, num_steps, device_s, idle_s, draft_s, counting.num_passes)


def main() -> None:
    driver = Driver(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        load = json.loads(line)
        driver.tell(load["earlier"])
        driver.forced.right = load["right"]
        run = driver.run(load["requests"], load["streams"])
        found = {one.name: getattr(run, one.name) for one in fields(run)}
        print(json.dumps(found | {"answers": [asdict(one) for one in run.answers]}), flush=True)


if __name__ == "__main__":
    main()
