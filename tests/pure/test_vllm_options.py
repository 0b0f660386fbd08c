"""vLLM's speculative_config as the option `speculative`: what it becomes, what is logged, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "speculative"),
    [
        (None, "auto"),
        ({"method": "ngram"}, "auto"),
        ({"method": "suffix"}, "auto"),
        ({"model": "[ngram]"}, "auto"),
        ({"method": "draft_model", "model": "org/small"}, "org/small"),
        ({"model": "org/small", "method": None, "revision": None}, "org/small"),
        ({"method": "ngram", "rejection_sample_method": "standard"}, "auto"),
    ],
)
def test_what_it_asks_for(
    config: dict[str, Any] | None, speculative: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert EngineConfig.from_keywords(speculative_config=config).speculative == speculative
    assert not caplog.messages


def test_lengths_are_accepted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    lengths = {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    config = {"method": "ngram", **lengths, "disable_by_batch_size": 8}
    assert EngineConfig.from_keywords(speculative_config=config).speculative == "auto"
    first, second = caplog.messages
    assert "num_speculative_tokens, prompt_lookup_max, prompt_lookup_min" in first
    assert "Quire chooses the length of each draft" in first
    assert "disable_by_batch_size" in second


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"method": "eagle3", "model": "org/head"},
            "method 'eagle3' is not supported\nhint: {'method': 'ngram",
        ),
        ({"method": "medusa"}, "method 'medusa' is not supported"),
        (
            {"method": "ngram", "draft_acceptance_method": "typical_acceptance_sampler"},
            "would change answers",
        ),
        ({"method": "ngram", "posterior_threshold": 0.09}, "posterior_threshold = 0.09 would change answers"),
        ({"model": "org/small", "rejection_sample_method": "synthetic"}, "would change answers"),
        ({"method": "draft_model"}, "the model is missing"),
        ({}, "a method or a model is missing"),
        ({"model": ["org/small"]}, "a method or a model is missing"),
        ({"model": "org/small", "revision": "main"}, "revision of the draft model is not supported"),
        ({"metod": "ngram"}, "unknown field 'metod'\nhint: did you mean 'method'?"),
        ("ngram", "expected a dict, got str"),
    ],
)
def test_what_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_keywords(speculative_config=config)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("limits", "most"),
    [(None, 8), ({"image": 3}, 3), ({"image": {"count": 2, "width": 64}, "video": 1}, 2), ({"audio": 0}, 8)],
)
def test_limits_of_images(limits: Any, most: int) -> None:
    assert EngineConfig.from_keywords(limit_mm_per_prompt=limits).max_images == most


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limit_mm_per_prompt": {"image": "many"}}, "states no number of images"),
        ({"limit_mm_per_prompt": "image=3"}, "states no number of images"),
        ({"limit_mm_per_prompt": {"image": 300}}, "max_images"),
        ({"limit_mm_per_prompt": {"image": 3}, "max_images": 3}, "contradict each other"),
        ({"mm_processor_kwargs": {"max_pixels": 5}}, "hint: max_image_tokens"),
        ({"allowed_media_domains": ["a.example"]}, "nothing is fetched from the network"),
    ],
)
def test_options_of_images_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_keywords(**given)
    assert message in str(refused.value)


def test_options_of_adapters(caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {"enable_lora": True, "fully_sharded_loras": False, "lora_dtype": "auto"}
    assert EngineConfig.from_keywords(**given, max_lora_rank=16).max_lora_rank == 16
    assert not caplog.messages
    EngineConfig.from_keywords(max_loras=4)
    assert "see max_adapters" in caplog.messages[0]
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_keywords(lora_modules=["name=folder"])
    assert "hint: adapter_dir loads each sub-folder" in str(refused.value)


def test_the_two_options_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        EngineConfig.from_keywords(speculative="off", speculative_config={"method": "ngram"})


@pytest.mark.parametrize("value", ["", "ngram", "eagle", "None", "on", "TRUE", None, False, 5])
def test_what_names_no_model(value: Any) -> None:
    with pytest.raises(ConfigError, match="'off', or the name of a draft model"):
        EngineConfig(speculative=value)


@pytest.mark.parametrize("value", ["auto", "off", "org/small", "./folder", "demo-draft"])
def test_values_of_the_option(value: str) -> None:
    assert EngineConfig(speculative=value).speculative == value


def test_words_for_sources_hold_no_path() -> None:
    assert EngineConfig(speculative="off").drafts == "off"
    assert EngineConfig(speculative="/secret/small").drafts == "from texts, grammars and small"


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "qwen3_next_mtp"])
def test_the_prediction_layer(method: str) -> None:
    given = {"method": method, "num_speculative_tokens": 1}
    assert EngineConfig.from_keywords(speculative_config=given).speculative == "mtp"
