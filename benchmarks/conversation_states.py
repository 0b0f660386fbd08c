"""The part of a conversation that a model with states takes from the prefix cache.

    python benchmarks/conversation_states.py [--model q08] [--turns 20]

Each turn's prompt is the whole conversation so far and new tokens, of random ids: the model of random
weights (benchmarks/peers/checkpoints.py) answers anything. Prints what was cached of each prompt.
"""

from __future__ import annotations

import argparse
import random

from peers import checkpoints

from quire import LLM, SamplingParams

ASKED, ANSWERED = 60, 40  # tokens of a question and of its answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted(checkpoints.SHAPES)
    parser.add_argument("--model", choices=known, default="q08", help=f"of {', '.join(known)}")
    parser.add_argument("--turns", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--system", type=int, default=300, help="tokens before them (default: 300)")
    checkpoints.add_work_option(parser)
    options = parser.parse_args()
    folder = checkpoints.make(options.model, options.work)
    llm = LLM(str(folder), quantization="int4", num_threads=2, max_model_len=4096, max_num_seqs=4)
    draw, top = random.Random(0), checkpoints.SHAPES[options.model].vocab - 1

    def words(count: int) -> list[int]:
        return [draw.randint(checkpoints.FIRST_WORD, top) for _ in range(count)]

    params = SamplingParams(temperature=0, max_tokens=ANSWERED, ignore_eos=True, detokenize=False)
    known_tokens, cached, asked = words(options.system), 0, 0
    for turn in range(options.turns):
        known_tokens += words(ASKED)
        (output,) = llm.generate([{"prompt_token_ids": known_tokens}], params, use_tqdm=False)
        print(f"turn {turn + 1}: {output.num_cached_tokens} of {len(known_tokens)} tokens cached")
        cached, asked = cached + output.num_cached_tokens, asked + len(known_tokens)
        known_tokens += output.outputs[0].token_ids
    print(f"{cached} of {asked} tokens of all prompts were cached: {cached / asked:.1%}")
    llm.close()


if __name__ == "__main__":
    main()
