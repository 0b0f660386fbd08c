"""The engine's process with answers that a script says, for clients that need a capable model.

All else is real: prompts, scheduler, prefix cache, forward passes, grammars and the sampling pipeline. Only
the logits of a position that is sampled are replaced, by ones that leave the script's next token; a token
that the request's grammar bars fails the request.

Run as a script in place of quire.server.engine_process. The word before the number of the socket is the path
of the script, a JSON object: from a text that the prompt holds to a list of answers, each with its control
tokens by name. A prompt with n results of tools gets answer n, or the last one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.build import Built, build
from quire.runner import runner, sampler
from quire.sampling.pipeline import SamplerState
from quire.server.engine_process import main
from quire.text.tokenizer import Tokenizer, need_tokenizer
from quire.types import Admission, RowResult

TOOL_RESULT, CALL = "<tool_response>", "<tool_call>"
ASIDE = "Some words."  # for prompts that are no part of a script, such as those that ask for a title


class ScriptedState(SamplerState):
    """The sampler's state of a choice, and what is to be said."""

    scripts: dict[str, list[str]]
    tokenizer: Tokenizer

    def __init__(self, admission: Admission, token_ids: Sequence[int], vocab_size: int) -> None:
        super().__init__(admission, token_ids, vocab_size)
        answer = self._answer(token_ids[: admission.num_prompt_tokens], bool(admission.grammar))
        said = self.tokenizer.encode(answer, add_special_tokens=False, parse_special=True)
        self.script = (*said, admission.eos_token_ids[0])

    def _answer(self, prompt: Sequence[int], may_call: bool) -> str:
        text = self.tokenizer.decode(prompt)
        answers = next((found for marker, found in self.scripts.items() if marker in text), [ASIDE])
        turn = list(prompt).count(self.tokenizer.token_id(TOOL_RESULT))
        answer = answers[min(turn, len(answers) - 1)]
        return answer if may_call or CALL not in answer else ASIDE

    @property
    def next_token(self) -> int:
        """The script's token for the position that is to be sampled."""
        return self.script[self.num_tokens - self.num_prompt_tokens]


def scripted_sample(logits: np.ndarray, state: ScriptedState, *more: Any) -> RowResult:
    """The sampling pipeline over logits that leave one token."""
    forced = np.full_like(logits, -np.inf)
    forced[state.next_token] = 0
    return sampler.sample(forced, state, *more)


def scripted_build(*args: Any) -> Built:
    built = build(*args)
    ScriptedState.scripts = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    ScriptedState.tokenizer = need_tokenizer(built.description.source)
    return built


if __name__ == "__main__":
    vars(runner).update(SamplerState=ScriptedState, sample=scripted_sample)
    sys.exit(main(scripted_build))
