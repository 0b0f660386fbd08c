"""Images on the interpreted accelerator: as the reference sees them, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from seeing import whole
from seeing_on_gpu import (
    GEMMA3,
    MODELS,
    QWEN,
    SMALL_IMAGES,
    chunks_of,
    model,
    on_gpu,
    on_reference,
    scores,
)
from test_exactness import fingerprint
from test_native_images import apart
from tiny_vision import MARKS, MARKS3, picture, write_gemma3, write_qwen3_vl

from quire import LLM, SamplingParams
from quire.backends.cuda.accelerator import DeviceFault, Launch
from quire.backends.cuda.device import CudaDevice
from quire.backends.cuda.interpreted import InterpretedAccelerator
from quire.backends.cuda.kernels.variants import variants
from quire.backends.device import plan_weights
from quire.backends.slot_images import batch_of, pixels_of
from quire.types import ImageSlice
from quire.weights.plan import all_in


def assert_same_end(found: dict[int, Any], wanted: dict[int, Any]) -> None:
    """Check that the bits of the last three positions are the same."""
    last = sorted(wanted)[-3:]
    assert found == {position: wanted[position] for position in last}


@pytest.mark.parametrize("name", MODELS)
def test_families(name: str) -> None:
    """Numbers of the reference; and the same bits in chunks and beside a text, by kernels for GPUs."""
    of, run = model(name), on_gpu(model(name))
    found = scores(of, run)
    assert apart(found, scores(of, on_reference(of))) < 1e-4
    assert_same_end(scores(of, on_gpu(of), *chunks_of(of), beside=True), found)
    accelerator: Any = run.backend._accelerator  # type: ignore[attr-defined]
    assert accelerator.loaded <= {variant.key for variant in variants()}


def test_attention_of_towers_keeps_halves_if_the_cache_does() -> None:
    """Whole images, in weights and a cache in bfloat16: nearly the same numbers, and the same bits."""
    of = model("gemma3")
    run = on_gpu(of, "bfloat16", "bf16")
    found = scores(of, run)
    accelerator: Any = run.backend._accelerator  # type: ignore[attr-defined]
    assert any(key.startswith("resize_rows(*bf16") for key in accelerator.loaded)
    assert 1e-3 < apart(found, scores(of, on_reference(of))) < 0.3
    assert_same_end(scores(of, on_gpu(of, "bfloat16", "bf16"), 8, beside=True), found)


def test_any_slices_give_the_same_bits() -> None:
    """Also when another image was encoded in between, and when the accelerator failed within a slice."""
    of = model("qwen3_vl")
    run, wanted = on_gpu(of), scores(of, on_gpu(of))
    accelerator: Any = run.backend._accelerator  # type: ignore[attr-defined]
    text, sequence = run.admit(1, of.ids[12:]), run.admit(0, of.ids, images=of.images)
    run.step((text, 3), (sequence, 2))
    for end, one in ((1, 0), (10, 1), (4, 0)):
        run.step((text, 1), image_slice=ImageSlice("r0", of.images[one], 0, end))
    other, launch = run.admit(2, of.ids[12:]), accelerator.launch

    def fail(one: Launch) -> None:
        if one.constants.get("ACTIVATION") == "gelu":  # near the end
            raise DeviceFault("no more", works=True)
        launch(one)

    accelerator.launch = fail
    (failed,) = run.step((other, 3), image_slice=ImageSlice("r0", of.images[0], 4, 38))
    assert failed.error is not None
    accelerator.launch = launch
    run.step((text, 1), image_slice=ImageSlice("r0", of.images[0], 38, 39))
    run.step((text, 1), (sequence, len(of.ids) - 2))
    found = sequence.scores()
    assert len(found) == len(of.ids)
    assert found == {position: wanted[position] for position in found}


def test_a_slot_is_used_again_without_what_it_saw() -> None:
    of = model("qwen3_vl")
    run = on_gpu(of)
    first = run.admit(0, of.ids, images=of.images)
    run.step((first, 5))  # within the image
    run.release(first)
    text = run.admit(0, of.ids[11:])
    run.step((text, 4))
    other = on_gpu(of)
    alone = other.admit(0, of.ids[11:])
    other.step((alone, 4))
    assert text.scores() == alone.scores()


def test_memory_of_a_tower_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What encoding an image allocates is planned, but for rotations by position, which no tower has."""
    monkeypatch.setattr("quire.backends.cuda.device._TOKEN_BYTES", 4 * 24)
    of, accelerator = model("gemma4_small"), InterpretedAccelerator()
    device = CudaDevice(accelerator, "interpreted")
    plan = plan_weights(device, whole(of.program, of.vision), None, None, all_in("bf16"))
    for kv_dtype in ("float32", "bfloat16"):
        run = on_gpu(of, kv_dtype)
        images: Any = run.backend._images  # type: ignore[attr-defined]
        held: Any = run.backend._accelerator  # type: ignore[attr-defined]
        patches = of.vision.patching.patches(pixels_of(of.images[0]))
        before = held.num_bytes
        images._begin(batch_of(patches, 2))
        planned = device.step_bytes(of.vision.program, plan, len(patches), 2)
        assert 0.75 * planned < held.num_bytes - before <= planned


BEGIN, PAD, END = MARKS
TEXTS = ["no picture", f"ab{BEGIN}{PAD}{END}What is?", f"ab{BEGIN}{PAD}{END}What{BEGIN}{PAD}{END}?"]
SEEDS: list[tuple[int, ...]] = [(), (1,), (1, 2)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
PARAMS = [GREEDY, replace(GREEDY, temperature=0.9, seed=3), replace(GREEDY, max_tokens=2)]


def ask(
    llm: LLM, texts: list[str] = TEXTS, params: list[SamplingParams] = PARAMS, side: int = 16
) -> list[str]:
    """Return the fingerprints of answers about pictures."""
    prompts: list[Any] = []
    for text, seeds in zip(texts, SEEDS, strict=False):
        shown = {"image": [picture(seed, side, side) for seed in seeds]}
        prompts.append({"prompt": text, "trusted": True} | ({"multi_modal_data": shown} if seeds else {}))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.scheduler.check()
    return [fingerprint(output) for output in outputs]


def make(folder: Path, **options: Any) -> LLM:
    how: dict[str, Any] = {"device": "cuda-interpreted", "block_size": 8, "speculative": "off"}
    return LLM(str(folder), **{"max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, **how, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_vl(tmp_path_factory.mktemp("qwen"), QWEN)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[list[str]]:
    """Every request by itself, the prompt in one chunk, nothing cached."""
    with make(folder, enable_prefix_caching=False, max_num_seqs=1) as llm:
        yield ask(llm)


def test_same_bits_in_any_company_and_from_the_cache(folder: Path, alone: list[str]) -> None:
    """Prompts in chunks and images in slices, steps in flight behind one another; then asked again."""
    with make(folder, max_num_batched_tokens=7, max_steps_in_flight=2) as llm:
        assert ask(llm) == alone
        encoded = [record.image_s > 0 for record in llm.engine.records]
        assert 0 < sum(encoded) < len(encoded)
        cached = llm.engine.scheduler.num_cached_tokens
        assert ask(llm) == alone
        assert llm.engine.scheduler.num_cached_tokens > cached


def test_same_bits_after_preemption(folder: Path, alone: list[str]) -> None:
    with make(folder, max_model_len=40, kv_cache_memory_bytes=128 * 40, enable_prefix_caching=False) as llm:
        assert ask(llm) == alone
        assert llm.engine.scheduler.num_preemptions > 0


def test_whole_images_in_an_engine(tmp_path: Path) -> None:
    """A step has room for an image and little else."""
    folder = write_gemma3(tmp_path, GEMMA3, SMALL_IMAGES)
    begin, soft, end = MARKS3
    texts = [text.replace(BEGIN, begin).replace(PAD, soft).replace(END, end) for text in TEXTS[:2]]
    params = [replace(GREEDY, max_tokens=2)] * 2
    with make(folder, enable_prefix_caching=False, max_num_seqs=1) as llm:
        wanted = ask(llm, texts, params, 24)
    with make(folder, max_num_batched_tokens=9) as llm:
        assert ask(llm, texts, params, 24) == wanted
