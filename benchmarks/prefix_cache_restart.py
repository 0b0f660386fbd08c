"""Time to the first token after a restart, with blocks in files and without.

    python benchmarks/prefix_cache_restart.py MODEL --prompt-len 8192 --prompts 3
    python benchmarks/prefix_cache_restart.py MODEL --prompt-len 256 --prompts 20 --cold --busy --slow-mb-s 4

A first engine computes the prompts and keeps their blocks in a new folder. Two engines that know nothing yet
then get the same prompts in turns, one with the folder and one without, so that both see the same machine.
With --slow-mb-s reading from files is delayed to that rate, as on a slow disk; with --cold the files are
dropped from the page cache before each prompt, and with --busy another process writes to the same disk.

The ratio is that of the time without files over that with them: larger is better. Tokens must be equal.
Do not change the source of Quire meanwhile: blocks belong to a build, and none would be found.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.transfer import segment_index

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, detokenize=False)


def main() -> None:
    args = parsed()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, LLM(args.model, **options(args)) as plain:
        vocabulary = plain.frontend.model.config.vocab_size
        prompts = [
            [draw.randrange(5, min(1000, vocabulary)) for _ in range(args.prompt_len)]
            for _ in range(args.prompts)
        ]
        with LLM(args.model, prefix_cache_dir=folder, **options(args)) as writer:
            for prompt in prompts:
                first_token_s(writer, prompt)
        files = [os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)]
        print(f"{len(files)} files, {sum(files) / 1e6:,.0f} MB")
        if args.slow_mb_s:
            slow_down(args.slow_mb_s)
        before = partial(drop_from_page_cache, Path(folder)) if args.cold else lambda: None
        before()
        with LLM(args.model, prefix_cache_dir=folder, **options(args)) as restarted, writing(args.busy):
            time.sleep(args.pause)
            compare(plain, restarted, prompts, before)


def compare(plain: LLM, restarted: LLM, prompts: list[list[int]], before: Callable[[], None]) -> None:
    """Print the times of each prompt, how much of it was fetched, and the ratios."""
    times: dict[str, list[float]] = {"without": [], "with": []}
    for number, prompt in enumerate(prompts):
        before()
        arms = [(plain, "without"), (restarted, "with")]
        tokens, cached = [], 0
        for llm, name in arms if number % 2 else reversed(arms):
            took_s, num_cached, token_ids = first_token_s(llm, prompt)
            times[name].append(took_s)
            tokens.append(token_ids)
            cached = max(cached, num_cached)
        assert tokens[0] == tokens[1], "tokens differ"
        without, kept = times["without"][-1], times["with"][-1]
        words = f"with {kept:8.3f} s, {cached} tokens fetched"
        print(f"without {without:8.3f} s   {words}   {without / kept:6.2f} times", flush=True)
    ratios = [one / other for one, other in zip(times["without"], times["with"], strict=True)]
    medians = [statistics.median(times[name]) for name in ("without", "with")]
    print(f"median {statistics.median(ratios):.2f} times, {min(ratios):.2f} to {max(ratios):.2f}")
    print(f"of medians {medians[0] / medians[1]:.2f} times: {medians[0]:.3f} s and {medians[1]:.3f} s")


def first_token_s(llm: LLM, prompt: list[int]) -> tuple[float, int, list[int]]:
    """Return the time to the first token, how many tokens were cached, and the tokens."""
    (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None
    assert metrics.first_token_s is not None
    took_s = metrics.first_token_s - metrics.arrival_s
    return took_s, output.num_cached_tokens, list(output.outputs[0].token_ids)


def drop_from_page_cache(folder: Path) -> None:
    """Have the files of a folder read from the disk."""
    for path in folder.glob("*.blocks"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def writing(on: bool) -> Iterator[None]:
    """Keep the disk busy, as another program that writes to it."""
    if not on:
        yield
        return
    with tempfile.NamedTemporaryFile() as file:
        command = f"while :; do dd if=/dev/zero of={file.name} bs=1M count=256 oflag=direct status=none; done"
        writer = subprocess.Popen(["bash", "-c", command], start_new_session=True)
        try:
            yield
        finally:
            os.killpg(writer.pid, signal.SIGKILL)
            writer.wait()


def slow_down(megabytes_a_second: float) -> None:
    """Delay what is read from segments."""
    read = segment_index.read_frames

    def slowly(*args: Any) -> Iterator[memoryview]:
        for frame in read(*args):
            time.sleep(len(frame) / megabytes_a_second / 1e6)
            yield frame

    segment_index.read_frames = slowly


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of all engines."""
    return {
        "max_model_len": args.prompt_len + 64,
        "max_num_seqs": 4,
        "quantization": args.quantization,
        "speculative": "off",
    }


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt-len", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--quantization")
    parser.add_argument("--slow-mb-s", type=float, help="rate to which reading is slowed down")
    parser.add_argument("--cold", action="store_true", help="read from the disk, not from the page cache")
    parser.add_argument("--busy", action="store_true", help="while another process writes to the disk")
    parser.add_argument(
        "--pause", type=float, default=2.0, help="seconds from the restart to the first prompt"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
