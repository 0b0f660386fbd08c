"""Train the byte-level BPE tokenizer on the generator's own text.

python -m scripts.demo.train_tokenizer OUT.json
"""

import argparse
import itertools
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.demo.dialogues import stream
from scripts.demo.render import END_OF_TEXT, IM_END, IM_START, render

SPECIAL = (END_OF_TEXT, IM_START, IM_END)
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCAB_SIZE = 2048
DIALOGUES = 60_000


def build() -> Tokenizer:
    """An untrained tokenizer: digits stand alone, every other piece is split as GPT-2 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(dialogues: int = DIALOGUES) -> Tokenizer:
    """The marks take the first ids; all 256 bytes are in the vocabulary, so any text comes back unchanged."""
    tokenizer = build()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL, *MARKERS],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = (render(made.messages, made.tools) for made in itertools.islice(stream(0), dialogues))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def serialize(tokenizer: Tokenizer) -> str:
    """The JSON file. The trainer makes every mark special; those of tools must survive decoding as text."""
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return json.dumps(content, ensure_ascii=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    args = parser.parse_args()
    tokenizer = train()
    Path(args.out).write_text(serialize(tokenizer), encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
