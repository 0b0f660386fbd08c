"""Measure how often a draft model says what the model it drafts for would say.

    python -m scripts.demo.agreement --draft DIR --model DIR --out RESULTS.json

Both read held-out dialogues. Counted are the tokens of the assistant: how often the most likely ones are
equal, and how often two samples are that use the same random number in the best way (the overlap of the two
distributions, at temperature 1).
"""

import argparse
import json
from pathlib import Path

import torch

from scripts.demo.evaluate import TASKS
from scripts.demo.generate import Chat
from scripts.demo.render import Encoder, render
from scripts.demo.source import Source


@torch.no_grad()
def agreement(draft: Chat, model: Chat, name: str, count: int) -> tuple[float, float]:
    """Return (share of equal greedy tokens, mean overlap) over the answers of `count` dialogues of a task."""
    source, encoder = Source(7, "held_out"), Encoder(model.tokenizer)
    equal = overlap = total = 0.0
    for _ in range(count):
        made = TASKS[name](source)
        ids, spoken = encoder(render(made.messages, made.tools))
        said = torch.tensor(spoken[1:])
        own, others = (
            chat.model.logits(chat.model.hidden(torch.tensor([ids[:-1]]))[0, said]).softmax(-1)
            for chat in (draft, model)
        )
        equal += (own.argmax(-1) == others.argmax(-1)).sum().item()
        overlap += torch.minimum(own, others).sum().item()
        total += len(own)
    return equal / total, overlap / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=100, help="dialogues of each task")
    args = parser.parse_args()
    torch.set_num_threads(1)
    draft, model = Chat(args.draft), Chat(args.model)
    tasks = {}
    for name in TASKS:
        greedy, sampled = agreement(draft, model, name, args.count)
        tasks[name] = {"greedy": round(greedy, 3), "sampled": round(sampled, 3)}
        print(f"{name:16} greedy {greedy:.1%}, sampled {sampled:.1%}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"count": args.count, "tasks": tasks}, indent=1))


if __name__ == "__main__":
    main()
