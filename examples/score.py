"""Score the lines of a file: the log-probability a model gives to each, all computed in batches.

    python examples/score.py [FILE] [MODEL]    FILE: one text per line; without one, a few sentences

Prints the sum of the log-probabilities in nats, the number of tokens, and the perplexity. The scores are
the same bits whatever else is in the batch. The first token of a line has nothing before it and no score.
"""

import math
import sys
from pathlib import Path

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput

SENTENCES = [
    "The capital of Norway is Oslo.",
    "The capital of Norway is Paris.",
    "Norway capital the Oslo of is.",
]


def logprobs(output: RequestOutput) -> list[float]:
    """Return the log-probability of each token of the prompt but the first."""
    positions = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [candidates[token].logprob for token, candidates in positions]


def main(file: str | None = None, model: str = "demo") -> None:
    text = Path(file).read_text("utf-8") if file else "\n".join(SENTENCES)
    lines = [line for line in text.splitlines() if line.strip()]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)  # 0: of the prompt's own tokens alone
    with LLM(model) as llm:
        outputs = llm.generate(lines, params, use_tqdm=False)
    print("   logprob  tokens  perplexity  text")
    for line, output in zip(lines, outputs, strict=True):
        values = logprobs(output)
        total = sum(values)
        perplexity = math.exp(-total / len(values)) if values else math.nan
        print(f"{total:10.3f}  {len(values):6}  {perplexity:10.3f}  {line}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
