"""Adapters on the interpreted accelerator: near the reference, and the same bits in any company."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_accelerator import CHECKPOINT, interpreted, wide, write_checkpoint
from safetensors.numpy import save_file
from test_exactness import fingerprint
from test_float_kernels import close, multiplied
from tiny import VOCAB, Paged, batch_of, same_bits

from quire import LLM, SamplingParams
from quire.backends.cuda import adapters, graphs, interpreter
from quire.backends.cuda.adapters import KINDS, DeviceAdapters
from quire.backends.cuda.interpreted import InterpretedAccelerator
from quire.backends.cuda.kernels import adapters as kernels
from quire.backends.cuda.kernels.product_variants import PRECISIONS
from quire.backends.cuda.kernels.variants import variants
from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Program
from quire.program.passes import adaptable, fuse, module_of
from quire.program.program import LowRank
from quire.quantize.kinds import DTYPES
from quire.types import Admission

TOKENS = np.random.default_rng(4).integers(0, VOCAB, 60).tolist()
F32 = np.dtype(np.float32)


def normal(rng: np.random.Generator, shape: tuple[int, ...], format: str = "f32") -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(DTYPES[format])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_rows_of_several_adapters(kind: str) -> None:
    """Three segments of inputs, ranks that fill no tile, rows of none, and one of another format."""
    rng, dtype = np.random.default_rng(2), KINDS[kind]
    x, out = normal(rng, (21, 1040)), normal(rng, (21, 70))
    own = np.array([0, 2, -1, 0, 1, *[2] * 15, 3], np.int32)  # 3 is of another format
    ranks, scales = (5, 16, 64), np.array([0.5, 2.0, 1.5, 7.0], np.float32)
    down = [normal(rng, (rank, 1040)).astype(dtype) for rank in ranks]
    up = [np.pad(normal(rng, (rank, 70)).astype(dtype), [(0, 0), (0, 10)]) for rank in ranks]
    table = np.zeros((4, 3), np.int64)
    for number, (one, other) in enumerate(zip(down, up, strict=True)):
        table[number] = one.ctypes.data, other.ctypes.data, len(one)
    wanted = out.copy()
    for number, (one, other) in enumerate(zip(down, up, strict=True)):
        rows = own == number
        hidden = (multiplied(x[rows], one) * scales[number]).astype(np.float32)
        wanted[rows] += multiplied(hidden, other[:, :70].T)
    found = []
    for tokens in (1, 16):
        tiles, one, partial = -(-21 // tokens), out.copy(), np.full((21, 3, 64), np.nan, np.float32)
        how = {"PRECISION": PRECISIONS[kind], "BLOCK_M": 16}
        args = [partial, x, own, table, 21, tokens, 1040]
        interpreter.run(kernels.adapter_down, (3, tiles), args, how | {"BLOCK_K": 64})
        args = [one, partial, own, table, scales, 21, tokens, 3, 70]
        interpreter.run(kernels.adapter_up, (2, tiles), args, how | {"BLOCK_N": 64})
        found.append(one)
    assert close(found[0], wanted, 5e-3 if kind == "bf16" else 2e-6)
    assert same_bits(found[0], found[1])
    assert same_bits(found[0][[2, 20]], out[[2, 20]])


def parts_of(program: Program, seed: int, rank: int, format: str, every: int = 1) -> dict[str, LowRank]:
    """Matrices for every so many of the products that may have adapters."""
    rng = np.random.default_rng(seed)
    names = [spec for spec in program.weights().values() if len(spec.shape) == 2 and module_of(spec)]
    return {
        spec.name: LowRank(
            normal(rng, (rank, spec.shape[1]), format), normal(rng, (spec.shape[0], rank), format), 1.5
        )
        for spec in names[::every]
        if "embed" not in spec.name
    }


def rows_of(paged: Paged, sequences: Sequence[Any], counts: Sequence[int], names: Sequence[str]) -> Any:
    """Logits of the next tokens of sequences with these adapters."""
    rows = [(one, count) for one, count in zip(sequences, counts, strict=True) if count]
    own = [name for name, count in zip(names, counts, strict=True) if count]
    batch = replace(
        batch_of(rows, paged.block_size, ids=paged.ids),
        admissions=tuple(
            Admission(one.slot, str(one.slot), 0, SamplingParams(), (), 1, adapter=name)
            for (one, _), name in zip(rows, own, strict=True)
        ),
    )
    logits = np.array(paged.backend.execute(batch))
    for one, count in rows:
        one.computed += count
    return np.split(logits, np.cumsum([count for _, count in rows])[:-1])


@pytest.mark.parametrize("quantized", [False, True])
def test_a_step_is_that_of_the_reference(quantized: bool) -> None:
    """Beside one in float16, one of other products, and none; also of products of integers."""
    from test_whole_models import stored

    program = fuse(adaptable(wide("qwen2", num_hidden_layers=1).program))
    weights = stored(program, "int8" if quantized else "f32")
    own = {"a": parts_of(program, 1, 5, "f32"), "b": parts_of(program, 2, 3, "f16", every=2)}
    names, prompts = ("a", "", "b", "a"), [TOKENS[:9], TOKENS[9:12], TOKENS[12:19], TOKENS[19:20]]
    found = []
    for make in ({}, {"make": interpreted}):
        paged = Paged(program, weights, **make)
        for name, parts in own.items():
            paged.backend.add_adapter(name, parts)
        sequences = [paged.sequence(prompt) for prompt in prompts]
        found.append(rows_of(paged, sequences, [len(prompt) for prompt in prompts], names))
    for wanted, one in zip(*found, strict=True):
        assert close(one, wanted, 2e-5)
    assert not close(found[1][0], rows_of(paged, [paged.sequence(prompts[0])], [9], [""])[0], 0.1)
    # Alone, in chunks of other sizes than beside others.
    alone = paged.sequence(prompts[0])
    parts = [rows_of(paged, [alone], [count], ["a"])[0] for count in (1, 6, 2)]
    assert same_bits(np.concatenate(parts), found[1][0])


def test_ranks_without_kernels_are_refused() -> None:
    program = adaptable(wide("llama", num_hidden_layers=1).program)
    found = DeviceAdapters(InterpretedAccelerator(), program)
    with pytest.raises(ConfigError, match="adapters of rank 65"):
        found.add("a", parts_of(program, 1, 65, "f32"))


PARAMS = SamplingParams(max_tokens=4, temperature=0.8, seed=5, logprobs=1, ignore_eos=True, detokenize=False)
PROMPTS = [TOKENS[:12], TOKENS[12:15], TOKENS[15:20], TOKENS[20:22]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, (name, format) in enumerate({"a": "bf16", "b": "f32", "c": "bf16"}.items()):
        program = read_model(CHECKPOINT).program
        (tmp_path / name).mkdir()
        arrays = {}
        for weight, part in parts_of(program, seed, 4, format, every=1 + seed).items():
            module = f"base_model.model.{weight.removesuffix('.weight')}"
            arrays |= {f"{module}.lora_A.weight": part.down, f"{module}.lora_B.weight": part.up}
        save_file(arrays, tmp_path / name / "adapter_model.safetensors", {"format": "pt"})
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "target_modules": None}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


def load(model: str, folder: Path, **options: Any) -> LLM:
    how: dict[str, Any] = {"device": "cuda-interpreted", "block_size": 8, "speculative": "off"}
    return LLM(model, adapter_dir=str(folder), **{"max_model_len": 64, **how, **options})


def ask(llm: LLM, prompts: Sequence[list[int]], names: Any) -> list[str]:
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [fingerprint(one) for one in llm.generate(asked, PARAMS, use_tqdm=False, lora_request=names)]


def test_engines(model: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in chunks beside others, with graphs and without, a request has the same bits."""
    asked = set[str]()
    launch = InterpretedAccelerator.launch

    def counting(self: InterpretedAccelerator, one: Any) -> None:
        launch(self, one)
        asked.add(one.kernel)

    monkeypatch.setattr(InterpretedAccelerator, "launch", counting)
    names = ["a", "b", None, "c"]
    with load(model, folder, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = ask(llm, PROMPTS, names)
        assert alone != ask(llm, PROMPTS, None)
        asked.clear()
        assert ask(llm, PROMPTS[2:3], None) == alone[2:3]
        assert not any("adapter" in kernel for kernel in asked)
    with load(model, folder, max_num_batched_tokens=10, max_steps_in_flight=2) as llm:
        assert ask(llm, PROMPTS, names) == alone
        backend: Any = llm.engine.runner._backend  # type: ignore[attr-defined]
        captured = {kinds for _, kinds in backend._graphs._graphs}
        assert frozenset({"bf16", "fp32"}) in captured
        keys = {key for key in backend._accelerator.loaded if "adapter" in key}
    assert len(keys) == 4
    assert keys < {variant.key for variant in variants()}
    monkeypatch.setattr(graphs, "MOST_ROWS", 0)
    with load(model, folder) as llm:
        assert ask(llm, PROMPTS, names) == alone


def test_adapters_come_and_go(model: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While others are computed, an adapter is unloaded and its place given to the next ones."""
    monkeypatch.setattr(adapters, "_LEAST_PLACES", 4)
    with load(model, folder, enable_prefix_caching=False) as llm:
        own: Any = llm.engine.runner._backend._adapters  # type: ignore[attr-defined]
        wanted = [ask(llm, PROMPTS[:1], [name])[0] for name in "abc"]
        stream = llm.stream([{"prompt_token_ids": PROMPTS[0]}], PARAMS, lora_request="b")
        next(stream)
        llm.adapters.unload("b")
        llm.adapters.load("d", "c")
        *_, last = stream
        assert fingerprint(last) == wanted[1]
        assert {name.partition("@")[0] for name in own._held} == {"a", "c"}  # nobody has asked for d yet
        for name in ("d", "e", "f"):
            if name != "d":
                llm.adapters.load(name, "c" if name == "e" else "b")
        assert ask(llm, PROMPTS[:1] * 5, ["d", "a", "f", "e", "c"]) == [wanted[i] for i in (2, 0, 1, 2, 2)]
        assert own.moves == 2  # five adapters, and tables of four before


def test_adapters_of_float_weights(model: str, folder: Path) -> None:
    """What the reference computes, but for activations rounded to bfloat16 before matrices in it."""
    found = []
    for device in ("reference", "cuda-interpreted"):
        with load(model, folder, device=device) as llm:
            params = replace(PARAMS, max_tokens=1, prompt_logprobs=0)
            asked = [{"prompt_token_ids": PROMPTS[0]}] * 2
            outputs = llm.generate(asked, params, use_tqdm=False, lora_request=["a", "b"])
            found.append([[*map(first, output.prompt_logprobs[1:])] for output in outputs])
    differ = np.abs(np.array(found[0]) - np.array(found[1]))
    assert differ[0].max() < 0.05
    assert differ[1].max() < 1e-4


def first(position: dict[int, Any]) -> float:
    return next(iter(position.values())).logprob  # type: ignore[no-any-return]
