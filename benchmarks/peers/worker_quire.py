"""Quire through its public API; times are those the engine reports with every output."""

from __future__ import annotations

from pathlib import Path

from worker import Engine, serve

from quire import LLM, SamplingParams


class Quire(Engine):
    package = "quire"

    def load(self, path: Path, kind: str, threads: int) -> None:
        self.llm = LLM(
            str(path),
            quantization=kind if kind in ("int8", "int4") else None,
            num_threads=threads,
            max_model_len=self.longest,
            max_num_seqs=16,
            kv_cache_dtype=self.kv_cache,
            enable_prefix_caching=False,
            speculative="off",  # a token a step, as the others
        )

    def generate(self, prompts: list[list[int]], num_new: int) -> tuple[float, float]:
        params = SamplingParams(temperature=0, max_tokens=num_new + 1, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        metrics = [output.metrics for output in outputs]
        first = max(m.first_token_s for m in metrics)
        return first - min(m.arrival_s for m in metrics), max(m.finished_s for m in metrics) - first


if __name__ == "__main__":
    serve(Quire())
