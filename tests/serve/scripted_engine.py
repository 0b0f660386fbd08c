"""The engine's process with answers that a script says, for clients that need a capable model.

All else is real: prompts, scheduler, prefix cache, forward passes, grammars and sampling. Only, a mask leaves
the script's next token at each position that is sampled; a token that the request's grammar bars fails the
request.

Run as a script in place of quire.server.engine_process. The word before the number of the socket is the path
of the script, a JSON object: from a text that the prompt holds to a list of answers, each with its control
tokens by name. A prompt with n results of tools gets answer n, or the last one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.backends.backend import Backend, GetMasks, LaunchedStep
from quire.build import Built, build
from quire.server.engine_process import main
from quire.text.tokenizer import Tokenizer, need_tokenizer
from quire.types import Admission, Failure, Step, StepResult

TOOL_RESULT, CALL = "<tool_response>", "<tool_call>"
ASIDE = "Some words."  # for prompts that are no part of a script, such as those that ask for a title


class ScriptedBackend:
    """A backend that lets follow what scripts say."""

    name = "scripted"

    def __init__(
        self, backend: Backend, scripts: dict[str, list[str]], tokenizer: Tokenizer, vocab_size: int
    ) -> None:
        self._backend = backend
        self._scripts = scripts
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._left: dict[int, list[int]] = {}  # by slot, what is still to be said

    def launch(self, step: Step, masks: GetMasks | None = None) -> LaunchedStep:
        brought = {row.slot: row.token_ids for row in step.rows}
        for admission in step.admitted:
            self._left[admission.slot] = self._said(admission, brought[admission.slot])
        wanted = {i: self._left[row.slot][0] for i, row in enumerate(step.rows) if row.sample}
        return Scripted(step, self._backend.launch(step, lambda: self._forced(wanted, masks)), self._left)

    def _said(self, admission: Admission, token_ids: Sequence[int]) -> list[int]:
        count = admission.num_prompt_tokens
        answer = self._answer(token_ids[:count], bool(admission.grammar))
        said = self._tokenizer.encode(answer, add_special_tokens=False, parse_special=True)
        return [*said, admission.eos_token_ids[0]][len(token_ids) - count :]

    def _answer(self, prompt: Sequence[int], may_call: bool) -> str:
        text = self._tokenizer.decode(prompt)
        answers = next((found for marker, found in self._scripts.items() if marker in text), [ASIDE])
        turn = list(prompt).count(self._tokenizer.token_id(TOOL_RESULT))
        answer = answers[min(turn, len(answers) - 1)]
        return answer if may_call or CALL not in answer else ASIDE

    def _forced(self, wanted: Mapping[int, int], masks: GetMasks | None) -> dict[int, Any]:
        """GetMasks of one token each, of those that grammars allow."""
        found = masks() if masks is not None else {}
        forced: dict[int, Any] = {}
        for row, token_id in wanted.items():
            own, bits = found.get(row), np.zeros(-(-self._vocab_size // 32), np.uint32)
            bits[token_id // 32] = 1 << token_id % 32
            forced[row] = [bits] if own is None else own if isinstance(own, Failure) else [bits & own[0]]
        return forced


@dataclass(frozen=True)
class Scripted:
    """A step whose tokens were said by scripts."""

    step: Step
    pending: LaunchedStep
    left: dict[int, list[int]]

    def result(self) -> StepResult:
        result = self.pending.result()
        for row, got in zip(self.step.rows, result.rows, strict=True):
            del self.left[row.slot][: len(got.token_ids)]
        return result


def scripted_build(*args: Any, **keywords: Any) -> Built:
    built = build(*args, **keywords)
    description = built.description
    scripts = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    tokenizer, vocab_size = need_tokenizer(description.source), description.program.output.width
    built.runner._backend = ScriptedBackend(built.backend, scripts, tokenizer, vocab_size)
    return built


if __name__ == "__main__":
    sys.exit(main(scripted_build))
