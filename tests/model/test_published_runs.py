"""Published runs of vLLM, simulated: the law is fitted on the first requests and tested on the rest."""

from __future__ import annotations

import pytest
from published_runs import NUM_FITTED, RUNS, read_run

from quire.simulation.fit import Latency, fit, relative_errors
from quire.simulation.shares import RoofShares

# What the fit finds, where it takes long.
FITTED = {"vllm_RTXPRO6000_Llama-3.1-8B": RoofShares(0.7232, 0.6171, 1.2363e-3, 1.3397e-5)}


@pytest.mark.parametrize("name", RUNS)
def test_a_published_run_is_predicted_within_a_tenth(shared_data, name):
    run = read_run(shared_data, name)
    simulated = run.simulate(FITTED.get(name) or run.fit())
    found = [Latency.of(one) for one in simulated.timelines]
    assert [one.num_output_tokens for one in simulated.timelines] == [
        one.num_output_tokens for one in run.requests
    ]
    error = relative_errors(found[NUM_FITTED:], run.measured[NUM_FITTED:])
    assert abs(error.ttft_s) < 0.1
    assert abs(error.tpot_s) < 0.1


def test_the_roof_alone_does_not_predict(shared_data):
    """Near saturation a small error of a step is a large one of waiting: the check above can fail."""
    run = read_run(shared_data, "vllm_RTXPRO6000_Llama-3.1-8B")
    found = [Latency.of(one) for one in run.simulate(RoofShares()).timelines]
    assert relative_errors(found, run.measured).ttft_s < -0.5


def test_shares_are_found_again():
    """A law that is linear in what is fitted: the search ends where it began to measure."""
    truth = RoofShares(0.7, 0.5, 2e-3, 2e-5)

    def predict(shares: RoofShares) -> list[Latency]:
        loads = [(1.0, 0.1, 1), (0.2, 1.0, 4), (0.5, 0.5, 30), (0.1, 0.1, 100)]
        return [
            Latency(
                memory / shares.memory + shares.step_s, arithmetic / shares.arithmetic + rows * shares.row_s
            )
            for memory, arithmetic, rows in loads
        ]

    found = predict(fit([predict(truth)], lambda shares: [predict(shares)]))
    for one, wanted in zip(found, predict(truth), strict=True):
        assert one == pytest.approx(wanted, rel=0.02)
