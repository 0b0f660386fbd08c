"""Models for embeddings and scores in GGUF files: their vectors are those of the checkpoints behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_pooled import arrays_of, write_decoder_file
from safetensors.numpy import save_file
from tiny import CONFIGS
from tiny_encoders import write_decoder

from quire import LLM
from quire.cli.main import main
from quire.errors import ConfigError, QuireError
from quire.frontend import Encoded
from quire.sampling_params import SamplingParams

PROMPTS = ([5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 3, 3, 2])


def load(path: Path, **how: Any) -> LLM:
    return LLM(str(path), device="reference", **how)


def vectors(path: Path, **how: Any) -> list[list[float]]:
    with load(path, **how) as llm:
        found = llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)
        return [one.outputs.embedding for one in found]


def whole_head(folder: Path) -> LLM:
    """A model that compares tokens 40 and 3."""
    return load(folder, task="score", hf_overrides={"classifier_from_token": [40, 3]})


def scores(llm: LLM, prompts: Any = PROMPTS) -> list[float]:
    asked = [Encoded(tuple(ids), pooling="score") for ids in prompts]
    return [llm.pooled.score(one.vector) for one in llm._run(asked, SamplingParams(detokenize=False), False)]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("models") / "qwen3", CONFIGS["qwen3"], "last")


@pytest.mark.parametrize(("method", "number"), [("mean", 1), ("cls", 2), ("last", 3)])
def test_a_decoder_that_states_how_it_pools_embeds(method: str, number: int, tmp_path: Path) -> None:
    folder = write_decoder(tmp_path / "model", CONFIGS["qwen3"], method)
    path = write_decoder_file(folder, tmp_path / "m.gguf", number)
    found = vectors(path)
    assert found == vectors(folder)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)


def test_the_task_can_be_another(decoder: Path, tmp_path: Path) -> None:
    path = write_decoder_file(decoder, tmp_path / "m.gguf", 3)
    with load(path, task="generate") as llm:
        params = SamplingParams(max_tokens=2, temperature=0, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2


def test_embeddings_of_a_released_layout(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "models" / "tiny-random-2" / "qwen3_embedding"
    golden = json.loads((folder / "golden.json").read_text())
    path = write_decoder_file(folder, tmp_path / "m.gguf", 3)
    with load(path) as llm:
        asked = [{"prompt_token_ids": one["ids"]} for one in golden["prompts"]]
        for one, output in zip(golden["prompts"], llm.embed(asked, use_tqdm=False), strict=True):
            np.testing.assert_allclose(output.outputs.embedding, one["output"], atol=1e-5)


def test_a_decoder_that_ranks_has_the_rows_of_its_answers(shared_data: Path, tmp_path: Path) -> None:
    """The first of the two outputs is that of "yes"; a head that is not tied is not in the file."""
    folder = shared_data / "models" / "tiny-random-2" / "qwen3_reranker"
    golden = json.loads((folder / "golden.json").read_text())["prompts"]
    path = write_decoder_file(folder, tmp_path / "m.gguf", 4, answers=(33, 107))
    with load(path) as llm:
        found = scores(llm, [one["ids"] for one in golden])
        assert found == pytest.approx([one["output"][0] for one in golden], abs=1e-5)
        with pytest.raises(QuireError, match="scores of pairs, no embeddings"):
            llm.embed({"prompt_token_ids": [1]})


@pytest.mark.parametrize("number", [4, None])
def test_scores_are_those_of_the_whole_head(number: int | None, decoder: Path, tmp_path: Path) -> None:
    path = write_decoder_file(decoder, tmp_path / "m.gguf", number, answers=(40, 3))
    with load(path) as ranked, whole_head(decoder) as llm:
        assert scores(ranked) == scores(llm)


def test_a_folder_may_have_the_rows_of_answers_alone(decoder: Path, tmp_path: Path) -> None:
    arrays = arrays_of(decoder)
    head = arrays.pop("lm_head.weight", arrays["model.embed_tokens.weight"])
    arrays["score.weight"] = head[[40, 3]]
    config = json.loads((decoder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(arrays, tmp_path / "model.safetensors")
    with load(tmp_path) as own, whole_head(decoder) as llm:
        assert scores(own) == scores(llm)


FAULTS: dict[str, tuple[int | None, dict[str, Any], str]] = {
    "unknown pooling": (9, {}, r"qwen3.pooling_type = 9 is not supported"),
    "no number": (None, {"pooling_type": "last"}, r"qwen3.pooling_type = 'last' is not supported"),
    "a vector of each token": (0, {}, "a vector for each token is not supported"),
    "no head": (4, {}, "cls.output.weight, was left out"),
    "both ways": (3, {"attention.causal": False}, "attention to later tokens is not supported"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refused(fault: str, decoder: Path, tmp_path: Path) -> None:
    number, more, words = FAULTS[fault]
    path = write_decoder_file(decoder, tmp_path / "m.gguf", number, **more)
    with pytest.raises(ConfigError, match=words):
        load(path)


@pytest.mark.parametrize("labels", [["entailment", "neutral"], ["yes"], ["yes", "yes"], None])
def test_other_labels_are_refused(labels: list[str] | None, decoder: Path, tmp_path: Path) -> None:
    more = {"classifier.output_labels": labels}
    path = write_decoder_file(decoder, tmp_path / "m.gguf", 4, answers=(1, 2), **more)
    with pytest.raises(ConfigError, match=r"scores by the labels .* are not supported"):
        load(path)


@pytest.mark.parametrize(("number", "answers", "gives"), [(3, None, "embeddings"), (4, (1, 2), "scores")])
def test_inspect_says_what_a_file_gives(
    number: int,
    answers: tuple[int, int] | None,
    gives: str,
    decoder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_decoder_file(decoder, tmp_path / "m.gguf", number, answers=answers)
    with pytest.raises(SystemExit) as left:
        main(["inspect", str(path), "--json"])
    assert left.value.code == 0
    assert gives in json.loads(capsys.readouterr().out)["gives"]
