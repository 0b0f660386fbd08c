"""OpenVINO GenAI: the continuous batching pipeline, stepped by hand, which LLMPipeline uses inside as well.

Exported by optimum-intel with weights alone in fewer bits. What OpenVINO then does with activations and
the KV cache is its default for the processor.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from worker import Engine, serve

FORMATS = {
    "bf16": ["--weight-format", "fp16"],  # of 16 bits; unasked, a model of a billion is rounded to 8
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--sym", "--group-size", "128", "--all-layers"],
}
FORMATS["int4"] += ["--group-size-fallback", "adjust"]  # where a row is no multiple of 128


class OpenVino(Engine):
    package = "openvino-genai"

    def prepare(self, checkpoint: Path, target: Path, kind: str) -> Path:
        if not target.exists():
            partial = target.with_name(target.name + ".partial")
            program = Path(sys.executable).with_name("optimum-cli")
            command = [program, "export", "openvino", "--model", checkpoint]
            command += ["--task", "text-generation-with-past", *FORMATS[kind], partial]
            if subprocess.run(list(map(str, command))).returncode:
                raise RuntimeError("optimum-cli could not export the checkpoint")
            partial.rename(target)
        return target

    def load(self, path: Path, kind: str, threads: int) -> None:
        import openvino
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = 64
        scheduler.cache_size = 2  # GB
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads}
        self.genai, self.tensor = genai, openvino.Tensor
        self.pipeline = genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", properties)
        self.next_id = 0

    def generate(self, prompts: list[list[int]], num_new: int) -> tuple[float, float]:
        begin = time.perf_counter()
        handles = self._add(prompts, num_new + 1)
        self._run(handles, until_first=True)
        first = time.perf_counter()
        self._run(handles, until_first=False)
        return first - begin, time.perf_counter() - first

    def _add(self, prompts: list[list[int]], num_tokens: int) -> list:
        config = self.genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        handles = []
        for prompt in prompts:
            ids = self.tensor(np.array([prompt], dtype=np.int64))
            handles.append(self.pipeline.add_request(self.next_id, ids, config))
            self.next_id += 1
        return handles

    def _run(self, handles: list, until_first: bool) -> None:
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            if until_first and all(handle.can_read() for handle in handles):
                return


if __name__ == "__main__":
    serve(OpenVino())
