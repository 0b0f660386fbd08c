"""Two runs of vLLM 0.19 with Llama-3.1-8B in bf16: 300 requests that arrive faster than they are served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from published_rows.models import CONFIGS
from quire.config import EngineConfig
from quire.roofline.machines import find
from quire.roofline.planning import make_plan
from quire.roofline.serving import Workload, serving
from quire.roofline.shares import Span


@dataclass(frozen=True)
class VllmRun:
    """A run, by its folder; the machine of the catalogue; and the settings in its record."""

    folder: str
    machine: str
    max_num_seqs: int
    max_num_batched_tokens: int


RUNS = (
    VllmRun("vllm_RTX4090_Llama-3.1-8B", "GeForce RTX 4090", 256, 2048),
    VllmRun("vllm_RTXPRO6000_Llama-3.1-8B", "RTX PRO 6000 Blackwell Server Edition", 128, 2048),
)


def compare(data: Path, run: VllmRun) -> Iterator[tuple[str, Span, float]]:
    """Yield (what, predicted, measured): mean time per output token, and seconds per 1,000 output tokens.

    The plan knows only the mean lengths of prompts and answers. How many sequences are computed together
    follows from its memory and max_num_seqs.
    """
    lines = (data / "perf" / run.folder / "requests.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    prompts, outputs = ([request[key] for request in requests] for key in ("input_toks", "output_toks"))
    workload = Workload(round(sum(prompts) / len(requests)), round(sum(outputs) / len(requests)))
    config = EngineConfig(
        model=str(data / "configs" / CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]),
        max_num_seqs=run.max_num_seqs,
        max_num_batched_tokens=run.max_num_batched_tokens,
    )
    found = serving(make_plan(config, find(run.machine)), workload)
    if found is None:
        raise ValueError(f"{run.folder}: the model does not fit")
    each = [
        (request["last_token_ts"] - request["first_token_ts"]) / (request["output_toks"] - 1)
        for request in requests
        if request["output_toks"] > 1
    ]
    yield "TPOT (s)", found.times["tpot", "mean"], sum(each) / len(each)
    first, last = (
        pick(request[key] for request in requests)
        for pick, key in ((min, "queued_ts"), (max, "last_token_ts"))
    )
    rate = found.tokens_per_s
    yield "s per 1,000 tokens", Span(1e3 / rate.roof, 1e3 / rate.typical), (last - first) / sum(outputs) * 1e3
