"""What the engine says without a server: run by the Python that quire is installed in.

Reads {"device": ..., "prompts": [token ids]} and writes, for each prompt, the logprob of each token but the
first, and whether it was the most likely one.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Standard input to standard output."""
    from quire import LLM, SamplingParams

    asked = json.load(sys.stdin)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with LLM("demo", device=asked["device"], num_threads=1) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    told = []
    for output in outputs:
        known = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        entries = [position[token] for position, token in known]
        told.append([[entry.logprob, entry.rank == 1] for entry in entries])
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
