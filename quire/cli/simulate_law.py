"""The law of `quire simulate`: from a file, from a run, from the catalogue, or by calibration."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from quire.build import build
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.meter import Times, Verdict
from quire.engine.step_law import StepLaw
from quire.environment import cache_folder
from quire.errors import ConfigError
from quire.progress import loading_bar
from quire.roofline.calibrate import Calibration
from quire.roofline.law import fold_costs
from quire.sampling_params import SamplingParams
from quire.simulation.law_file import KnownLaw, read_law, write_law
from quire.simulation.measured_run import fitted_law
from quire.types import NewRequest, Step

if TYPE_CHECKING:
    from quire.simulation.model import SimulatedModel

CALIBRATION_S = 8.0  # of steps, after loading
BATCHES = (1, 16, 4, 64, 2, 32, 8)  # sequences together, in this order, as many as may run
PROMPTS, OUTPUTS = (8, 400), (8, 24)  # tokens


def known_law(
    setting: SimulatedModel, file: Path | None, fitted: Path | None, *, calibrate: bool
) -> KnownLaw:
    """Return the law to simulate by. Without a file, a fit or a machine, that of this machine.

    It is calibrated once, by running the model for some seconds, and kept in the cache; with `calibrate` it
    is calibrated again. Raises ConfigError.
    """
    if file is not None:
        return read_law(file)
    if fitted is not None:
        return fitted_law(fitted, setting.roof(), setting.scheduler)
    if setting.plan is not None:
        machine = setting.plan.machine.name
        return KnownLaw(setting.plan.law, source=f"typical shares of the peaks of {machine}, not measured")
    kept = _kept_at(setting)
    if not calibrate:
        with suppress(ConfigError):  # none is kept, or it is damaged
            return read_law(kept)
    known = KnownLaw(_calibrated(setting), source=f"calibrated on {setting.ceilings().cpu}, without clients")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_law(kept, known)
    except OSError:
        pass  # without a cache it is calibrated again
    return known


def _kept_at(setting: SimulatedModel) -> Path:
    """Return the file for the costs of this model, its number formats, this CPU and the number of threads.

    The name of a model may be a path, by which another one is found elsewhere or later.
    """
    found, described = setting.ceilings(), setting.description
    kind = (fold_costs(described), described.fingerprint, found.cpu, found.threads, found.isa)
    return cache_folder() / "laws" / f"{sha256(repr(kind).encode()).hexdigest()[:16]}.json"


class _Recorder:
    """A meter that passes every step on to a calibration."""

    draft_law = None

    def __init__(self, law: StepLaw) -> None:
        self.calibration = Calibration(law)
        self._law = law

    def judge(self, step: Step, times: Times) -> Verdict:
        """Take the record of a step."""
        rows = [(row.start, row.count) for row in step.rows]
        found = self._law.values(rows, sum([row.num_logits for row in step.rows]))
        self.calibration.add(found, times.device_s, times.idle_s, times.core_wait_s)
        return Verdict()

    def new_law(self) -> StepLaw | None:
        return None


def _calibrated(setting: SimulatedModel) -> StepLaw:
    """Run the model with batches of many sizes, and return the law of its steps."""
    config = replace(setting.config, itl_goal=None, enable_prefix_caching=False, speculative="off")
    with loading_bar(config.model) as progress:
        built = build(config, progress)
    recorder = _Recorder(setting.roof())
    engine = Engine(built.engine.scheduler, built.runner, meter=recorder)
    vocab_size = built.description.model.config.vocab_size
    end_s, dice = time.monotonic() + CALIBRATION_S, random.Random(0)
    for index, new in enumerate(_batches(config, setting.memory.max_model_len, vocab_size, dice)):
        for request in new:
            engine.add(request)
        while engine.has_work:
            engine.step()
        if time.monotonic() > end_s and index + 1 >= len(BATCHES):
            break
    return recorder.calibration.law()


def _batches(
    config: EngineConfig, longest: int, vocab_size: int, dice: random.Random
) -> Iterator[list[NewRequest]]:
    """Yield batches of requests without end."""
    number = 0
    while True:
        for batch in BATCHES:
            requests = []
            for _ in range(min(batch, config.max_num_seqs)):
                count = min(dice.randint(*OUTPUTS), longest // 2)
                prompt = dice.choices(range(vocab_size), k=min(dice.randint(*PROMPTS), longest - count))
                params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0, seed=0)
                requests.append(NewRequest(f"calibration {number}", tuple(prompt), params, time.monotonic()))
                number += 1
            yield requests
