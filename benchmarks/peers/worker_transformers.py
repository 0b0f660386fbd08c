"""Transformers with PyTorch in bf16: the model's forward in a bare greedy loop, less than generate() does."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from worker import Engine, serve


class Transformers(Engine):
    package = "transformers"

    def load(self, path: Path, kind: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    def generate(self, prompts: list[list[int]], num_new: int) -> tuple[float, float]:
        begin = time.perf_counter()
        cache = DynamicCache(config=self.model.config)
        tokens = self._step(torch.tensor(prompts), cache)
        first = time.perf_counter()
        for _ in range(num_new):
            tokens = self._step(tokens, cache)
        return first - begin, time.perf_counter() - first

    @torch.inference_mode()
    def _step(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        out = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    serve(Transformers())
