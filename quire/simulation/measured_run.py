"""Laws of servers that were only seen from outside: fitted to a run of `quire bench`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.bench.workload import Request
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import StepLaw
from quire.errors import ConfigError
from quire.simulation.fit import SEEN_BY_CLIENTS, Latency, fit, relative_errors
from quire.simulation.law_file import KnownLaw
from quire.simulation.shares import RoofShares, at_shares
from quire.simulation.simulate import simulate

LEAST_FITTED = 20  # requests


def fitted_law(path: Path, roof: StepLaw, make_scheduler: Callable[[StepLaw], Scheduler]) -> KnownLaw:
    """Fit the shares of the roof, and the delays of clients, to the first half of a run of `quire bench`.

    Raises ConfigError for a file without such a run.
    """
    requests, measured = _read_run(path)
    half = len(requests) // 2

    def predict(shares: RoofShares, count: int | None) -> list[Latency]:
        law = at_shares(roof, shares)
        scheduler = make_scheduler(law)
        done = simulate(scheduler, law, requests, delays=shares.delays, num_first=count).timelines[:count]
        for one in done:
            if one.error:
                raise ConfigError(
                    f"{path}: a request of {one.num_prompt_tokens} prompt tokens cannot be simulated: "
                    f"{one.error}",
                    "give the settings of the server that was measured, such as --max-model-len",
                )
        return [Latency.of(one) for one in done]

    shares = fit([measured[:half]], lambda shares: [predict(shares, half)], SEEN_BY_CLIENTS)
    error = relative_errors(predict(shares, None)[half:], measured[half:])
    source = (
        f"fitted to the first {half} requests of {path.name}; on the other {len(requests) - half} "
        f"TTFT {error.ttft_s:+.1%}, TPOT {error.tpot_s:+.1%}"
    )
    return KnownLaw(at_shares(roof, shares), shares.delays, source)


def _read_run(path: Path) -> tuple[list[Request], list[Latency]]:
    """Read requests and latencies of `quire bench --json FILE --save-detailed`, in the order of sending."""
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        entries = sorted(content["requests"], key=lambda one: float(one["sent_s"]))
        done = [one for one in entries if not one["error"] and one["num_output_tokens"] > 1]
        begin_s = done[0]["sent_s"]
        requests = [
            Request([number] * one["num_prompt_tokens"], one["num_output_tokens"], one["sent_s"] - begin_s)
            for number, one in enumerate(done, 1)
        ]
        latencies = [
            Latency(
                one["chunk_s"][0] - one["sent_s"],
                (one["chunk_s"][-1] - one["chunk_s"][0]) / (one["num_output_tokens"] - 1),
            )
            for one in done
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not a detailed run: {type(error).__name__}: {error}",
            "'quire bench --json FILE --save-detailed' writes one",
        ) from error
    if len(requests) < LEAST_FITTED:
        raise ConfigError(f"{path} has {len(requests)} requests", f"a fit needs at least {LEAST_FITTED}")
    for half in (latencies[: len(latencies) // 2], latencies[len(latencies) // 2 :]):
        if not min(sum(values) for values in zip(*half, strict=True)) > 0:
            raise ConfigError(
                f"{path}: the tokens of each answer came at one moment, so no time per token is known",
                "a fit needs answers that were streamed",
            )
    return requests, latencies
