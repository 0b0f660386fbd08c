"""Write the model card of an exported model from the records of its training and evaluation.

    python -m scripts.demo.card --name NAME --training RUN_DIR/training.json --results RESULTS.json \
        --hardware TEXT --out DIR/README.md

The results of the demo model are those of `evaluate`, of the draft model those of `agreement`.
"""

import argparse
import json
from pathlib import Path

from scripts.demo.model import SHAPES

WHAT = {
    "small_talk": "small talk: one of the known answers",
    "story": "story: contains all asked-for things",
    "story_question": "question about a story just told: exact answer",
    "arithmetic": "arithmetic: exact answer",
    "fact": "simple fact: exact answer",
    "words": "words (repeat, sort, reverse, count, spell ...): exact answer",
    "json": "JSON after a given schema: exact values",
    "tool_call": "tool call: right tool and right arguments",
    "two_calls": "two tool calls, sometimes with the answer to their results: all right",
    "tool_answer": "answer from a tool's result: exact answer",
    "no_tool": "no tool fits: a right plain answer",
}
ASPECTS = {"right_names": "tool call: right tool", "valid_json": "JSON after a given schema: valid JSON"}
INTRODUCTION = """\
A toy: a Llama-style chat model of {millions:.1f} million parameters that ships with Quire, so that everything
can be tried without a download. It is the model behind the name `demo`. It tells little stories about
asked-for things, does small sums, knows some simple facts, plays with words, fills in JSON and calls tools.
It often errs, and outside these things it is lost. Nothing it says should be relied on."""
DRAFT_INTRODUCTION = """\
A toy of {millions:.1f} million parameters that ships with Quire, so that speculative decoding with a draft
model can be tried without a download: `--speculative demo-draft`. It shares the tokenizer of the demo model
and guesses what that one says next; a single layer is too little to answer anything itself."""
TRAINED = (
    "Trained from scratch on dialogues that a seeded program writes (`scripts/demo`); no other text was used."
)
DRAFT_TRAINED = """\
Trained to say what the demo model would (its distribution at every token), on dialogues that a seeded
  program writes (`scripts/demo`); it began with the demo model's embedding and first layer."""


def score_rows(results: dict) -> list[str]:
    rows = []
    for task, scores in results["tasks"].items():
        rows += [
            f"| {ASPECTS[aspect]} ({task}) | {100 * scores[aspect]:.0f}% |"
            for aspect in ASPECTS
            if aspect in scores
        ]
        rows.append(f"| {WHAT[task]} | {100 * scores['right']:.0f}% |")
    return rows


def sample_block(samples: list[list[str]]) -> str:
    return "\n\n".join(f"> **{asked}**\n>\n> {answer}" for asked, answer in samples)


PAGE = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# Quire {name} model

{introduction}

## What it is

- {parameters:,} parameters in bfloat16: {layers}, hidden size
  {shape.hidden_size}, {shape.num_attention_heads} heads ({shape.num_key_value_heads} of keys and values),
  {shape.vocab_size} tokens, context {shape.max_position_embeddings}.
- Byte-level BPE tokenizer: any text comes back unchanged; digits stand alone.
- ChatML format; tools are listed in the system turn, calls are JSON between `<tool_call>` marks.
- {trained}
- Training: {millions_seen:.1f} million tokens in {minutes:.0f} minutes on {hardware}.

{quality}
## Licence

Apache-2.0, weights and scripts.
"""


QUALITY = """\
## How good it is

Greedy answers to {count} prompts of each task. All wordings, and the combinations of numbers, of a story's
hero and object, and of verb and noun in invented tools, were held out of training.

| task | right |
|---|---|
{scores}

Held-out loss: {loss:.3f} nats a token of the assistant.

## Samples

Greedy and unselected. Greedy stories often give everybody one name; at the default temperature of 0.5
everybody has their own.

{samples}
"""
AGREEMENT = """\
## How good it is

How often it says what the demo model says, token by token, along the held-out answers of {count} dialogues
of each task: greedily, and sampled at temperature 1 with the same random number in the best way.

| task | greedy | sampled |
|---|---|---|
{rows}
"""


def quality(results: dict) -> str:
    """The section on how good a chat model is."""
    return QUALITY.format(
        count=results["count"],
        scores="\n".join(score_rows(results)),
        loss=results["held_out_loss"],
        samples=sample_block(results["samples"]),
    )


def agreement(results: dict) -> str:
    """The section on how good a draft model is."""
    rows = [
        f"| {task} | {100 * rates['greedy']:.0f}% | {100 * rates['sampled']:.0f}% |"
        for task, rates in results["tasks"].items()
    ]
    return AGREEMENT.format(count=results["count"], rows="\n".join(rows))


def card(name: str, training: dict, results: dict, hardware: str) -> str:
    """The whole page."""
    drafts = name == "draft"
    introduction = DRAFT_INTRODUCTION if drafts else INTRODUCTION
    return PAGE.format(
        name=name,
        introduction=introduction.format(millions=training["parameters"] / 1e6),
        parameters=training["parameters"],
        shape=SHAPES[name],
        layers="1 layer" if drafts else f"{SHAPES[name].num_hidden_layers} layers",
        trained=DRAFT_TRAINED if drafts else TRAINED,
        millions_seen=training["tokens_seen"] / 1e6,
        minutes=training["minutes"],
        hardware=hardware,
        quality=agreement(results) if drafts else quality(results),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", choices=tuple(SHAPES), required=True)
    parser.add_argument("--training", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    training, results = (json.loads(path.read_text()) for path in (args.training, args.results))
    args.out.write_text(card(args.name, training, results, args.hardware), encoding="utf-8")


if __name__ == "__main__":
    main()
