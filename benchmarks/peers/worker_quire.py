"""Quire through its public API; times are those the engine reports with every output."""

from __future__ import annotations

from pathlib import Path

from worker import Engine, serve

from quire import LLM, RequestOutput, SamplingParams

LONGEST = 4096 + 128  # of a prompt with its output: what the measures need


class Quire(Engine):
    package = "quire"

    def load(self, path: Path, kind: str, threads: int) -> None:
        self.llm = LLM(
            str(path),
            quantization=kind if kind in ("int8", "int4") else None,
            num_threads=threads,
            max_model_len=LONGEST,
            max_num_seqs=16,
            enable_prefix_caching=False,
            speculative="off",  # a token a step, as the others
        )

    def prefill(self, prompt: list[int]) -> float:
        metrics = self._generate([prompt], 1)[0].metrics
        return metrics.first_token_s - metrics.arrival_s

    def decode(self, prompts: list[list[int]], num_new: int) -> float:
        metrics = [output.metrics for output in self._generate(prompts, num_new + 1)]
        return max(m.finished_s for m in metrics) - max(m.first_token_s for m in metrics)

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> list[RequestOutput]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


if __name__ == "__main__":
    serve(Quire())
