"""Measure the accuracy of an exported model on held-out wordings and combinations.

    python -m scripts.demo.evaluate --model DIR --out RESULTS.json

Every prompt comes from the held-out side of the generator: wordings that no training text has, and numbers,
pairs of a story's hero and object, or verbs and nouns of tools that never met in training. Answers are
greedy.
"""

import argparse
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import torch

from scripts.demo.arithmetic import arithmetic
from scripts.demo.extraction import extraction
from scripts.demo.facts import fact
from scripts.demo.generate import Chat
from scripts.demo.packing import batches
from scripts.demo.render import Encoder
from scripts.demo.small_talk import small_talk
from scripts.demo.source import Dialogue, Source
from scripts.demo.stories import story, story_question
from scripts.demo.tools import no_tool, tool_answer, tool_call, two_calls
from scripts.demo.word_tasks import word_task

TASKS: dict[str, Callable[[Source], Dialogue]] = {
    "small_talk": small_talk,
    "story": story,
    "story_question": story_question,
    "arithmetic": arithmetic,
    "fact": fact,
    "words": word_task,
    "json": extraction,
    "tool_call": tool_call,
    "two_calls": two_calls,
    "tool_answer": tool_answer,
    "no_tool": no_tool,
}
SAMPLES = (
    "Who are you?",
    "Tell me a story about a fox and a lantern.",
    "Can you write a story about a robot, an owl and a key?",
    "tell me a story about a dragon",
    "What is 27 + 14?",
    "What is the capital of Norway?",
    "Spell garden.",
    "Sort these words: plum, apple, melon",
    "Thanks, bye!",
)


def parse_json(text: str) -> object:
    """The value, or None if the text is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def parse_calls(text: str) -> list[tuple[object, object]]:
    """(name, arguments) of every call that is well formed."""
    bodies = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
    values = [parse_json(body) for body in bodies]
    return [(value.get("name"), value.get("arguments")) for value in values if isinstance(value, dict)]


def judge(expect: dict, answer: str) -> dict[str, bool]:
    """Score an answer by aspect; `right` is the strictest."""
    if "calls" in expect:
        calls = parse_calls(answer)
        return {
            "right_names": [name for name, _ in calls] == [name for name, _ in expect["calls"]],
            "right": calls == [tuple(call) for call in expect["calls"]],
        }
    if "json" in expect:
        value = parse_json(answer)
        return {"valid_json": value is not None, "right": value == expect["json"]}
    if "contains" in expect:
        return {"right": all(word in answer for word in expect["contains"])}
    if "any_of" in expect:
        return {"right": answer in expect["any_of"]}
    return {"right": answer == expect["exact"]}


def rates(verdicts: list[dict[str, bool]]) -> dict[str, float]:
    """Share of true verdicts by aspect, among the prompts that have the aspect."""
    votes = {
        aspect: [verdict[aspect] for verdict in verdicts if aspect in verdict]
        for aspect in ("valid_json", "right_names", "right")
    }
    return {aspect: round(sum(values) / len(values), 3) for aspect, values in votes.items() if values}


def evaluate_task(chat: Chat, name: str, count: int) -> tuple[dict[str, float], list[dict]]:
    """(rates by aspect, the first few failures)."""
    source, verdicts, failures = Source(7, "held_out"), [], []
    for _ in range(count):
        made = TASKS[name](source)
        answer = chat.answer(made.messages[:-1], made.tools)
        verdicts.append(judge(made.expect, answer))
        if not verdicts[-1]["right"]:
            failures.append(
                {"asked": made.messages[-2]["content"], "wanted": made.messages[-1], "said": answer}
            )
    return rates(verdicts), failures[:5]


@torch.no_grad()
def held_out_loss(chat: Chat, batch_count: int = 8) -> float:
    """Mean loss in nats of a token the assistant says."""
    source = batches(Encoder(chat.tokenizer), 1, "held_out", 512, 8)
    losses = [chat.model.summed_loss(*batch) for batch in itertools.islice(source, batch_count)]
    return sum(loss.item() for loss, _ in losses) / sum(weight for _, weight in losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=100, help="prompts of each task")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    chat = Chat(args.model)
    results = {
        "count": args.count,
        "held_out_loss": round(held_out_loss(chat), 4),
        "tasks": {},
        "failures": {},
    }
    for name in args.tasks:
        results["tasks"][name], results["failures"][name] = evaluate_task(chat, name, args.count)
        print(name, results["tasks"][name], flush=True)
    results["samples"] = [[text, chat.answer([{"role": "user", "content": text}])] for text in SAMPLES]
    if args.out:
        args.out.write_text(json.dumps(results, indent=1, ensure_ascii=False))
    print(
        json.dumps({key: results[key] for key in ("held_out_loss", "samples")}, indent=1, ensure_ascii=False)
    )


if __name__ == "__main__":
    main()
