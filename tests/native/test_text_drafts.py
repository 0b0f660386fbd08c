"""Drafts from texts in a whole engine: fewer steps, the same tokens."""

from __future__ import annotations

from quire.build import build
from quire.config import EngineConfig
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, Output

PROMPT = tuple(range(40, 60))


def answers(speculative: str) -> list[list[Output]]:
    """Answer a prompt three times; return the outputs of each."""
    built = build(
        EngineConfig(model="demo", max_model_len=256, max_steps_in_flight=1, speculative=speculative)
    )
    assert (built.drafter is None) == (speculative == "off")
    outputs = []
    for name in "abc":
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, seed=0)
        built.engine.add(NewRequest(name, PROMPT, params))
        outputs.append([])
        while built.engine.has_work:
            outputs[-1] += built.engine.step()
    assert built.drafter is None or (len(built.drafter) == 0 and built.drafter.store.nbytes > 0)
    return outputs


def tokens(outputs: list[list[Output]]) -> list[tuple[int, ...]]:
    return [tuple(token for one in each for token in one.token_ids) for each in outputs]


def test_answers_are_drafted_from_texts() -> None:
    plain, drafted = answers("off"), answers("auto")
    assert tokens(drafted) == tokens(plain)
    assert len(plain[0]) == len(plain[1]) == 60
    assert sum(map(len, drafted)) < 3 * 60  # how much less is the rule's choice, by measured times
