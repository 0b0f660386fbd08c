"""Whole models: against published results where they are, and against themselves everywhere: any
chunking, any batch, any block size gives the same bits.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import read_weights
from tiny import CONFIGS, FAMILIES, VOCAB, Paged, batch_of, random_weights, same_bits, tiny

from quire.models import Model, read_model
from quire.models.registry import COMPOSITES
from quire.models.registry import FAMILIES as KNOWN
from quire.program.passes import fuse

TINY_RANDOM = [
    *(
        "cohere2",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt2",
        "gpt_oss",
        "granite",
        "llama",
        "llama-bf16-sharded",
    ),
    *("llama-bias-headdim", "llama-rope-llama3", "llama-rope-yarn", "llama-tied", "mistral", "mixtral"),
    *("olmo2", "olmoe", "phi3", "phi3-longrope", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
]
TINY_RANDOM_2 = [
    *("deepseek_v2", "deepseek_v3", "gemma3_vlm", "gemma3n", "gemma4_dense", "gemma4_e", "gemma4_moe"),
    *("glm4_moe", "glm4_moe_lite", "granite4_h", "lfm2", "llama4", "minicpm3", "mistral3_vlm", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_next"),
    *("falcon_h1", "nemotron_h", "gemma", "qwen2_moe", "starcoder2", "ernie4_5", "ernie4_5_moe"),
    *("minimax_m2", "phimoe"),
]


def load(folder: Path) -> tuple[Model, Paged]:
    model = read_model(json.loads((folder / "config.json").read_text()))
    program = fuse(model.program)
    return model, Paged(program, read_weights(folder, program), num_blocks=300)


def greedy(
    model: Model, paged: Paged, prompts: list[list[int]], counts: list[int]
) -> tuple[list[np.ndarray], list[list[int]]]:
    """All prompts side by side: their logits [tokens, vocab], and so many greedy tokens of each."""
    sequences = [
        paged.sequence(prompt + [0] * count, model.context_variant(len(prompt) + count))
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    first = paged.step([(s, len(prompt)) for s, prompt in zip(sequences, prompts, strict=True)])
    tokens = [[int(logits[-1].argmax())] for logits in first]
    while left := [i for i, count in enumerate(counts) if len(tokens[i]) < count]:
        for i in left:
            sequences[i].token_ids[sequences[i].computed] = tokens[i][-1]
        for i, (logits,) in zip(left, paged.step([(sequences[i], 1) for i in left]), strict=True):
            tokens[i].append(int(logits.argmax()))
    return first, tokens


def check_tiny_random(folder: Path, model: Model, paged: Paged, coarse: float | None = None) -> None:
    """Logits of the last prompt token and, unless those are `coarse`, greedy tokens, as published."""
    prompts = json.loads((folder / "golden.json").read_text())["prompts"]
    results = greedy(model, paged, [p["ids"] for p in prompts], [len(p["greedy"]) for p in prompts])
    for prompt, logits, tokens in zip(prompts, *results, strict=True):
        expected = np.array(prompt["last_logits"], np.float32)
        close = (coarse or 1e-4) * np.abs(expected).max()
        assert np.abs(logits[-1] - expected).max() <= close
        if not coarse:
            assert logits.argmax(axis=-1).tolist() == prompt["argmax"]
            assert tokens == prompt["greedy"]


@pytest.mark.parametrize("name", TINY_RANDOM)
def test_tiny_random(name: str, shared_data: Path) -> None:
    folder = shared_data / "models" / "tiny-random" / name
    check_tiny_random(folder, *load(folder))


@pytest.mark.parametrize("name", TINY_RANDOM_2)
def test_tiny_random_2(name: str, shared_data: Path) -> None:
    folder = shared_data / "models" / "tiny-random-2" / name
    check_tiny_random(folder, *load(folder))


def test_every_checkpoint_and_architecture_is_tested(shared_data: Path) -> None:
    folders = [f.parent for f in (shared_data / "models" / "tiny-random").glob("*/config.json")]
    assert sorted(f.name for f in folders) == sorted(TINY_RANDOM)
    folders += [shared_data / "models" / "tiny-random-2" / name for name in TINY_RANDOM_2]
    tested = {json.loads((f / "config.json").read_text())["architectures"][0] for f in folders}
    without = {  # tests/oracle compares them with transformers
        *("Mistral4ForCausalLM", "Lfm2MoeForCausalLM", "Ministral3ForCausalLM"),
        *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        *("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        *("Lfm2VlForConditionalGeneration", "InternVLForConditionalGeneration"),
        *("LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration"),
        "LlavaForConditionalGeneration",
        *("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration"),
        *("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"),
        *("Glm46VForConditionalGeneration", "GlmOcrForConditionalGeneration"),
        *("PaddleOCRVLForConditionalGeneration", "Exaone4_5_ForConditionalGeneration"),
        "Ernie4_5_VLMoeForConditionalGeneration",
        *("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        *("Gemma4UnifiedForCausalLM", "Gemma4ForConditionalGeneration", "Gemma3nForConditionalGeneration"),
        *("Gemma4UnifiedForConditionalGeneration", "Llama4ForConditionalGeneration"),
        *("SeedOssForCausalLM", "Olmo3ForCausalLM", "Exaone4ForCausalLM", "StableLmForCausalLM"),
        *("ApertusForCausalLM", "MiniCPMForCausalLM"),
        *("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "ExaoneForCausalLM", "DeciLMForCausalLM"),
        *("InternLM2ForCausalLM", "InternLM3ForCausalLM"),
        *("MellumForCausalLM", "GlmForCausalLM", "ArceeForCausalLM", "CwmForCausalLM"),
        *("BitNetForCausalLM", "MinistralForCausalLM", "HeliumForCausalLM", "Jais2ForCausalLM"),
        *("HyperCLOVAXForCausalLM", "GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"),
        *("NemotronForCausalLM", "GPTNeoXForCausalLM"),
        *("OlmoForCausalLM", "CohereForCausalLM", "PhiForCausalLM"),
        *("AfmoeForCausalLM", "YoutuForCausalLM"),
        *("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        *("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"),
        *("Lfm3ForCausalLM", "HYV3ForCausalLM", "Dots1ForCausalLM", "SolarOpenForCausalLM"),
        *("ExaoneMoeForCausalLM", "Cohere2MoeForCausalLM", "MiMoV2FlashForCausalLM", "BambaForCausalLM"),
        *("KimiLinearForCausalLM", "OlmoHybridForCausalLM"),
        *("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV4ForCausalLM"),
        *("SarvamMoEForCausalLM", "SarvamMLAForCausalLM", "FalconForCausalLM"),
        *("VaultGemmaForCausalLM", "FlexOlmoForCausalLM", "NanoChatForCausalLM", "IQuestCoderForCausalLM"),
        *("GPTBigCodeForCausalLM", "GPTNeoForCausalLM", "GPTJForCausalLM", "CodeGenForCausalLM"),
    }
    tested |= {text for name in tested & set(COMPOSITES) for text in COMPOSITES[name].texts.values()}
    assert tested | without == {*KNOWN, *COMPOSITES}


def check_stories(folder: Path, model: Model, paged: Paged) -> None:
    """Token ids of whole stories and the log-probabilities of their prompts."""
    prompts = json.loads((folder / "golden.json").read_text())["prompts"]
    ids, counts = ([prompt[key] for prompt in prompts] for key in ("prompt_ids", "max_new_tokens"))
    for prompt, logits, tokens in zip(prompts, *greedy(model, paged, ids, counts), strict=True):
        assert tokens == prompt["token_ids"]
        wide = logits.astype(np.float64)
        logprobs = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
        known = prompt["prompt_ids"][1:]
        found = logprobs[np.arange(len(known)), known]
        np.testing.assert_allclose(found, prompt["prompt_logprobs"][1:], atol=1e-4)


def test_stories(shared_data: Path) -> None:
    folder = shared_data / "models" / "stories260K"
    check_stories(folder, *load(folder))


# Without published results


def test_every_architecture_has_a_tiny_config() -> None:
    assert {CONFIGS[name]["architectures"][0] for name in FAMILIES} == set(KNOWN)


@pytest.mark.parametrize("name", CONFIGS)
def test_tiny_models_compute_what_they_did(name: str) -> None:
    """Logits noted down when all families agreed with transformers: a guard that needs no data."""
    model = tiny(name)
    paged = Paged(model.program, random_weights(model.program))
    tokens = np.random.default_rng(0).integers(0, VOCAB, 90).tolist()
    logits = paged.prefill(paged.sequence(tokens, model.context_variant(90)))
    noted = json.loads(Path(__file__).with_name("tiny_logits.json").read_text())[name]
    np.testing.assert_allclose(logits[[0, 40, 89], :3].ravel(), noted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_depend_on_every_weight_and_on_the_past_alone(name: str) -> None:
    program = tiny(name).program
    weights = random_weights(program)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()

    def logits(ids: list[int]) -> np.ndarray:
        paged = Paged(program, weights)
        return paged.prefill(paged.sequence(ids))

    whole = logits(tokens)
    assert whole.shape == (40, VOCAB)
    assert whole.dtype == np.float32
    assert np.isfinite(whole).all()
    other = logits([*tokens[:20], (tokens[20] + 1) % VOCAB, *tokens[21:]])
    assert same_bits(other[:20], whole[:20])
    assert not (other[20:] == whole[20:]).all(axis=-1).any()
    for weight in weights.values():
        kept = weight.array.copy()
        weight.array[...] *= -0.5
        assert not same_bits(logits(tokens), whole)
        weight.array[...] = kept


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_bits_are_equal_in_any_schedule(name: str, dtype: str) -> None:
    """Sequences computed whole and alone, or by chunks of random sizes in mixed batches."""
    model = tiny(name)
    program = fuse(model.program)
    weights = random_weights(program)
    rng = np.random.default_rng(len(name))
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (100, 3, 67, 40)]
    variants = [model.context_variant(len(prompt)) for prompt in prompts]

    def start(block_size: int) -> tuple[Paged, list]:
        paged = Paged(program, weights, block_size, 300 // block_size + 8, dtype, seed=block_size)
        return paged, [paged.sequence(p, v) for p, v in zip(prompts, variants, strict=True)]

    paged, sequences = start(16)
    whole = [paged.prefill(sequence) for sequence in sequences]
    for block_size in (8, 64):
        paged, sequences = start(block_size)
        parts: list[list[np.ndarray]] = [[] for _ in sequences]
        while left := [i for i, s in enumerate(sequences) if s.computed < len(s.token_ids)]:
            some = rng.permutation(left)[: rng.integers(1, len(left) + 1)]
            wanted = rng.choice([1, 5, 30, 64], len(some))
            rows = [
                (sequences[i], min(int(n), len(sequences[i].token_ids) - sequences[i].computed))
                for i, n in zip(some, wanted, strict=True)
            ]
            for i, logits in zip(some, paged.step(rows), strict=True):
                parts[i].append(logits)
        assert all(same_bits(np.concatenate(p), w) for p, w in zip(parts, whole, strict=True))


def test_logits_of_chosen_rows_have_the_same_bits() -> None:
    """Asking for fewer logits changes none of them."""
    for name in FAMILIES:
        program = tiny(name).program
        paged = Paged(program, random_weights(program))
        rows = [(paged.sequence(range(20)), 20), (paged.sequence([3, 1, 4]), 3)]
        whole = paged.backend.execute(batch_of(rows, 16, ids=paged.ids))
        for some in ([19, 22, 4], []):
            wanted = np.array(some, np.int64)
            assert same_bits(paged.backend.execute(batch_of(rows, 16, wanted, paged.ids)), whole[wanted])
