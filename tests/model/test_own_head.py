"""A config.json that ties the output matrix to the embedding beside weights that have one of their own: as in
transformers the weights count where they differ, and it is said.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import CONFIGS, random_weights

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.description import describe
from quire.models import read_model

TIED = {**CONFIGS["qwen2"], "tie_word_embeddings": True}
UNTIED = {**TIED, "tie_word_embeddings": False}
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write(folder: Path, config: dict[str, object], change: float, dtype: type = np.float32) -> Path:
    """A checkpoint whose head is its embedding but for one number, in the last row."""
    folder.mkdir(exist_ok=True)
    arrays = {name: w.array.astype(dtype) for name, w in random_weights(read_model(TIED).program).items()}
    arrays[HEAD] = arrays[TABLE].astype(np.float32)
    arrays[HEAD][-1, -1] += change
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "model.safetensors")
    return folder


def logprobs(folder: Path) -> tuple[list[dict[int, float]], dict[str, str]]:
    llm = LLM(str(folder))
    try:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": [3, 1, 4]}], params, use_tqdm=False)
        found = [{i: lp.logprob for i, lp in step.items()} for step in output.outputs[0].logprobs or []]
        return found, llm.chosen
    finally:
        llm.close()


def test_a_head_that_differs_is_used_and_named(tmp_path: Path) -> None:
    tied, chosen = logprobs(write(tmp_path / "differs", TIED, 3.0))
    own, _ = logprobs(write(tmp_path / "untied", UNTIED, 3.0))
    same, plain = logprobs(write(tmp_path / "same", TIED, 0.0))
    assert tied == own != same
    assert chosen["output_matrix"] == "lm_head.weight, though config.json ties it to the embedding"
    assert "output_matrix" not in plain


@pytest.mark.parametrize(("change", "own"), [(0.0, False), (1e-3, True)])
def test_heads_are_compared_as_numbers(tmp_path: Path, change: float, own: bool) -> None:
    """The embedding in bfloat16, the head in float32."""
    folder = write(tmp_path, TIED, change, dtype=ml_dtypes.bfloat16)
    assert describe(EngineConfig(model=str(folder))).own_head is own


def test_an_untied_config_takes_the_head_without_a_word(tmp_path: Path) -> None:
    assert not describe(EngineConfig(model=str(write(tmp_path, UNTIED, 1.0)))).own_head
