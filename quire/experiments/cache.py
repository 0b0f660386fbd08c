"""The experiment "cache": the same answer with a KV cache, and without one."""

from __future__ import annotations

from collections.abc import Iterator

from quire.experiments.demo import DemoEngine, text_of_length
from quire.experiments.parameters import CacheParameters, Line


def run(asked: CacheParameters) -> Iterator[Line]:
    """Compute an answer twice, token by token in turns, and yield the measured time of each token.

    With the cache a step computes the last token alone. Without it, it computes the whole prompt and all
    tokens of the answer anew, as a request of its own. Both take the most likely token, so the answers must
    be equal.
    """
    cached, anew = DemoEngine(), DemoEngine()
    prompt = text_of_length(cached, asked.prompt_tokens)
    for engine in (cached, anew):  # the first steps of a process are slower
        engine.start(prompt, 2)
        engine.run()
    cached.start(prompt, asked.num_tokens)
    answers: tuple[list[int], list[int]] = [], []
    sums = [0.0, 0.0]
    for index in range(asked.num_tokens):
        known = [*prompt, *answers[1]]
        anew.start(known, 1)
        steps = cached.step(), anew.step()
        for place, step in enumerate(steps):
            answers[place].extend(step.token_ids)
            sums[place] += step.seconds
        yield {
            "token": {
                "index": index,
                "context": len(known),
                "with_ms": 1e3 * steps[0].seconds,
                "without_ms": 1e3 * steps[1].seconds,
                "with_tokens": 1 if index else len(prompt),
                "without_tokens": len(known),
            }
        }
    num_anew = sum(range(len(prompt), len(prompt) + asked.num_tokens))
    yield {
        "done": {
            "prompt_tokens": len(prompt),
            "num_tokens": asked.num_tokens,
            "tokens_equal": answers[0] == answers[1],
            "text": cached.tokenizer().decode(answers[0]),
            "with_ms": 1e3 * sums[0],
            "without_ms": 1e3 * sums[1],
            "with_tokens": len(prompt) + asked.num_tokens - 1,
            "without_tokens": num_anew,
        }
    }
