"""Latencies of a plan under load, in closed form, and the settings that reach a goal.

The load is steady: `batch` sequences are computed together, each with a prompt and an answer of given
lengths, and when one ends the next begins. Nothing waits in the queue: waiting depends on arrivals, which
`quire simulate` plays through.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.goals import STATISTICS, Goal, figure_name
from quire.roofline.plan import MachinePlan
from quire.roofline.shares import Rate, Span

TAIL = {"p50": 0.5, "p90": 0.1, "p95": 0.05, "p99": 0.01}  # the share of gaps above each percentile


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens of each prompt and of each answer."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Serving:
    """The latencies of a steady load of `batch` sequences: times in seconds by (measure, statistic).

    `wave` is the time until the last of them has its first token if all prompts arrive at once.
    """

    batch: int
    times: dict[tuple[str, str], Span]
    wave: Span
    tokens_per_s: Rate  # of output, all sequences together

    def figures(self, end: str) -> dict[str, float | None]:
        """Return figures by their names in a goal, in ms: "roof", "typical" or "high" of each time."""
        return {figure_name(*name): getattr(span, end) * 1e3 for name, span in self.times.items()}

    def keeps(self, goal: Goal, end: str = "typical") -> bool:
        return goal.met(self.figures(end))


def serving(plan: MachinePlan, workload: Workload) -> Serving | None:
    """Return what the plan's configuration gives, or None if not one sequence fits.

    A prompt is computed in chunks beside the others' decode rows. TTFT is half a step of waiting (a whole one
    from p90 on) and those chunks; a gap between tokens is a decode step, or a step with a chunk, by how many
    of them there are; TPOT has the prompts of all others spread evenly.
    """
    config = plan.config
    batch = min(config.max_num_seqs, plan.fit.batch(workload.total))
    if batch < 1:
        return None
    others, context = batch - 1, workload.prompt + workload.output // 2
    chunk = min(max(config.max_num_batched_tokens - others, 1), workload.prompt)
    chunks = -(-workload.prompt // chunk)
    rows = ((context - 1, 1),) * others
    mixed = plan.step((*rows, ((workload.prompt - chunk) // 2, chunk)), batch).seconds
    decode = plan.decode(batch, context).seconds
    gaps = max(workload.output - 1, 1)
    share = min(1.0, chunks * others / gaps)  # of the gaps with a chunk of another prompt
    prompts = plan.prefill(workload.prompt, chunk).seconds.times(others / gaps)
    mean = decode.plus(prompts)
    ttft = mixed.times(chunks)
    times: dict[tuple[str, str], Span] = {}
    for statistic in STATISTICS:
        above = TAIL.get(statistic, 0.5)
        times["ttft", statistic] = ttft.plus(decode, 0.5 if above >= 0.5 else 1.0)
        gap = mean if statistic == "mean" else mixed if share >= above else decode
        times["itl", statistic] = gap
        times["tpot", statistic] = mean
        times["e2e", statistic] = times["ttft", statistic].plus(mean, workload.output - 1)
    wave = plan.prefill(workload.prompt).seconds.times(batch)
    return Serving(batch, times, wave, times["e2e", "mean"].rate(batch * workload.output))
