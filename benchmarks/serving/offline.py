"""`LLM.generate` in a process of its own, which reads a line of JSON for each run.

    python -m serving.offline '{"model": "demo", "max_num_seqs": 32}'

The options are LLM's. A line is {"prompts": [[ids], ...], "max_tokens": N}; the answer says how many seconds
it took and how many tokens came.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Offline:
    """The caller's side."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Offline:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "serving.offline", json.dumps(self._options)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
            limit=1 << 24,
        )
        return self

    async def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Raises EOFError when the process has died."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await self._process.stdout.readline() or "null") or {}
        if not answer:
            raise EOFError("the process of LLM.generate has ended")
        return answer

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()


def main() -> None:
    from quire import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        begin_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin_s
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
