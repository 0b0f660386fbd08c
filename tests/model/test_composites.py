"""Composite checkpoints: the text model of text_config, its names in any layout, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import CONFIGS, random_weights, tiny
from tiny_vision import CONFIG3, CONFIG4, PROCESSOR3, PROCESSOR4

from quire.cli.main import main
from quire.config import EngineConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.models import read_model
from quire.weights.plan import plan
from quire.weights.safetensors import Checkpoint

GEMMA, MISTRAL = "Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"
TOWER = {"vision_tower.patch_embedding.weight": np.zeros((4, 3, 2, 2), np.float32)}


def composite(name: str = "gemma3", kind: str = GEMMA, **more: Any) -> dict[str, Any]:
    text = {key: value for key, value in CONFIGS[name].items() if key != "architectures"}
    return {"architectures": [kind], "text_config": text, "vision_config": {}, **more}


def stored(folder: Path, raw: dict[str, Any], layout: tuple[str, str], **more: np.ndarray) -> None:
    """A checkpoint whose names begin as `layout` says instead of with model. and lm_head."""
    begins = dict(zip(("model", "lm_head"), layout, strict=True))
    arrays = {}
    for name, weight in random_weights(read_model(raw).program).items():
        first, _, rest = name.partition(".")
        arrays[f"{begins[first]}{rest}"] = weight.array
    save_file(arrays | more, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    "layout",
    [
        ("model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("", "lm_head."),
    ],
)
def test_the_text_model_is_found_in_any_layout(layout: tuple[str, str], tmp_path: Path) -> None:
    raw = composite("mistral", MISTRAL, tie_word_embeddings=False)
    stored(tmp_path, raw, layout, **TOWER)
    program = read_model(raw).program
    assert program.ops == tiny("mistral").program.ops
    found = plan(program.weights(), Checkpoint.open(tmp_path), None, (), left_out=program.left_out)
    weights = random_weights(program)
    for name in program.weights():
        assert np.array_equal(found.need_tensors().pull(name).floats(), weights[name].array)
    assert found.notes == ("text only: the vision tower (48 parameters) is left out",)


def test_what_is_left_out_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def inspect(folder: Path) -> None:
        with pytest.raises(SystemExit) as left:
            main(["inspect", str(folder)])
        assert left.value.code == 0

    stored(tmp_path, composite(), ("language_model.model.", "-"), **TOWER)
    inspect(tmp_path)
    assert "text only: the vision tower (48 parameters) is left out" in capsys.readouterr().out
    (tmp_path / "model.safetensors").unlink()
    inspect(tmp_path)
    assert "text only: the vision tower is left out" in capsys.readouterr().out


def test_other_tensors_are_still_refused(tmp_path: Path) -> None:
    stored(tmp_path, composite(), ("language_model.model.", "-"), mystery=np.zeros(2, np.float32))
    with pytest.raises(ConfigError, match=r"1 tensor not part of this model \(mystery\)"):
        describe(EngineConfig(model=str(tmp_path), device="reference"))


def test_fields_of_the_whole_take_precedence() -> None:
    raw = composite("mistral", MISTRAL, eos_token_id=[3, 4])
    assert read_model(raw).config.tie_word_embeddings  # as the composite's class has it, not the text's
    assert not read_model({**raw, "tie_word_embeddings": False}).config.tie_word_embeddings
    raw["text_config"] |= {"tie_word_embeddings": False, "eos_token_id": 2}
    cfg = read_model(raw).config
    assert cfg.tie_word_embeddings
    assert cfg.get("eos_token_id") == [3, 4]


def test_overrides_are_of_the_text_model(tmp_path: Path) -> None:
    stored(tmp_path, composite(), ("model.language_model.", "-"))
    where = str(tmp_path)
    changed = describe(
        EngineConfig.from_keywords(model=where, device="reference", hf_overrides={"sliding_window": 9})
    )
    assert changed.model.config.sliding_window == 9
    untied = {"tie_word_embeddings": False}
    with pytest.raises(ConfigError, match="lm_head"):
        describe(EngineConfig.from_keywords(model=where, device="reference", hf_overrides=untied))
    with pytest.raises(ConfigError, match="no field 'sliding_windows'"):
        describe(
            EngineConfig.from_keywords(model=where, device="reference", hf_overrides={"sliding_windows": 9})
        )


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"text_config": None}, "text_config = None", "describes its text model there"),
        ({"text_config": {"model_type": "mistral5"}}, "text model 'mistral5'", "did you mean 'mistral'"),
        (
            {"architectures": ["Mistral4ForConditionalGeneration"]},
            "unknown arch",
            f"did you mean {MISTRAL!r}",
        ),
    ],
)
def test_refusals_name_the_nearest(change: dict[str, Any], problem: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        read_model({**composite("mistral", MISTRAL), **change})
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(("config", "processor"), [(CONFIG3, PROCESSOR3), (CONFIG4, PROCESSOR4)])
@pytest.mark.parametrize("text", [None, [], "text"])
def test_a_text_model_that_is_not_described_is_no_matter_of_images(
    config: dict[str, Any], processor: dict[str, Any], text: Any
) -> None:
    with pytest.raises(ConfigError, match=r"text_config = .* is not an object"):
        read_model({**config, "image_token_id": 9, "text_config": text}, processor)


QWEN2_VL = CONFIGS["composite-qwen2_vl"]


@pytest.mark.parametrize("name", ["Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"])
def test_older_files_of_qwen2_vl_have_the_fields_of_the_text_model_beside_others(name: str) -> None:
    older = {**QWEN2_VL, "architectures": [name], "tie_word_embeddings": False}
    text = {key: value for key, value in older.items() if key not in ("architectures", "vision_config")}
    newer = {"architectures": [name], "text_config": text, "vision_config": {}}
    assert read_model(older).program == read_model(newer).program
    assert [part.stated for part in read_model(older).program.left_out] == [True]
    with pytest.raises(ConfigError, match="text_config = 'text' is not an object"):
        read_model({**older, "text_config": "text"})


def test_qwen2_vl_may_tie_embeddings_in_either_place() -> None:
    tied = {"tie_word_embeddings": True}
    assert not read_model(QWEN2_VL).config.tie_word_embeddings
    assert read_model({**QWEN2_VL, **tied}).config.tie_word_embeddings
    newer = CONFIGS["composite-qwen2_5_vl"]
    assert read_model({**newer, "text_config": {**newer["text_config"], **tied}}).config.tie_word_embeddings
