"""Where the core's threads run, that their caller does not notice, and what becomes of their errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import adapter_files as files
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import CONFIGS, random_weights

from quire import LLM, SamplingParams
from quire.backends.native import _core
from quire.backends.native.device import NativeDevice
from quire.errors import ConfigError
from quire.models import read_model

ALL = os.sched_getaffinity(0)
WIDTH = 1 << 18  # of an MLP: a tile of rows for an adapter takes 10 MB, which its thread allocates
NO_MEMORY = """
import resource, sys
from quire import LLM, SamplingParams
from quire.errors import EngineDead

def answer(adapter=None):
    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False, lora_request=adapter)
    return output.outputs[0].token_ids

with LLM(sys.argv[1], adapter_dir=sys.argv[2], device="native", num_threads=3, packed_cache=False) as llm:
    answer()
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (4 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        answer("wide")
    except EngineDead as error:
        print(error.message)
"""


def tasks() -> set[int]:
    return {int(folder.name) for folder in Path("/proc/self/task").iterdir()}


def where(num_threads: int) -> list[set[int]]:
    """The processors that each of the core's own threads may use. Its caller's computes beside them."""
    before = tasks()
    with LLM("demo", device="native", num_threads=num_threads) as llm:
        llm.generate("Once", SamplingParams(max_tokens=4), use_tqdm=False)
        assert os.sched_getaffinity(0) == ALL
        return [os.sched_getaffinity(thread) for thread in tasks() - before]


def test_as_many_threads_as_cores_keep_to_one_each() -> None:
    found = where(_core.num_cores())
    assert len(found) == _core.num_cores() - 1
    assert sum(map(len, found)) == len(set().union(*found)) < len(ALL)


def test_other_numbers_of_threads_go_where_they_like() -> None:
    """Within their node, if there are several."""
    nodes = _core.Nodes(_core.num_cores() + 1)
    expected = [set(nodes.processors(thread)) or ALL for thread in range(1, nodes.num_threads)]
    assert sorted(map(sorted, where(nodes.num_threads))) == sorted(map(sorted, expected))


def test_a_thread_without_memory_ends_the_step_with_an_error(tmp_path: Path) -> None:
    """An exception of a thread, such as that of an allocation, reaches the caller, and none waits for it."""
    config = {**CONFIGS["llama"], "num_hidden_layers": 1, "intermediate_size": WIDTH}
    model, name = tmp_path / "model", "base_model.model.model.layers.0.mlp.down_proj"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    weights = random_weights(read_model(config).program)
    save_file({key: weight.array for key, weight in weights.items()}, model / "model.safetensors")
    arrays = {
        f"{name}.lora_A.weight": np.ones((4, WIDTH), "f4"),
        f"{name}.lora_B.weight": np.ones((16, 4), "f4"),
    }
    files.write_adapter(tmp_path / "adapters" / "wide", files.config(target_modules=["down_proj"]), arrays)
    command = [sys.executable, "-c", NO_MEMORY, str(model), str(tmp_path / "adapters")]
    bare = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # no sanitizer
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=bare)
    said = "a step failed (MemoryError: std::bad_alloc)\n"
    assert (ended.returncode, ended.stdout) == (0, said), ended.stderr


LOST = """
import numpy as np
from quire.backends.native import _core
from quire.backends.native.device import NativeDevice

native = _core.Native(_core.isas()[0], 2)
tokens, logits = native.buffer("T", 8), native.buffer("L", 8)
native.rotary("T", tokens, tokens, 1, 8, native.rope_table(4, 1.0, []), False)
native.sampled_rows(logits, tokens, 8)
at = lambda *numbers: np.array(numbers, np.int64)
for _ in range(30):
    try:
        where = (np.arange(100), np.arange(100), at(0, 100), [], at(0))
        native.run(*where, at(1), at(0, 1), [], [], logits, 8, [], None)
    except IndexError:
        print("error", flush=True)
"""


def test_an_error_before_other_threads_begin_leaves_none_at_a_barrier() -> None:
    """The variant has no frequencies: the first task fails, often before the second thread has woken up."""
    command, bare = [sys.executable, "-c", LOST], {**os.environ}
    bare.pop("LD_PRELOAD", None)  # no sanitizer: the command takes the core that is installed
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=bare)
    assert (ended.stdout.count("error"), ended.returncode) == (30, 0)


FEW = """
import resource
from quire.backends.native import _core
from quire.backends.native.device import NativeDevice

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), resource.RLIM_INFINITY))
try:
    _core.Native(_core.isas()[0], 64)
except RuntimeError as error:
    print(error)
"""


def test_a_system_that_grants_no_more_threads_is_an_error() -> None:
    """Here it has no memory for their stacks. Those that were started end."""
    command, bare = [sys.executable, "-c", FEW], {**os.environ}
    bare.pop("LD_PRELOAD", None)  # no sanitizer
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=bare)
    assert (ended.stdout, ended.returncode) == ("Resource temporarily unavailable\n", 0), ended.stderr


def test_it_is_told_which_number_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def native(*_: object) -> None:
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(_core, "Native", native)
    with pytest.raises(ConfigError, match=r"3 threads cannot be started: .*\nhint: lower num_threads"):
        LLM("demo", device="native", num_threads=3)


def test_more_threads_than_processors_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """They wait for each other at the end of every phase."""
    count = len(os.sched_getaffinity(0))
    NativeDevice("demo", count)
    assert not caplog.records
    NativeDevice("demo", count + 1)
    assert f"num_threads = {count + 1} is slower than {count}" in caplog.text
