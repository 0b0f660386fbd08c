"""Random requests in token ids, of all kinds that change how tokens are chosen or where they end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.sampling_params import SamplingParams
from quire.types import NewRequest

EOS = (2,)
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """A request, the step before which it is added, and how many of its tokens come before it is aborted."""

    request: NewRequest
    after: int = 0
    abort_after: int | None = None


class Dice(random.Random):
    """Draws with the words that generators need."""

    def chance(self, share: float) -> bool:
        """Return True in this share of draws."""
        return self.random() < share

    def ids(self, count: int, vocab_size: int) -> Tokens:
        """Return random token ids."""
        return tuple(self.randrange(vocab_size) for _ in range(count))


class Asking:
    """Draws the requests of one round, whose prompts have beginnings in common."""

    def __init__(self, dice: Dice, vocab_size: int, max_model_len: int, grammars: Sequence[str] = ()) -> None:
        self._dice, self._vocab, self._longest = dice, vocab_size, max_model_len
        self._grammars = grammars
        lengths = [dice.randint(max(1, max_model_len - 600), max_model_len // 2 + 40) for _ in range(2)]
        self._prefixes = [dice.ids(length, vocab_size) for length in lengths]
        self._number = 0

    def wave(self, count: int, answers: Sequence[Tokens] = ()) -> list[Asked]:
        """Draw requests; some prompts continue earlier `answers`, which have prompt and output."""
        return [self._one(answers) for _ in range(count)]

    def _one(self, answers: Sequence[Tokens]) -> Asked:
        dice, name = self._dice, f"r{self._number}"
        self._number += 1
        prompt = self._prompt(answers)
        params = self._params(len(prompt))
        grammar = dice.choice(self._grammars) if self._grammars and dice.chance(0.3) else ""
        if grammar:
            params = replace(params, ignore_eos=False, allowed_token_ids=None, bad_words_token_ids=())
        request = NewRequest(
            name,
            prompt,
            params,
            priority=dice.randint(-1, 1),
            tenant=dice.choice("ab"),
            cache_salt=dice.choice(["", "", "", "salt"]),
            eos_token_ids=EOS,
            grammar=grammar,
            predicted_token_ids=self._predicted(prompt),
        )
        most = min(params.max_tokens or self._longest, self._longest - len(prompt))
        abort_after = dice.randint(0, most) if dice.chance(0.1) else None
        return Asked(request, dice.choice([0, 0, 0, 2, 9]), abort_after)

    def _prompt(self, answers: Sequence[Tokens]) -> Tokens:
        """Draw a prompt: by chance, a pattern again and again, a shared beginning, an answer continued."""
        dice, most = self._dice, self._longest - 1
        count = dice.randint(1, 50)
        own = dice.ids(count, self._vocab)
        kind = dice.choice(["chance", "pattern", "pattern", "shared", "shared", "continued", "continued"])
        if kind == "pattern":
            period = dice.randint(1, 9)
            own = tuple(t if dice.chance(0.95) else t // 2 for t in (own[:period] * count)[:count])
        elif kind == "shared" or not answers:
            prefix = dice.choice(self._prefixes)
            shared = dice.choice([len(prefix), dice.randint(1, len(prefix))])
            own = prefix[:shared] + own[: dice.randint(0, count)]
        elif kind == "continued":
            to_blocks = [answer for answer in answers if len(answer) % 8 == 0]
            own = dice.choice(to_blocks or answers) + own[: dice.randint(1, 9)]
        return own[: dice.choice([most, most - 3, most // 2])]

    def _predicted(self, prompt: Tokens) -> Tokens:
        dice = self._dice
        if dice.chance(0.8):
            return ()
        return dice.choice([prompt, prompt[len(prompt) // 2 :], dice.ids(30, self._vocab)])

    def _params(self, num_prompt: int) -> SamplingParams:
        dice, left = self._dice, self._longest - num_prompt
        to_end_of_block = 8 * dice.randint(1, 4) - num_prompt % 8
        counts = [dice.randint(1, 40) for _ in range(9)]
        to_the_end = [None, left, left + 5] if left < 100 else []
        max_tokens = dice.choice([*to_the_end, 1, 2, *[to_end_of_block] * 5, *counts])
        values: dict[str, Any] = {
            "max_tokens": max_tokens,
            "ignore_eos": dice.chance(0.5),
            "seed": dice.choice([0, 1, -5, 1 << 40]),
            "logprobs": dice.choice([None, 0, 2, -1, -1]),
            "prompt_logprobs": dice.choice([None] * 8 + [0, 3]),
        }
        values |= self._draws() | self._edits()
        if dice.chance(0.3):
            values["stop_token_ids"] = dice.ids(dice.choice([1, 9]), self._vocab)
        if dice.chance(0.7 if "stop_token_ids" in values else 0.1):
            values["min_tokens"] = dice.randint(0, min(max_tokens or left, 20))
        return SamplingParams(**values)

    def _draws(self) -> dict[str, Any]:
        """Draw temperature and cuts; a third are greedy."""
        dice = self._dice
        if dice.chance(0.35):
            return {"temperature": 0, "n": dice.choice([1, 1, 1, 2])}
        draws: dict[str, Any] = {
            "temperature": dice.choice([0.2, 0.8, 1.0, 1.7]),
            "n": dice.choice([1, 1, 1, 2, 3]),
        }
        if dice.chance(0.3):
            draws["top_k"] = dice.choice([1, 2, 5, self._vocab])
        if dice.chance(0.3):
            draws["top_p"] = dice.choice([0.1, 0.5, 0.9])
        if dice.chance(0.3):
            draws["min_p"] = dice.choice([0.02, 0.3])
        return draws

    def _edits(self) -> dict[str, Any]:
        """Draw what changes logits; in rare cases nothing is left to choose, which is an error."""
        dice, vocab = self._dice, self._vocab
        edits: dict[str, Any] = {}
        if dice.chance(0.25):
            edits["repetition_penalty"] = dice.choice([0.6, 1.1, 1.9])
        if dice.chance(0.25):
            edits["presence_penalty"] = dice.choice([-1.5, 0.4, 2.0])
        if dice.chance(0.25):
            edits["frequency_penalty"] = dice.choice([-0.5, 0.3, 1.5])
        if dice.chance(0.2):
            edits["logit_bias"] = {t: dice.uniform(-9, 9) for t in dice.ids(3, vocab)}
        if dice.chance(0.15):
            edits["allowed_token_ids"] = sorted({*dice.ids(dice.randint(1, 12), vocab)})
        if dice.chance(0.25):
            lengths = (1, 3, *[2] * dice.choice([1, 200]))
            edits["bad_words_token_ids"] = [list(dice.ids(length, vocab)) for length in lengths]
        return edits
