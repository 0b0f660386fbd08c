"""The text side of a model: files that name tokens which it does not have are refused when it is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers as small
from tiny import VOCAB, tiny

from quire.errors import ConfigError
from quire.frontend import Frontend
from quire.weights.folder import ModelFolder


def frontend_of(folder: Path, model: str = "llama", **generation: Any) -> Frontend:
    """The text side of a tiny model (VOCAB tokens), with what its generation_config.json says."""
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return Frontend(ModelFolder.at(folder), tiny(model), max_model_len=64, longest_context=64, seed=0)


@pytest.mark.parametrize("stated", [-1, VOCAB, 1 << 40, 1.0, "2", True, [2, -1], [[2]], {"id": 2}], ids=str)
def test_an_end_token_that_is_none_is_refused(tmp_path: Path, stated: object) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id = .* is not the id of a"):
        frontend_of(tmp_path, eos_token_id=stated)


def test_end_tokens_are_few(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eos_token_id names 2,000 tokens"):
        frontend_of(tmp_path, eos_token_id=[2] * 2000)
    assert frontend_of(tmp_path, eos_token_id=[2, 3, 2]).eos_token_ids == (2, 3)
    assert frontend_of(tmp_path, eos_token_id=VOCAB - 1).eos_token_ids == (VOCAB - 1,)


def test_a_tokenizer_of_another_model_is_noticed(tmp_path: Path) -> None:
    folder = small.byte_fallback(tmp_path)  # more tokens than the model, of which 1 begins every text
    assert frontend_of(folder, eos_token_id=200).eos_token_ids == (200, 2)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["post_processor"]["special_tokens"]["<s>"]["ids"] = [200]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="every text has token 200, but the model has 32 tokens"):
        frontend_of(folder)
