"""The endless stream of dialogues: tasks in their shares, joined to conversations of several turns."""

import itertools
from collections.abc import Iterator

from scripts.demo.arithmetic import arithmetic
from scripts.demo.extraction import extraction
from scripts.demo.facts import fact
from scripts.demo.small_talk import SYSTEM_PROMPTS, small_talk
from scripts.demo.source import Dialogue, Source
from scripts.demo.stories import story, story_question
from scripts.demo.tools import tool_talk
from scripts.demo.word_tasks import word_task

# Shares are of dialogues, not of tokens: a story says ten times as much as a sum.
SHARES = (
    (small_talk, 12),
    (story, 16),
    (story_question, 6),
    (arithmetic, 16),
    (fact, 14),
    (word_task, 12),
    (extraction, 12),
    (tool_talk, 24),
)
JOINABLE = ((small_talk, 6), (story, 4), (story_question, 1), (arithmetic, 6), (fact, 5), (word_task, 3))


def pick(source: Source, shares: tuple) -> Dialogue:
    tasks, weights = zip(*shares, strict=True)
    return source.random.choices(tasks, weights)[0](source)


def dialogue(source: Source) -> Dialogue:
    """One conversation: a task, or several that need no tools, one after the other."""
    made = pick(source, SHARES)
    system_first = made.messages[0]["role"] == "system"
    if made.tools is None and not system_first and source.chance(0.35):
        for _ in range(source.choice((1, 1, 2, 2, 3, 5))):
            more = pick(source, JOINABLE)
            made = Dialogue(made.messages + more.messages, more.task, None, more.expect)
    if not system_first and source.chance(0.15):
        made.messages = [{"role": "system", "content": source.choice(SYSTEM_PROMPTS)}, *made.messages]
    return made


def stream(seed: int, split: str = "train") -> Iterator[Dialogue]:
    """Dialogues without end, the same for the same seed."""
    source = Source(seed, split)
    return (dialogue(source) for _ in itertools.count())
