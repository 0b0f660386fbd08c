"""Adapters of requests: the bits of a solo run in any batch, equal to the merged model, one clear error."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import adapter_files as files
import numpy as np
import pytest
from test_exactness import fingerprint
from tiny import VOCAB, tiny

from quire import LLM, LoRARequest, SamplingParams
from quire.backends.native import _core
from quire.errors import ConfigError, RequestError
from quire.weights.adapters import read_adapter

PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, 20 + 7 * n).tolist() for n in range(6)]
ADAPTERS = [None, "a", "b", "c", "a", None]
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=5, logprobs=2, ignore_eos=True, detokenize=False)
SCORED = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return files.write_three(tmp_path / "adapters")


def load(model: Path, folder: Path | None, device: str = "reference", **options: Any) -> LLM:
    own = {} if folder is None else {"adapter_dir": str(folder)}
    return LLM(str(model), device=device, num_threads=2, packed_cache=False, **own, **options)


def run(llm: LLM, prompts: list[list[int]], adapters: Any, params: SamplingParams = PARAMS) -> list[str]:
    return [fingerprint(one) for one in llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)]


@pytest.mark.parametrize(
    ("device", "quantization"), [("reference", None), ("native", None), ("native", "int4")]
)
def test_batches(model: Path, folder: Path, device: str, quantization: str | None) -> None:
    """Beside others, in chunks and from the cache a request has the bits that it has alone."""
    how = {"device": device, "quantization": quantization}
    with load(model, folder, max_num_batched_tokens=32, **how) as llm:
        together = run(llm, PROMPTS, ADAPTERS)
        assert run(llm, PROMPTS[::-1], ADAPTERS[::-1]) == together[::-1]
    with load(model, folder, enable_prefix_caching=False, **how) as llm:
        pairs = zip(PROMPTS, ADAPTERS, strict=True)
        assert [run(llm, [prompt], adapter)[0] for prompt, adapter in pairs] == together
        assert len(set(run(llm, [PROMPTS[0]] * 4, [None, "a", "b", "c"]))) == 4
    with load(model, None, **how) as llm:  # requests without an adapter have the bits of the model
        assert run(llm, [PROMPTS[0], PROMPTS[5]], None) == [together[0], together[5]]


@pytest.mark.parametrize("device", ["reference", "native"])
def test_merged(
    model: Path, folder: Path, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An adapter in bf16 meets activations rounded to bf16 where the machine multiplies pairs of them.
    monkeypatch.setenv("QUIRE_ISA", _core.isas()[-1])
    with load(model, folder, device) as llm:
        found = {name: scores(llm, name) for name in "abc"}
    for name, own in found.items():
        with load(files.write_model(tmp_path / name, files.merged(folder, name)), None, device) as llm:
            assert np.abs(own - scores(llm, None)).max() < 1e-4


def scores(llm: LLM, adapter: str | None) -> np.ndarray:
    outputs = llm.generate(PROMPTS, SCORED, use_tqdm=False, lora_request=adapter)
    found = [position for output in outputs for position in output.prompt_logprobs or [] if position]
    return np.array([next(iter(position.values())).logprob for position in found])


def test_prefixes(model: Path, folder: Path) -> None:
    """An adapter's blocks never serve another's, nor one of the same name with other content."""
    with load(model, folder) as llm:

        def cached(adapter: str | None) -> int:
            (output,) = llm.generate([PROMPTS[5]], PARAMS, use_tqdm=False, lora_request=adapter)
            return output.num_cached_tokens or 0

        assert [cached(own) for own in ("a", "b", None, "c")] == [0] * 4
        assert [cached(own) for own in ("a", "b", None, "c")] == [48] * 4
        llm.adapters.unload("a")
        llm.adapters.load("a", "a")
        assert cached("a") == 48  # the same content
        llm.adapters.unload("a")
        files.write_adapter(folder / "a", files.config(), files.tensors({"mlp.down_proj": 4}, 9))
        assert cached(LoRARequest("a", 1, str(folder / "a"))) == 0


@pytest.mark.parametrize("device", ["reference", "native"])
def test_unloading(model: Path, folder: Path, device: str) -> None:
    """A request that runs keeps its adapter; new ones are refused; the memory is freed after it."""
    with load(model, folder, device) as llm:
        expected = run(llm, PROMPTS[:1], "b")
        stream = llm.stream(PROMPTS[:1], PARAMS, lora_request="b")
        next(stream)
        llm.adapters.unload("b")
        with pytest.raises(RequestError, match="'b' is not loaded"):
            llm.generate(PROMPTS[:1], PARAMS, lora_request="b")
        assert llm.adapters.has_unloaded
        *_, last = stream
        assert [fingerprint(last)] == expected
        assert not llm.adapters.has_unloaded


def test_threads_that_ask_for_the_same_new_adapter_share_it(model: Path, folder: Path) -> None:
    with load(model, folder) as llm:
        expected = run(llm, PROMPTS[:1], "a")
        llm.adapters.unload("a")
        ready, begun = threading.Barrier(3), llm.adapters._loading

        def ask(_: int) -> list[str]:
            ready.wait()
            return run(llm, PROMPTS[:1], LoRARequest("again", 1, "a"))

        with ThreadPoolExecutor(2) as pool:
            with begun:  # both find that it is not loaded
                asked = pool.map(ask, range(2))
                ready.wait()
                time.sleep(0.2)
            assert [*asked] == [expected] * 2


def test_drafts(model: Path, folder: Path) -> None:
    """Drafts by a model without the adapters change no bits."""
    with load(model, folder, "native", speculative="off") as llm:
        expected = run(llm, PROMPTS, ADAPTERS)
    with load(model, folder, "native", speculative=str(model)) as llm:
        assert run(llm, PROMPTS, ADAPTERS) == expected


Damage = Callable[[Path], object]


def tensor_file(**arrays: np.ndarray) -> Damage:
    return lambda at: files.write_adapter(at, files.config(), dict(arrays))


def stated(**changed: Any) -> Damage:
    return lambda at: (at / "adapter_config.json").write_text(json.dumps(files.config(**changed)))


def pickled(at: Path) -> None:
    (at / "adapter_model.safetensors").rename(at / "adapter_model.bin")


def linked(at: Path) -> None:
    outside = at.parent.parent / "outside.safetensors"
    (at / "adapter_model.safetensors").rename(outside)
    os.symlink(outside, at / "adapter_model.safetensors")


def cut(at: Path) -> None:
    path = at / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


Q = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN, UP = np.ones((4, 16), np.float32), np.ones((16, 4), np.float32)
BAD: dict[str, tuple[Damage, str]] = {
    "type": (stated(peft_type="IA3"), "peft_type = 'IA3' is not supported"),
    "dora": (stated(use_dora=True), "use_dora"),
    "bias": (stated(bias="all"), "bias = 'all'"),
    "saved": (stated(modules_to_save=["lm_head"]), "modules_to_save"),
    "init": (stated(init_lora_weights="pissa_niter_4"), "changes the model's weights"),
    "rank": (stated(r=65), "more than max_lora_rank = 64"),
    "no rank": (stated(r=0), "is not a rank"),
    "other rank": (stated(r=5), "not of rank 5"),
    "alpha": (stated(lora_alpha=float("inf")), "lora_alpha"),
    "pattern": (stated(rank_pattern={"(a+)+": 4}), "is not the name of modules"),
    "targets": (stated(target_modules=["k_proj"]), "does not target"),
    "layers": (stated(layers_to_transform=[7]), "does not target"),
    "pickle": (pickled, "no such file"),
    "link": (linked, "leads out of"),
    "cut": (cut, "ends at byte"),
    "one": (tensor_file(**{f"{Q}.lora_A.weight": DOWN}), "lora_A only"),
    "magnitude": (tensor_file(**{f"{Q}.lora_magnitude_vector": DOWN}), "is not a lora_A or lora_B weight"),
    "shape": (
        tensor_file(**{f"{Q}.lora_A.weight": DOWN[:, 1:].copy(), f"{Q}.lora_B.weight": UP}),
        r"adds to a matrix \[16, 15\], but the model has \[16, 16\]",
    ),
    "nan": (
        tensor_file(**{f"{Q}.lora_A.weight": DOWN * np.float32("nan"), f"{Q}.lora_B.weight": UP}),
        "not finite",
    ),
    "format": (
        tensor_file(**{f"{Q}.lora_A.weight": DOWN.astype(np.int32), f"{Q}.lora_B.weight": UP}),
        "stored as I32",
    ),
    "unknown": (
        tensor_file(**{"mlp.experts.0.lora_A.weight": DOWN, "mlp.experts.0.lora_B.weight": UP}),
        "is no linear module that takes adapters",
    ),
}


@pytest.fixture(scope="module")
def serving(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Path]:
    folder = files.write_three(tmp_path_factory.mktemp("some") / "adapters")
    return load(model, folder), folder


@pytest.mark.parametrize("fault", BAD)
def test_bad_files(serving: tuple[LLM, Path], fault: str) -> None:
    """One clear error, and nothing else is lost."""
    (llm, folder), (damage, message) = serving, BAD[fault]
    at = files.write_adapter(
        folder / f"bad {fault}", files.config(), files.tensors({"self_attn.q_proj": 4}, 4, (0,))
    )
    damage(at)
    with pytest.raises(ConfigError, match=message) as caught:
        llm.adapters.load("bad", at.name)
    assert "\n" not in caught.value.message
    assert [own.name for own in llm.adapters.loaded] == ["a", "b", "c"]


def test_paths(serving: tuple[LLM, Path], model: Path, tmp_path: Path) -> None:
    llm, folder = serving
    outside = files.write_adapter(tmp_path / "x", files.config(), files.tensors({"self_attn.q_proj": 4}, 4))
    os.symlink(outside, folder / "link")
    for path in (str(outside), "../outside", ".", "link", "/", ""):
        with pytest.raises(ConfigError, match="is not in the folder of adapters"):
            llm.adapters.load("x", path)
    os.symlink("circle", folder / "circle")
    for path in ("circle", "a\0", "missing", "a" * 5000):
        with pytest.raises(ConfigError, match=r"is no (path|folder)"):
            llm.adapters.load("x", path)
    for name in ("", "a b", "../x", "x" * 129):
        with pytest.raises(ConfigError, match="is no name for an adapter"):
            llm.adapters.load(name, "a")
    with pytest.raises(ConfigError, match="already loaded"):
        llm.adapters.load("a", "a")
    with load(model, None) as bare:
        for asked in ("a", ["a"], 7):
            with pytest.raises(RequestError, match="no adapters are loaded"):
                bare.generate(PROMPTS[:1], lora_request=cast(Any, asked))
    for asked in (7, [7]):
        with pytest.raises(RequestError, match="lora_request is a int"):
            llm.generate(PROMPTS[:1], lora_request=cast(Any, asked))


def test_a_copy_elsewhere_is_the_same_adapter(model: Path, folder: Path, tmp_path: Path) -> None:
    """Its digest keys the prefix cache and recordings, here and on other machines."""
    shutil.copytree(folder, tmp_path / "copy")
    weights = tiny("llama").program.weights().values()
    at, copy = (read_adapter(place / "a", place, weights, 64) for place in (folder, tmp_path / "copy"))
    assert at.digest == copy.digest
    assert read_adapter(folder / "b", folder, weights, 64).digest != at.digest
    stated(lora_alpha=7)(tmp_path / "copy" / "a")
    assert read_adapter(tmp_path / "copy" / "a", tmp_path / "copy", weights, 64).digest != at.digest


def test_a_bad_folder_at_the_start(model: Path, folder: Path) -> None:
    stated(r=5)(folder / "c")
    with pytest.raises(ConfigError, match="not of rank 5"):
        load(model, folder)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(model, folder / "missing")


def test_outputs_of_one_matrix(folder: Path) -> None:
    """Queries, keys and values that a checkpoint has in one matrix take their outputs of an adapter's."""
    name = "base_model.model.model.layers.0.self_attn.qkv_proj"
    rng = np.random.default_rng(0)
    down = rng.standard_normal((4, 16)).astype(np.float32)
    up = rng.standard_normal((32, 4)).astype(np.float32)
    at = files.write_adapter(
        folder / "p", files.config(), {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    )
    read = read_adapter(at, folder, tiny("phi3").program.weights().values(), 8)
    assert np.array_equal(np.concatenate([part.up for part in read.parts.values()]), up)
    assert all(np.array_equal(part.down, down) for part in read.parts.values())
