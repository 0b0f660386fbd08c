"""Model folders: what config.json says, what stands beside it, and whether the weights are there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import CONFIGS
from tiny_vision import CONFIG, PROCESSOR

from quire.config import EngineConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.models import read_model
from quire.weights.folder import ModelFolder
from quire.weights.formats.registry import quantization_of
from quire.weights.safetensors import INDEX_NAME


def test_config_files(tmp_path: Path) -> None:
    model = ModelFolder.at(tmp_path)
    assert model.generation_config() == {}
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        model.config()
    config = tmp_path / "config.json"
    for text, message in (
        (b"", "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' is given twice"),
        (b" " * (8 << 20) + b"{}", "too many"),
    ):
        config.write_bytes(text)
        with pytest.raises(ConfigError, match=message) as caught:
            model.config()
        assert caught.value.message.startswith(str(config))
        assert "\n" not in caught.value.message
    config.write_text('{"model_type": "llama"}')
    assert model.config() == {"model_type": "llama"}
    config.unlink()
    config.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        model.config()


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ConfigError, match=r"config\.json: no such file\nhint: it is an adapter"):
        ModelFolder.at(tmp_path).config()


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_what_is_null_in_a_processor_is_not_stated(tmp_path: Path, name: str) -> None:
    """Some versions of transformers write every field that a processor may have."""
    nulls = dict.fromkeys(("min_pixels", "max_pixels", "rescale_factor", "image_mean", "resample"))
    stated = {**PROCESSOR, **nulls}
    beside = name == "preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps(stated if beside else {"image_processor": stated}))
    found = ModelFolder.at(tmp_path).image_processor()
    plain = {key: value for key, value in PROCESSOR.items() if key != "image_mean"}
    config = {**CONFIG, "image_token_id": 60}
    assert read_model(config, found).vision == read_model(config, plain).vision is not None


def test_settings_of_images_in_two_files(tmp_path: Path) -> None:
    """As transformers has it: processor_config.json takes precedence where it has a part for images."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 9}))
    other = tmp_path / "processor_config.json"
    for stated, expected in (({"image_seq_length": 256}, 9), ({"image_processor": {"min_pixels": 7}}, 7)):
        other.write_text(json.dumps(stated))
        assert ModelFolder.at(tmp_path).image_processor() == {"min_pixels": expected}


@pytest.mark.parametrize(("name", "value"), [("do_resize", False), ("do_pan_and_scan", True)])
def test_images_in_a_way_that_is_not_supported_are_refused(name: str, value: bool) -> None:
    config = {**CONFIG, "image_token_id": 60}
    assert read_model(config, {**PROCESSOR, name: not value}).vision is not None
    with pytest.raises(ConfigError, match=f"{name} = {value} is not supported"):
        read_model(config, {**PROCESSOR, name: value})


@pytest.mark.parametrize(
    ("stated", "method"),
    [
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "modelopt"),
        ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, None),
        ({"quantization": "FP8"}, None),
        ({}, None),
    ],
)
def test_quantization_may_be_stated_beside_the_config(
    tmp_path: Path, stated: dict[str, object], method: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    config = ModelFolder.at(tmp_path).config()
    assert config.get("quantization_config", {}).get("quant_method") == method
    if method is None:
        assert config == CONFIGS["llama"]
        return
    own = {**CONFIGS["llama"], "quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert ModelFolder.at(tmp_path).config() == own


def test_published_checkpoints_state_quantization_beside_the_config(shared_data: Path) -> None:
    found = 0
    for path in (shared_data / "configs").glob("*/hf_quant_config.json"):
        stated = json.loads((path.parent / "config.json").read_text()).get("quantization_config")
        config = ModelFolder.at(path.parent).config()["quantization_config"]
        algorithm = json.loads(path.read_text())["quantization"]["quant_algo"]
        assert config == stated if stated else config["quant_algo"] == algorithm
        assert quantization_of({"quantization_config": config}) is not None
        found += 1
    assert found >= 5


def test_weights_are_there_when_all_are(tmp_path: Path) -> None:
    folder = ModelFolder.at(tmp_path)
    weights = {"a": np.ones(1, np.float32)}
    assert not folder.has_weights
    save_file(weights, tmp_path / "some.safetensors")
    assert folder.has_weights
    save_file(weights, tmp_path / "other.safetensors")  # which of them?
    assert not folder.has_weights
    assert ModelFolder.at(tmp_path / "other.safetensors").has_weights
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    for name in ("1.safetensors", "2.safetensors"):
        assert not folder.has_weights
        save_file(weights, tmp_path / name)
    assert folder.has_weights
    index.write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        _ = folder.has_weights
    save_file(weights, tmp_path / "model.safetensors")
    assert folder.has_weights


def test_an_interrupted_download_can_be_described(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["llama"], "torch_dtype": "float16"}))
    names = {"a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "1.safetensors")
    facts = describe(EngineConfig(model=str(tmp_path)), weights=False)
    assert {str(storage) for storage in facts.weights.storage.values()} == {"f16"}
    with pytest.raises(ConfigError, match=r"2\.safetensors: no such file"):
        describe(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "hf_quant_config.json"])
def test_a_pipe_is_no_config(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    model = ModelFolder.at(tmp_path)
    with pytest.raises(ConfigError, match=f"{name}: cannot be read: it is a pipe, not a file"):
        _ = (model.config(), model.generation_config())


@pytest.mark.parametrize("name", ["model.safetensors", INDEX_NAME, "1.safetensors"])
def test_a_pipe_holds_no_weights(tmp_path: Path, name: str) -> None:
    """Not even where weights may be missing: they are there, and are none."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    if name == "1.safetensors":
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    os.mkfifo(tmp_path / name)
    model = ModelFolder.at(tmp_path)
    with pytest.raises(ConfigError, match=f"{name}: cannot be read: it is a pipe, not a file"):
        model.tensors()
    with pytest.raises(ConfigError, match=f"{name}: cannot be read: it is a pipe, not a file"):
        describe(EngineConfig(model=str(tmp_path)), weights=False)
