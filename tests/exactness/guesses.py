"""A drafter that guesses in every way, well and badly, knowing the answers of an engine without drafts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from exactness.asked import Dice, Tokens
from quire.program.caches import MAX_DRAFTED
from quire.types import Draft, NewRequest, Output

Name = tuple[str, int]  # request, sequence
KINDS = ("right", "wrong", "mixed", "shifted", "random", "edge", "beyond", "repeated", "late", "none")


class Guesser:
    """Proposes drafts of a kind, or of any kind (""), by what it knows of the answers."""

    def __init__(self, dice: Dice, vocab_size: int, known: Mapping[Name, Tokens], kind: str = "") -> None:
        self._dice, self._vocab, self._known, self._kind = dice, vocab_size, known, kind
        self._given: dict[Name, list[int]] = {}

    def add(self, request: NewRequest) -> None:
        for sequence in range(request.params.num_sequences):
            self._given[request.request_id, sequence] = []

    def observe(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            self._given[output.request_id, output.sequence] += output.token_ids

    def propose(self, names: Sequence[Name]) -> list[tuple[Draft, ...]]:
        return [self._drafts(name) for name in names]

    def _drafts(self, name: Name) -> tuple[Draft, ...]:
        count = self._dice.choice([1, 1, 2])
        sources = self._dice.sample(["text", "store", "model"], count)
        drafts = [self._draft(name, source) for source in sources]  # type: ignore[arg-type]
        return tuple(draft for draft in drafts if draft.token_ids)

    def _draft(self, name: Name, source: str) -> Draft:
        dice, vocab, given = self._dice, self._vocab, self._given[name]
        kind = self._kind or dice.choice(KINDS)
        count = dice.choice([1, 2, 3, 5, 8, MAX_DRAFTED, MAX_DRAFTED + 9])
        right = (self._known.get(name, ())[len(given) :] + dice.ids(count, vocab))[:count]
        wrong = tuple((token + 1 + dice.randrange(vocab - 1)) % vocab for token in right)
        keep = dice.randint(0, count)
        guessed = {
            "right": right,
            "beyond": right + dice.ids(20, vocab),
            "wrong": wrong,
            "mixed": tuple(a if dice.chance(0.75) else b for a, b in zip(right, wrong, strict=True)),
            "late": right[:keep] + wrong[keep : keep + 1] + right[keep + 1 :],  # one wrong, then right again
            "shifted": right[1:],
            "random": dice.ids(count, vocab),
            "edge": tuple(dice.choice([0, vocab - 1]) for _ in right),
            "repeated": tuple(given[-1:]) * count,
            "none": (),
        }[kind]
        match = dice.choice([0, 1, 2, 7, 40])
        return Draft(guessed, source, match)  # type: ignore[arg-type]
