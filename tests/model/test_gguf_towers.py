"""Models that see, in GGUF files: a text model and the vision tower beside it are those of the checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_vision as own
from gguf_towers import write_both

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.images.sizes import CanvasTiles, SquareTiles, Tiles
from quire.models import Model, read_model
from quire.program import Program, ops
from quire.weights.hub import open_model
from quire.weights.load import load
from quire.weights.plan import plan

MOE: dict[str, Any] = {
    **own.CONFIG,
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **own.CONFIG["text_config"],
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "vision_config": {**own.CONFIG["vision_config"], "depth": 3, "deepstack_visual_indexes": [0, 2]},
}
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
# What the metadata of text models states
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA3 = {
    **own.CONFIG3,
    "text_config": {**own.CONFIG3["text_config"], "layer_types": _KINDS, "rope_theta": 1e6},
}
STATED = {"rope_parameters": _ROPES, "num_kv_shared_layers": 0, "final_logit_softcapping": 30.0}
POSITIONS = {"position_embedding_size": 1024}  # for as many tokens of an image as files mean, stating none
GEMMA4, GEMMA4E = (
    {
        **config,
        "text_config": {**STATED, **config["text_config"]},
        "vision_config": {**config["vision_config"], **POSITIONS},
    }
    for config in (own.CONFIG4, own.CONFIG4E)
)
_YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128}
GROWING = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MINISTRAL3, MISTRAL3 = (
    {**own.CONFIG_PIXTRAL, "text_config": {**own.CONFIG_PIXTRAL["text_config"], **text}}
    for text in (
        {"rope_theta": 1e6, "rope_scaling": GROWING},
        {"model_type": "mistral", "rope_theta": 1e6},
    )
)
PIXTRAL = {
    **MISTRAL3,
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "vision_config": {**MISTRAL3["vision_config"], "model_type": "pixtral"},
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
QWEN2, QWEN25 = (
    {
        **config,
        "text_config": {
            **config["text_config"],
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
            "rope_scaling": None,
        },
    }
    for config in (own.CONFIG2, own.CONFIG25)
)
LFM2 = {
    **own.CONFIG_LFM2,
    "text_config": {
        **own.CONFIG_LFM2["text_config"],
        "intermediate_size": 96,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        "conv_L_cache": 3,
    },
}
SMOLVLM = {
    **own.CONFIG_SMOLVLM,
    "text_config": {**own.CONFIG_SMOLVLM["text_config"], "rope_theta": 1e6},
}
LLAMA4 = {
    **own.CONFIG_LLAMA4,
    "text_config": {
        **{
            key: value
            for key, value in own.CONFIG_LLAMA4["text_config"].items()
            if key not in ("moe_layers", "no_rope_layers", "attention_chunk_size")
        },
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
}
OF_LFM2 = {"min_image_tokens", "max_image_tokens", "tile_size", "max_tiles", "max_pixels_tolerance"}
# Names of folders, by which files of some families are converted
HOMES = {"lfm2_vl": "lfm2", "llama4": "llama4"}
SEEING: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "qwen2_vl": (own.write_qwen3_vl, QWEN2),
    "qwen2_5_vl": (own.write_qwen3_vl, QWEN25),
    "qwen3_vl": (own.write_qwen3_vl, own.CONFIG),
    "qwen3_vl_moe": (own.write_qwen3_vl, MOE),
    "gemma3": (own.write_gemma3, GEMMA3),
    "gemma4": (own.write_gemma4, GEMMA4),
    "gemma4e": (own.write_gemma4, GEMMA4E),
    "lfm2_vl": (own.write_lfm2_vl, LFM2),
    "smolvlm": (own.write_smolvlm, SMOLVLM),
    "llama4": (own.write_llama4, LLAMA4),
    "ministral3": (own.write_pixtral, MINISTRAL3),
    "mistral3": (own.write_pixtral, MISTRAL3),
    "pixtral": (own.write_pixtral, PIXTRAL),
}


def checkpoint(name: str, folder: Path) -> Path:
    write, config = SEEING[name]
    return write(folder, config)


def vision_of(model: Model) -> Any:
    assert model.vision is not None
    return model.vision


def loaded(source: Any, program: Program) -> dict[str, np.ndarray]:
    """All weights of a program in float32, and none besides those of the whole model."""
    found = load(plan(program.weights(), source.tensors(), ignored=("*",)))
    return {name: weight.dense() for name, weight in found.items()}


@pytest.mark.parametrize("name", SEEING)
def test_both_programs_and_their_weights(name: str, tmp_path: Path) -> None:
    folder = checkpoint(name, tmp_path / HOMES.get(name, "gemma4_e"))
    source, other = open_model(str(write_both(folder, tmp_path / "gguf"))), open_model(str(folder))
    model = read_model(source.config(), source.image_processor())
    expected = read_model(other.config(), other.image_processor())
    assert repr([*model.program]) == repr([*expected.program])
    tower, known = vision_of(model), vision_of(expected)
    assert repr([*tower.program]) == repr([*known.program])
    for field in ("token", "num_added", "written", "whole", "row_ends", "marks"):
        assert getattr(tower, field) == getattr(known, field)
    for ours, theirs in ((model.program, expected.program), (tower.program, known.program)):
        weights, reference = loaded(source, ours), loaded(other, theirs)
        assert weights.keys() == reference.keys()
        for key, weight in weights.items():
            atol = 1e-6 if "norm" in key else 0  # files have those of Gemma plus one
            np.testing.assert_allclose(weight, reference[key], rtol=0, atol=atol, err_msg=key)
    specs = [spec for each in (model.program, tower.program) for spec in each.weights().values()]
    assert {*source.tensors()} <= {name for spec in specs for name in (spec.name, *spec.sources)}


@pytest.mark.parametrize(
    "name",
    ["qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "mistral3", "pixtral", "lfm2_vl", "smolvlm", "llama4"],
)
def test_answers_about_an_image(name: str, tmp_path: Path) -> None:
    """With images of one size for both: a file states no least number of pixels, or most tokens."""
    folder = checkpoint(name, tmp_path / HOMES.get(name, "gemma4_e"))
    if name not in ("gemma3", "smolvlm"):
        not_in_files = {"gemma4": {"max_soft_tokens"}, "lfm2_vl": OF_LFM2, "llama4": {"max_patches"}}
        unstated = not_in_files.get(name, {"size"})
        path = folder / "preprocessor_config.json"
        stated = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in stated.items() if key not in unstated}))
    pixels = {"clip.vision.image_min_pixels": 56 * 56, "clip.vision.image_max_pixels": 28 * 28 * 1280}
    image = {"type": "image_url", "image_url": {"url": own.data_url(own.picture(1, 64, 64))}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    found = []
    stated = {"smolvlm": {"clip.vision.preproc_image_size": 36}}.get(name, pixels if "qwen" in name else {})
    for model in (folder, write_both(folder, tmp_path / "gguf", **stated)):
        with LLM(str(model), device="native", max_model_len=2048) as llm:
            (answer,) = llm.chat(messages, sampling, use_tqdm=False)
            found.append((answer.prompt_token_ids, answer.outputs[0].token_ids))
    assert found[0] == found[1]
    assert len(found[0][0]) > 16


def seen(path: Path) -> Model:
    source = open_model(str(path))
    return read_model(source.config(), source.image_processor())


def test_the_first_converters_exchanged_the_matrices_of_mlps(tmp_path: Path) -> None:
    folder = checkpoint("gemma3", tmp_path / "plain")
    path = write_both(folder, tmp_path / "gguf", exchanged=True)
    source = open_model(str(path))
    program = vision_of(seen(path)).program
    for key, weight in loaded(source, program).items():
        np.testing.assert_allclose(weight, loaded(open_model(str(folder)), program)[key], atol=1e-6)


def test_which_file_beside_a_model_has_its_tower(tmp_path: Path) -> None:
    """One of its kind and width, as published if there are several; otherwise the model reads text."""
    folder, other = (checkpoint(name, tmp_path / name) for name in ("qwen3_vl", "gemma3"))
    path = write_both(folder, tmp_path / "gguf", "m.mmproj-Q8_0.gguf")
    tower = path.parent / "m.mmproj-Q8_0.gguf"
    assert vision_of(seen(path)).patching.patch == 4
    write_both(folder, tmp_path / "more", "mmproj-F16.gguf", **{"clip.vision.image_mean": [0.25] * 3})
    (tmp_path / "more" / "mmproj-F16.gguf").rename(path.parent / "mmproj-F16.gguf")
    assert vision_of(seen(path)).patching.normalization.mean == (0.25,) * 3
    (path.parent / "mmproj-F16.gguf").rename(tmp_path / "mmproj-F16.gguf")
    assert vision_of(seen(path)).patching.normalization.mean == (0.5,) * 3
    tower.rename(tmp_path / "aside")
    assert vision_of(seen(path)).patching.normalization.mean == (0.25,) * 3
    (tmp_path / "mmproj-F16.gguf").unlink()
    write_both(other, tmp_path / "other")
    (tmp_path / "other" / "mmproj-F32.gguf").rename(tower)
    assert seen(path).vision is None
    wide = json.loads(json.dumps(own.CONFIG))
    wide["text_config"]["hidden_size"] = wide["vision_config"]["out_hidden_size"] = 48
    write_both(own.write_qwen3_vl(tmp_path / "wide", wide), tmp_path / "wider")
    (tmp_path / "wider" / "mmproj-F32.gguf").rename(tower)
    assert seen(path).vision is None
    for key, value in (("clip.projector_type", "pixtral"), ("clip.vision.projector_type", "gemma4v")):
        write_both(folder, tmp_path / "gguf", "m.mmproj-Q8_0.gguf", **{key: value})
        assert seen(path).vision is None
    tower.write_bytes((tmp_path / "aside").read_bytes()[:-100])
    with pytest.raises(ConfigError, match="mmproj-Q8_0") as refusal:
        seen(path)
    assert refusal.value.hint is not None
    assert f"the vision tower of {path.name}: fetch it again, or move it" in refusal.value.hint
    shutil.copy(tmp_path / "aside", path.parent / "z.mmproj-Q8_0.gguf")  # which fits
    assert vision_of(seen(path)).patching.patch == 4


@pytest.mark.parametrize(("name", "merge"), [("mistral3", 2), ("pixtral", 1)])
def test_a_tower_of_pixtral_merges_the_patches_that_the_file_says(
    name: str, merge: int, tmp_path: Path
) -> None:
    """Pixtral 12B merges none."""
    folder = checkpoint(name, tmp_path / "plain")
    assert vision_of(seen(write_both(folder, tmp_path / "gguf"))).patching.merge == merge


def test_how_images_are_cut_that_files_do_not_say(tmp_path: Path) -> None:
    """As the published models do it."""
    lfm2 = vision_of(seen(write_both(checkpoint("lfm2_vl", tmp_path / "lfm2"), tmp_path / "one")))
    assert lfm2.patching.size == Tiles(4, 8, 64, 256, 512, 2, 10, 2.0, True)
    assert lfm2.patching.resample == 2
    smolvlm = vision_of(seen(write_both(checkpoint("smolvlm", tmp_path / "plain"), tmp_path / "other")))
    assert smolvlm.patching.size == SquareTiles(72, 18, 17)
    assert smolvlm.patching.resample == 1
    llama4 = vision_of(seen(write_both(checkpoint("llama4", tmp_path / "llama4"), tmp_path / "third")))
    assert llama4.patching.size == CanvasTiles(16, 16)
    assert (llama4.patching.resample, llama4.patching.normalization.halves) == (2, True)


@pytest.mark.parametrize("name", ["lfm2_vl", "smolvlm"])
def test_how_many_patches_become_a_token(name: str, tmp_path: Path) -> None:
    folder = checkpoint(name, tmp_path / HOMES.get(name, "plain"))
    path = write_both(folder, tmp_path / "gguf", **{"clip.vision.projector.scale_factor": 4})
    assert vision_of(seen(path)).patching.merge == 4


def test_a_projector_of_lfm2_without_norm_and_biases(tmp_path: Path) -> None:
    plain = {**LFM2, "projector_use_layernorm": False, "projector_bias": False}
    folder = own.write_lfm2_vl(tmp_path / "lfm2", plain)
    program = vision_of(seen(write_both(folder, tmp_path / "gguf"))).program
    other = open_model(str(folder))
    assert repr([*program]) == repr([*vision_of(read_model(other.config(), other.image_processor())).program])


def test_a_tower_without_its_second_frame(tmp_path: Path) -> None:
    path = write_both(
        checkpoint("qwen3_vl", tmp_path / "plain"), tmp_path / "gguf", left_out="v.patch_embd.weight.1"
    )
    with pytest.raises(ConfigError, match=r"has no v\.patch_embd\.weight\.1"):
        open_model(str(path)).tensors()


def test_a_matrix_of_heads_without_its_values(tmp_path: Path) -> None:
    folder = checkpoint("qwen2_vl", tmp_path / "plain")
    path = write_both(folder, tmp_path / "gguf", left_out="v.blk.1.attn_v.weight")
    with pytest.raises(ConfigError, match=r"has no v\.blk\.1\.attn_v\.weight like v\.blk\.1\.attn_q\.weight"):
        open_model(str(path)).tensors()


def test_a_tower_without_windows(tmp_path: Path) -> None:
    path = write_both(
        checkpoint("qwen2_5_vl", tmp_path / "plain"), tmp_path / "gguf", **{"clip.vision.n_wa_pattern": None}
    )
    program = vision_of(seen(path)).program
    assert [op.window for op in program if isinstance(op, ops.RowAttention)] == [None] * 3


def test_sections_that_are_no_list(tmp_path: Path) -> None:
    wrong = {"qwen3vl.rope.dimension_sections": 4}
    path = write_both(checkpoint("qwen3_vl", tmp_path / "plain"), tmp_path / "gguf", of_text=wrong)
    with pytest.raises(ConfigError, match="dimension_sections = 4 is not a list of numbers"):
        open_model(str(path)).config()


def test_a_kernel_that_is_a_matrix(tmp_path: Path) -> None:
    folder = checkpoint("gemma4", tmp_path / "gemma4_e")
    path = write_both(folder, tmp_path / "gguf", flat="v.patch_embd.weight")
    with pytest.raises(ConfigError, match=r"v\.patch_embd\.weight is no kernel over pixels"):
        open_model(str(path)).tensors()


def test_a_model_without_the_token_of_images_reads_text(tmp_path: Path) -> None:
    folder = checkpoint("gemma3", tmp_path / "plain")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<image_soft_token>", "<other>"))
    assert seen(write_both(folder, tmp_path / "gguf")).vision is None
