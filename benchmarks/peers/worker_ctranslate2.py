"""CTranslate2: int8 weights and activations, greedy generate_batch; a callback says when tokens come."""

from __future__ import annotations

import json
import time
from pathlib import Path

from worker import Engine, serve

COMPUTE = {"int8": "int8", "bf16": "bfloat16"}


class CTranslate2(Engine):
    package = "ctranslate2"

    def prepare(self, checkpoint: Path, target: Path, kind: str) -> Path:
        from ctranslate2.converters import TransformersConverter

        if not target.exists():
            partial = target.with_name(target.name + ".partial")
            converter = TransformersConverter(str(checkpoint), low_cpu_mem_usage=True)
            converter.convert(str(partial), quantization=COMPUTE[kind], force=True)
            partial.rename(target)
        return target

    def load(self, path: Path, kind: str, threads: int) -> None:
        import ctranslate2

        self.generator = ctranslate2.Generator(
            str(path), device="cpu", compute_type=COMPUTE[kind], intra_threads=threads, inter_threads=1
        )
        self.vocabulary: list[str] = json.loads((path / "vocabulary.json").read_text("utf-8"))

    def generate(self, prompts: list[list[int]], num_new: int) -> tuple[float, float]:
        begin = time.perf_counter()
        times = self._generate(prompts, num_new + 1)
        first = times[len(prompts) - 1]  # tokens come step by step, one of each prompt
        return first - begin, times[-1] - first

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> list[float]:
        """When each token came."""
        times: list[float] = []
        results = self.generator.generate_batch(
            [[self.vocabulary[token] for token in prompt] for prompt in prompts],
            min_length=num_tokens,
            max_length=num_tokens,
            include_prompt_in_result=False,
            callback=lambda _: times.append(time.perf_counter()),  # None: go on
        )
        if any(len(result.sequences_ids[0]) != num_tokens for result in results):
            raise RuntimeError("a sequence ended early")
        return times


if __name__ == "__main__":
    serve(CTranslate2())
