"""The demo model in an engine of its own, whose steps are timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

from quire.build import build
from quire.config import EngineConfig
from quire.description import Description
from quire.engine.engine import Engine
from quire.frontend import Frontend
from quire.program.features import values
from quire.roofline.law import fold_costs
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer, need_tokenizer
from quire.types import NewRequest, Output, TokenLogprob

MAX_TOKENS = 1024  # of a sequence of the demo, and of a step: each prompt is computed in one
NUM_THREADS = 1  # the others stay free for the server
QUESTION = "Tell me a story about a fox and a lantern."


class TimedStep(NamedTuple):
    """A step of an engine, from planning to its outputs.

    `seconds` are of the processor. One thread computes, so on an idle core they are the time that the step
    takes; on a busy one, and experiments have the lowest priority, the waiting does not count.
    """

    seconds: float
    num_tokens: int  # computed
    outputs: list[Output]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple([token for output in self.outputs for token in output.token_ids])


class DemoEngine:
    """The demo, or a `model` made of it, without a prefix cache: what is asked for is computed."""

    def __init__(
        self, model: str = "demo", *, quantization: str | None = None, max_num_seqs: int = 1
    ) -> None:
        config = EngineConfig(
            model=model,
            quantization=quantization,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=MAX_TOKENS,
            num_threads=NUM_THREADS,
            enable_prefix_caching=False,
            packed_cache=False,
        )
        built = build(config)
        self.description: Description = built.description
        self._engine = Engine(built.engine.scheduler, built.runner)  # without a meter: fits take time
        self._num_requests = 0

    def start(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        ends: tuple[int, ...] = (),
        logprobs: int | None = None,
    ) -> None:
        """Add a request that takes the most likely token at each position, up to one of `ends`."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=logprobs, seed=0)
        name, self._num_requests = str(self._num_requests), self._num_requests + 1
        self._engine.add(NewRequest(name, tuple(prompt), params, time.monotonic(), eos_token_ids=ends))

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def step(self) -> TimedStep:
        """Compute one step."""
        begin_s = time.process_time()
        outputs = self._engine.step()
        seconds = time.process_time() - begin_s
        return TimedStep(seconds, self._engine.records[-1].num_tokens, outputs)

    def run(self) -> list[TimedStep]:
        """Compute until all requests have ended."""
        steps = []
        while self.has_work:
            steps.append(self.step())
        return steps

    def logprobs(self, prompt: Sequence[int]) -> list[TokenLogprob]:
        """Return the most likely next tokens."""
        self.start(prompt, 1, logprobs=20)
        (step,) = self.run()
        return list(step.outputs[0].logprobs[0])

    def tokenizer(self) -> Tokenizer:
        return need_tokenizer(self.description.source)

    def step_bytes(self, batch: int, context: int) -> dict[str, float]:
        """Return the exact bytes that a step reads which computes the next token of `batch` sequences."""
        folded = fold_costs(self.description)
        cost = folded.total.cost(values(folded.features, [(context, 1)] * batch, batch))
        return {"weight_read_bytes": cost.weight_bytes, "kv_read_bytes": cost.kv_read_bytes}


def text_of_length(engine: DemoEngine, num_tokens: int) -> list[int]:
    """Return the tokens of the text included with Quire, repeated up to a length."""
    text = files("quire.assets").joinpath("quality.txt").read_text("utf-8")
    ids = engine.tokenizer().encode(text)
    return (ids * -(-num_tokens // len(ids)))[:num_tokens]


def question(engine: DemoEngine) -> tuple[list[int], tuple[int, ...]]:
    """Return the tokens of QUESTION in the chat template of the demo, and those that end an answer."""
    found, length = engine.description, MAX_TOKENS
    frontend = Frontend(found.source, found.model, max_model_len=length, longest_context=length, seed=0)
    try:
        asked = frontend.encode_chat([{"role": "user", "content": QUESTION}])
        return list(asked.token_ids), frontend.eos_token_ids
    finally:
        frontend.close()
