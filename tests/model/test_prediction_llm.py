"""The prediction layer of a checkpoint, asked for by name: outputs, memory and what is told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapter_files as files
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.program.passes import module_of

PROMPTS = [np.random.default_rng(i).integers(0, 200, n).tolist() for i, n in enumerate((70, 1, 23, 40))]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=heat, seed=3, logprobs=1, ignore_eos=True, detokenize=False)
    for heat in (0.0, 0.0, 0.7, 1.2)
]


@pytest.mark.parametrize(("name", "device"), [("qwen3_5_moe", "native"), ("glm4_moe_lite", "native")])
def test_outputs_are_those_without_it(name: str, device: str, shared_data: Path) -> None:
    """In a cache so small that requests are preempted, in chunks, and again over cached blocks."""
    found = []
    options: dict[str, Any] = {"max_num_batched_tokens": 32, "max_model_len": 112, "max_num_seqs": 3}
    for speculative in ("off", "mtp"):
        folder = str(shared_data / "models" / "tiny-random-2" / name)
        config = EngineConfig(model=folder, device=device, speculative=speculative, num_threads=1, **options)
        facts = describe(config)
        room = facts.memory.sizing.nbytes(facts.memory.sizing.blocks(1, 128))
        llm = LLM(
            folder,
            device=device,
            speculative=speculative,
            num_threads=1,
            kv_cache_memory_bytes=room,
            **options,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outs = [one for _ in range(2) for one in llm.generate(prompts, PARAMS, use_tqdm=False)]
        assert llm.engine.scheduler.num_preemptions > 0
        drafted = sum(out.metrics.num_drafted for out in outs)
        assert (drafted > 0) == (speculative == "mtp")
        found.append([(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outs])
        assert ("draft_model" in llm.chosen) == (speculative == "mtp")
        assert ("speculative = 'mtp' drafts with it" in llm.chosen.get("unused", "")) == (
            speculative == "off"
        )
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "device"), [("qwen3_5_moe", "native"), ("glm4_moe_lite", "reference")])
def test_adapters(name: str, device: str, shared_data: Path, tmp_path: Path) -> None:
    """Requests with adapters, in one batch with others, have the bits that they have without drafts."""
    folder = str(shared_data / "models" / "tiny-random-2" / name)
    draw, arrays = np.random.default_rng(1), {}
    for spec in describe(EngineConfig(model=folder)).program.weights().values():
        if module_of(spec) is not None and spec.name.endswith(("o_proj.weight", "down_proj.weight")):
            (source,), (rows, width) = spec.sources, spec.shape
            for part, shape in (("lora_A", (4, width)), ("lora_B", (rows, 4))):
                key = f"base_model.model.{source.removesuffix('.weight')}.{part}.weight"
                arrays[key] = 0.5 * draw.standard_normal(shape, np.float32)
    files.write_adapter(tmp_path / "a", files.config(), arrays)
    prompts, found = [{"prompt_token_ids": prompt} for prompt in PROMPTS], []
    options: dict[str, Any] = {"max_num_batched_tokens": 32, "max_model_len": 112, "num_threads": 1}
    for speculative in ("off", "mtp"):
        own = {"device": device, "speculative": speculative, "adapter_dir": str(tmp_path)}
        with LLM(folder, packed_cache=False, **own, **options) as llm:
            for adapters in (["a", None, "a", "a"], [None] * 4):
                outs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=adapters)
                assert (sum(out.metrics.num_drafted for out in outs) > 0) == (speculative == "mtp")
                found.append([(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outs])
    assert found[:2] == found[2:]
    assert [one == other for one, other in zip(*found[:2], strict=True)] == [False, True, False, False]


def test_its_memory_and_weights_are_the_models(shared_data: Path) -> None:
    folder = str(shared_data / "models" / "tiny-random-2" / "deepseek_v3")
    off, mtp = (describe(EngineConfig(model=folder, speculative=one)) for one in ("off", "mtp"))
    assert mtp.draft is not None
    assert mtp.draft.weights is None
    assert off.fingerprint == mtp.fingerprint
    layer = mtp.draft.program
    assert layer.weights().keys() < mtp.weights.specs.keys()
    memory, draft = mtp.memory, mtp.memory.draft
    assert draft is not None
    assert memory.kv_block_bytes - off.memory.kv_block_bytes == draft.block_bytes
    assert draft.block_bytes == 16 * (2 * 64 + layer.kv_token_bytes(2))  # hidden states and latents, bf16
    more = memory.working_bytes - off.memory.working_bytes - draft.weight_bytes
    assert 0 <= more < 4096  # between weights
    assert mtp.weights.left_out.startswith("the rest of the prediction layer")


def test_models_without_one() -> None:
    with pytest.raises(ConfigError, match=r"speculative = 'mtp': 'demo' has no prediction layer"):
        describe(EngineConfig(speculative="mtp"))
