"""Models that are made to say given texts, for the benchmarks of speculation."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from speculating.engines import Asked, Driver

PROMPT = tuple(range(300, 340))
LOADS = [
    Asked(PROMPT, said=(*range(310, 330), 700, *range(300, 320))),
    Asked(PROMPT[::-1], said=tuple(range(900, 930))),
    Asked(PROMPT[:7], num_tokens=12),
]


@pytest.mark.parametrize("speculative", ["auto", "off"])
def test_the_model_says_the_text(speculative):
    driver = Driver({"model": "demo", "device": "reference", "speculative": speculative, "max_num_seqs": 2})
    run = driver.run([asdict(one) for one in LOADS], streams=2)
    for asked, answer in zip(LOADS[:2], run.answers, strict=False):
        assert answer.digest == hash(asked.said)
        assert answer.num_tokens == len(asked.said)
    assert run.answers[2].num_tokens == 12
    assert driver.forced.said == {}
