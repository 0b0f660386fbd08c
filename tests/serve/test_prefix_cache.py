"""A server that finds the blocks of its prompts again after it was ended, and after it was killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server import Server, running

NUM_PROMPTS, NUM_TOKENS = 3, 200
# Which computes slowly, so that fetching is always faster
SLOW = ("--device", "reference", "--speculative", "off", "--max-num-seqs", "2")


def ask(client: httpx.Client, number: int) -> tuple[dict[str, Any], int]:
    """Return the answer to one of the prompts, and how many of its tokens were cached."""
    prompt = [(37 * i + number) % 400 + 5 for i in range(NUM_TOKENS)]
    body = {"model": "demo", "prompt": prompt, "max_tokens": 3, "seed": 1, "logprobs": 2}
    got = client.post("/v1/completions", json=body).raise_for_status().json()
    return got["choices"][0], got["usage"]["prompt_tokens_details"]["cached_tokens"]


def counted(server: Server) -> dict[str, float]:
    """Return the counters of the blocks on disk."""
    with server.client() as client:
        families = text_string_to_metric_families(client.get("/metrics").text)
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        if not sample.name.endswith("_created") and sample.labels.get("place") == "disk":
            found[sample.labels.get("event", sample.name)] = sample.value
    return found


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_prompts_are_found_after_a_restart(tmp_path: Path, ending: signal.Signals) -> None:
    flags = (*SLOW, "--prefix-cache-dir", str(tmp_path / "blocks"), "--prefix-cache-bytes", "100M")
    with running(*flags) as server, server.client() as client:
        assert "blocks kept: 100 MB in" in " ".join(server.log.split())
        before = [ask(client, number) for number in range(NUM_PROMPTS)]
        assert [cached for _, cached in before] == [0] * NUM_PROMPTS
        if ending == signal.SIGKILL:
            _await_files(tmp_path / "blocks")
            os.kill(server.engine_pid, ending)
        server.stop(ending)
    with running(*flags) as server, server.client() as client:
        after = [ask(client, number) for number in range(NUM_PROMPTS)]
        assert [answer for answer, _ in after] == [answer for answer, _ in before]
        assert max(cached for _, cached in after) == NUM_TOKENS // 16 * 16
        now = counted(server)
    assert now["quire:block_store_blocks"] >= NUM_PROMPTS * (NUM_TOKENS // 16)
    assert now["quire:block_store_bytes"] > 0
    assert now["fetched"] >= NUM_TOKENS // 16
    assert now["damaged"] == now["evicted"] == 0


def _await_files(folder: Path) -> None:
    """Wait until the size of the files no longer grows: blocks are written when a second has passed."""
    deadline_s, size = time.monotonic() + 60, -1
    while (now := sum(path.stat().st_size for path in folder.glob("*.blocks"))) != size or not now:
        assert time.monotonic() < deadline_s
        size = now
        time.sleep(1.5)


def test_each_key_finds_its_own_after_a_restart(tmp_path: Path) -> None:
    keys, folder = tmp_path / "keys", tmp_path / "blocks"
    keys.write_text("one\ntwo\n")
    flags = (*SLOW, "--prefix-cache-dir", str(folder), "--api-key-file", str(keys), "--cache-per-key")
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    with running(*flags) as server, server.client(headers=one) as client:
        for number in range(NUM_PROMPTS):
            ask(client, number)
    with running(*flags) as server:
        with server.client(headers=two) as client:
            assert [ask(client, number)[1] for number in range(NUM_PROMPTS)] == [0] * NUM_PROMPTS
        with server.client(headers=one) as client:
            assert max(ask(client, number)[1] for number in range(NUM_PROMPTS)) > 0
