"""Quire next to llama.cpp, ik_llama.cpp, OpenVINO GenAI, CTranslate2 and others, on this machine's CPU.

    python benchmarks/cpu_peers.py --quick                 a small model, two rounds: does everything work?
    python benchmarks/cpu_peers.py --json all.json         all but the longest; hours, most of them contexts
    python benchmarks/cpu_peers.py --models l1b --kinds int4 --cases prefill decode1
    python benchmarks/cpu_peers.py --models l1b --kinds int4 --cases context16k --kv-cache int8

Makes what it needs in --work: an environment for each engine (llama.cpp and ik_llama.cpp are compiled for
this processor), checkpoints of random weights in the shapes of published models (speed does not depend on
the values), and each engine's own format of them. About 20 GB; all of it may be deleted, and is used again if
it is not.

Every engine is a process of its own with --threads threads, fed the same token ids, stopped while it is not
its turn. In each round all engines are measured one after the other, beginning with another one each time,
and the machine's roof (`quire probe`) once, so a slow moment falls on all of them. Medians count.
"others" is how many cores other processes kept busy meanwhile: a row where it is not near 0 says little, for
engines whose threads spin lose most.

    load        seconds from starting the process until it could answer, files in the page cache
    prefill     a prompt of 512 tokens until its first token: tokens a second
    decode1     64 tokens after a prompt of 16, from the first token on: tokens a second
    decode4/16  the same for 4 and 16 prompts at once, all of them together
    context     a prompt of 4096 tokens until its first token, then 64 tokens: two lines, at most 3 rounds
    context16k  the same with 16,384 tokens, at most 2 rounds; only when it is named
    context32k  with 32,768, one round; only when it is named: of llama.cpp that can take an hour

int4 is 4 bits for every matrix (llama.cpp Q4_0; OpenVINO symmetric, groups of 128), int8 is 8 (Q8_0),
bf16 the checkpoint as it is. q4_k_m and q8_0 are GGUF files that Quire and llama.cpp load as they are.
--kv-cache is the format of Quire's keys and values; those of others have their default.

ik_llama.cpp, a fork of llama.cpp with faster kernels for CPUs, reads the files of llama.cpp, repacks them
while loading and fuses attention (what its tools call -rtr 1 -fa 1). It is cloned with git and compiled as
benchmarks/peers/ik_llama says; QUIRE_IK_LLAMA names another repository to clone, such as a folder.

The mixture of experts (moe) is converted for no other engine, and measured against the bytes that a token
meets; the ones with latent attention (mla) and delta nets (q08) for llama.cpp alone; LFM2, Granite 4 H and
Gemma 4 E2B (lfm2, granite4h, gemma4e) are GGUF files only. On a CPU CTranslate2 has int8 only and
transformers is run in bf16 only; their other cells stay empty. An engine that cannot be installed or fails is
named, with the reason, and left out.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peers import checkpoints, gguf_file, roof
from peers.environments import GGUF, KINDS, PEERS, InstallFailed, ensure
from peers.process import EngineFailed, Worker
from peers.report import Report, Row
from peers.roof import Case
from peers.shapes import SHAPES
from rich.console import Console

HYBRID = ("lfm2", "granite4h", "gemma4e")
SHORT = ("l1b", "s135", "mla", "q08", *HYBRID)
CASES = (
    Case("load", "load"),
    Case("prefill", "prefill 512", prompt=512, models=SHORT),
    Case("decode1", "decode, 1 stream", prompt=16, num_new=64, models=(*SHORT, "moe")),
    Case("decode4", "decode, 4 streams", prompt=16, streams=4, num_new=64),
    Case(
        "decode16",
        "decode, 16 streams",
        prompt=16,
        streams=16,
        num_new=64,
        models=SHORT,
    ),
    Case("context", "decode at 4096", prompt=4096, num_new=64, models=("l1b", "mla"), most_rounds=3),
    Case("context16k", "decode at 16384", prompt=16_384, num_new=64, models=("l1b",), most_rounds=2),
    Case("context32k", "decode at 32768", prompt=32_768, num_new=64, models=("l1b",), most_rounds=1),
)
USUAL_PROMPT = 4096  # cases of longer ones are run only when they are named
WARMUP_PROMPT, WARMUP_TOKENS = 512, 4
ROOM = 128  # tokens of an answer at most
KV_CACHES = ("auto", "float32", "float16", "bfloat16", "int8")
TABLE_WIDTH = 150  # of a narrower terminal the lines break, but nothing is cut off


class Benchmark:
    """A run: engines drop out when they fail, the others go on."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self.console = options, console
        self.work: Path = options.work
        self.report = Report(tuple(options.engines), options.threads, options.rounds, options.kv_cache)
        self.pythons: dict[str, Path] = {}
        self.has_roof = False

    def run(self) -> None:
        """Install, then measure one model in one kind after another, so that few engines share memory."""
        for name in self.options.engines:
            self.console.print(f"environment of {name}", style="dim")
            try:
                self.pythons[name] = ensure(PEERS[name], self.work)
            except InstallFailed as problem:
                self.leave_out(name, problem)
        self.has_roof = roof.measure(self.options.threads) is not None
        if not self.has_roof:
            self.leave_out("the roof", "`quire probe --json` gave none")
        for model in self.options.models:
            for kind in self.options.kinds:
                self.measure(model, kind)

    def leave_out(self, what: str, why: Exception | str) -> None:
        self.report.missing.append(f"{what}: {why}")
        self.console.print(f"left out: {what}: {why}", style="red", highlight=False, soft_wrap=True)

    def measure(self, model: str, kind: str) -> None:
        """All cases of one model in one kind."""
        paths = self.prepare(model, kind)
        if not paths:
            return
        wanted = [case for case in CASES if case.name in self.options.cases and model in case.models]
        for case in wanted:
            if case.name == "load":
                self.measure_loads(Row(model, kind, case), paths)
        answering = [case for case in wanted if case.prompt]
        if not answering:
            return
        with ExitStack() as stack:
            workers = {}
            for name, path in paths.items():
                worker = stack.enter_context(self.worker(name))
                if self.load(worker, model, kind, path):
                    workers[name] = worker
            for case in answering:
                self.measure_case([Row(model, kind, part) for part in case.parts], workers)

    def prepare(self, model: str, kind: str) -> dict[str, str]:
        """Return the checkpoint of each engine; missing ones are written."""
        try:
            checkpoint = self.checkpoint(model, kind)
        except ValueError as problem:
            self.leave_out(f"{model} {kind}", problem)
            return {}
        paths = {}
        for name in self.pythons:
            if kind not in PEERS[name].kinds:
                continue
            target = self.work / "converted" / f"{model}-{kind}-{PEERS[name].files or name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            self.console.print(f"{model} {kind}: preparing {name}", style="dim")
            with self.worker(name) as worker:
                try:
                    reply = worker.ask("prepare", checkpoint=str(checkpoint), target=str(target), kind=kind)
                    paths[name] = reply["path"]
                except EngineFailed as problem:
                    self.leave_out(f"{name} {model} {kind}", problem)
        return paths

    def checkpoint(self, model: str, kind: str) -> Path:
        """Return what engines convert or load; ValueError if the model cannot be had in this kind."""
        if kind in GGUF:
            return gguf_file.make(model, kind, self.work)
        if model not in checkpoints.SHAPES:
            raise ValueError(f"{SHAPES[model].title} is made as a GGUF file only")
        return (checkpoints.rounded if kind == "w8a8" else checkpoints.make)(model, self.work)

    def measure_loads(self, row: Row, paths: dict[str, str]) -> None:
        """Every sample is a new process, so what it imports counts too, as for a user."""
        alive = dict(paths)
        for index in range(self.options.rounds + 1):  # the first one only fills the page cache
            for name in rotated(list(alive), index):
                begin = time.perf_counter()
                with self.worker(name) as worker:
                    is_loaded = self.load(worker, row.model, row.kind, alive[name])
                    taken = time.perf_counter() - begin  # before its process is ended
                if not is_loaded:
                    del alive[name]
                    row.samples.pop(name, None)
                elif index:
                    row.add(name, taken, worker)
        self.keep(row)

    def measure_case(self, rows: list[Row], workers: dict[str, Worker]) -> None:
        """All rounds of one case, whose last row names it. Engines that fail are taken out of `workers`."""
        model, kind, case = rows[-1].model, rows[-1].kind, rows[-1].case
        rounds = min(self.options.rounds, case.most_rounds or self.options.rounds)
        for index in range(-1, rounds):  # round -1 warms up, and is short
            prompts, num_new = token_ids(model, case, index), case.num_new
            if index < 0:
                prompts = [prompt[:WARMUP_PROMPT] for prompt in prompts]
                num_new = min(num_new, WARMUP_TOKENS)
            for name in rotated(list(workers), index):
                worker = workers[name]
                reply = self.ask(worker, f"{model} {kind}", "generate", prompts=prompts, num_new=num_new)
                if reply is None:
                    del workers[name]
                    for row in rows:
                        row.samples.pop(name, None)
                elif index >= 0:
                    for row in rows:
                        row.add(name, row.case.rate(reply["first_s"], reply["rest_s"]), worker)
            if index >= 0 and self.has_roof and (peaks := roof.measure(self.options.threads)):
                for row in rows:
                    row.peaks.append(peaks)
        for row in rows:
            peaks, cache = roof.median(row.peaks), self.options.kv_cache
            row.roof = roof.limit(row.case, SHAPES[model], kind, cache, peaks)
            self.keep(row)

    def worker(self, name: str) -> Worker:
        return Worker(PEERS[name], self.pythons[name], self.work)

    def load(self, worker: Worker, model: str, kind: str, path: str) -> bool:
        """Load a checkpoint for all cases; whether it succeeded."""
        asked = [case.prompt for case in CASES if case.name in self.options.cases and model in case.models]
        longest = max([USUAL_PROMPT, *asked]) + ROOM
        request = {"path": path, "kind": kind, "threads": self.options.threads, "longest": longest}
        reply = self.ask(worker, f"{model} {kind}", "load", kv_cache=self.options.kv_cache, **request)
        if reply:
            self.report.versions[worker.name] = reply["version"]
        return reply is not None

    def ask(self, worker: Worker, model: str, do: str, **request: Any) -> dict[str, Any] | None:
        """Have one request answered; None if it failed, which is reported once."""
        try:
            return worker.ask(do, **request)
        except EngineFailed as problem:
            self.leave_out(f"{worker.name} {model} {do}", problem)
            return None

    def keep(self, row: Row) -> None:
        """A finished row: into the report, and at once to whoever waits."""
        if not row.samples:
            return
        self.report.rows.append(row)
        found = "  ".join(f"{name} {value:.4g}" for name, value in row.medians.items())
        self.console.print(
            f"{row.model} {row.kind} {row.case.title}, {row.case.unit}: {found}", highlight=False
        )


def rotated(names: list[str], index: int) -> Iterator[str]:
    """The names, beginning with another one in each round."""
    for place in range(len(names)):
        yield names[(index + place) % len(names)]


def token_ids(model: str, case: Case, index: int) -> list[list[int]]:
    """Prompts of words, new ones every round: no cache of an engine may know them."""
    draw = random.Random(f"{case.name} {index}")
    top = SHAPES[model].vocab - 1
    return [
        [draw.randint(checkpoints.FIRST_WORD, top) for _ in range(case.prompt)] for _ in range(case.streams)
    ]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    titles = [f"{name}: {shape.title}" for name, shape in SHAPES.items()]
    choices = {
        "engines": (PEERS, f"of {', '.join(PEERS)}"),
        "models": (SHAPES, f"of {', '.join(titles)}"),
        "kinds": (KINDS, f"of {', '.join(KINDS)}"),
        "cases": ([case.name for case in CASES], "of those above"),
    }
    for option, (known, about) in choices.items():
        parser.add_argument(
            f"--{option}", nargs="+", choices=known, default=list(known), metavar="NAME", help=about
        )
    parser.set_defaults(cases=[case.name for case in CASES if case.prompt <= USUAL_PROMPT])
    parser.add_argument(
        "--kv-cache",
        choices=KV_CACHES,
        default="auto",
        metavar="FORMAT",
        help=f"of Quire, of {', '.join(KV_CACHES)}",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="measures of each (default: 5)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of each engine (default: 2)")
    parser.add_argument("--quick", action="store_true", help="the same as --models s135 --rounds 2")
    checkpoints.add_work_option(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here")
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds = ["s135"], 2
    return options


def main() -> None:
    options = read_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that workers are ended too
    benchmark = Benchmark(options, Console(width=max(Console().width, TABLE_WIDTH)))
    try:
        benchmark.run()
    finally:  # an interrupted run shows what it has
        benchmark.report.write(benchmark.console, options.json, options.markdown)


if __name__ == "__main__":
    main()
