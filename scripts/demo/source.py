"""Seeded choices for the generator, with a wall between what is trained on and what is held out."""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

HELD_OUT_OF_100 = 10


def bucket(key: str) -> int:
    """A number in 0..99 that depends on the text alone: the same in every run and on every machine."""
    return zlib.crc32(key.encode()) * 2654435761 % 2**32 * 100 >> 32


def held_out(key: str) -> bool:
    return bucket(key) < HELD_OUT_OF_100


def split_wordings(wordings: Sequence[str]) -> tuple[list[str], list[str]]:
    """(trained on, held out): about one wording in eight is held out, and never none."""
    ranked = sorted(wordings, key=lambda text: (bucket(text), text))
    cut = max(1, len(ranked) // 8)
    return ranked[cut:], ranked[:cut]


@dataclass
class Dialogue:
    """One conversation. `task` names what is asked last; `expect` is what its evaluation needs to know."""

    messages: list[dict]
    task: str
    tools: list[dict] | None = None
    expect: dict = field(default_factory=dict)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


class Source:
    """Every random choice of one split.

    `wording` and `draw_key` keep to the side of the wall the split is on; the other draws do not know it.
    """

    def __init__(self, seed: int, split: str = "train"):
        self.random = random.Random(f"{split}:{seed}")
        self.unseen = split != "train"
        self._wordings: dict[tuple[str, int], list[str]] = {}

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def choice(self, items: Sequence):
        return items[int(self.random.random() * len(items))]

    def some(self, items: Sequence, count: int) -> list:
        return self.random.sample(items, count)

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def wording(self, wordings: Sequence[str]) -> str:
        """One of the user's ways to say a thing, from this split's share of them."""
        key = (wordings[0], len(wordings))
        if key not in self._wordings:
            self._wordings[key] = split_wordings(wordings)[self.unseen]
        return self.choice(self._wordings[key])

    def draw_key(self, draw: Callable, key: Callable[..., str]):
        """Draw until the drawn thing's key belongs to this split."""
        while True:
            drawn = draw()
            if held_out(key(drawn)) == self.unseen:
                return drawn

    def typed(self, text: str) -> str:
        """The text as people type it: often without a capital, a full stop or a question mark."""
        if self.chance(0.2):
            text = text[0].lower() + text[1:]
        if self.chance(0.2) and text[-1] in ".?!":
            text = text[:-1]
        return text

    def pseudo_word(self, syllables: int | None = None) -> str:
        """A word nobody has seen, so that copying is learnt and not a list of words."""
        starts = "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl sh st th tr".split()  # noqa: SIM905
        vowels = "a e i o u a e i o ai ee oo ou".split()  # noqa: SIM905
        ends = ["", "", "", "n", "r", "l", "m", "s", "t", "k", "x", "nd", "rt", "sh"]
        count = syllables or self.number(1, 3)
        word = "".join(self.choice(starts) + self.choice(vowels) for _ in range(count))
        return word + self.choice(ends)
