"""Models for embeddings and scores in GGUF files: their vectors are those of the checkpoints behind them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from gguf_files import F32, Q8_0
from gguf_pooled import arrays_of, write_decoder_file, write_encoder_file, write_gemma_file
from safetensors.numpy import save_file
from tiny import CONFIGS
from tiny_encoders import (
    write_bert,
    write_cross_encoder,
    write_decoder,
    write_embedding_gemma,
    write_encoder,
    write_modules,
)

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
    "no head": (4, {}, "cls.output.weight, was left out"),
    "both ways": (3, {"attention.causal": False}, "attention to later tokens is not supported"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refused(fault: str, decoder: Path, tmp_path: Path) -> None:
    number, more, words = FAULTS[fault]
    path = write_decoder_file(decoder, tmp_path / "m.gguf", number, **more)
    with pytest.raises(ConfigError, match=words):
        load(path)


def test_a_decoder_without_pooling_writes_text(decoder: Path, tmp_path: Path) -> None:
    path = write_decoder_file(decoder, tmp_path / "m.gguf", 0)
    with load(path) as llm:
        assert llm.frontend.model.pooling is None


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


TEXTS = ["a cat sat on the mat", "B", "dogs run: far away", "", "zebra (and) a horse", "\u0416 unknown"]
EMBEDDING = (
    "BertModel",
    "RobertaModel",
    "XLMRobertaModel",
    "CamembertModel",
    "DistilBertModel",
    "NomicBertModel",
    "ModernBertModel",
)
RANKING = ("Roberta", "XLMRoberta", "Camembert", "DistilBert")


def texts(path: Path, **how: Any) -> list[list[float]]:
    with load(path, **how) as llm:
        return [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]


def encoder(folder: Path, architecture: str, task: Literal["embed", "score"], **more: Any) -> Path:
    """A folder. A file does not state the activation of DistilBERT: this is that of the published ones."""
    config = json.loads((write_encoder(folder, architecture, task) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"activation": "gelu"} | more))
    return folder


@pytest.mark.parametrize("architecture", EMBEDDING)
def test_embeddings_of_encoders(architecture: str, tmp_path: Path) -> None:
    more = {"norm_eps": 1e-5} if architecture == "ModernBertModel" else {}
    folder = encoder(tmp_path / "model", architecture, "embed", **more)
    assert texts(write_encoder_file(folder, tmp_path / "m.gguf", None)) == texts(folder)
    for number, method in ((1, "mean"), (2, "cls"), (3, "last")):
        write_modules(folder, 16, method)
        found = texts(write_encoder_file(folder, tmp_path / "m.gguf", number))
        assert found == texts(folder)
        assert len({str(vector) for vector in found}) == len(TEXTS)


@pytest.mark.parametrize("family", RANKING)
def test_scores_of_encoders(family: str, tmp_path: Path) -> None:
    """Files of rerankers state no pooling: their head says what they are for."""
    folder = encoder(tmp_path / "model", f"{family}ForSequenceClassification", "score")
    pairs = [("a cat", "dogs run"), ("dogs run", "a cat"), ("zebra", "")]

    def found(path: Path) -> list[float]:
        with load(path) as llm:
            return [llm.score(one, two, use_tqdm=False)[0].outputs.score for one, two in pairs]

    known = found(folder)
    assert len({*known}) == len(pairs)
    for number in (None, 4):
        assert found(write_encoder_file(folder, tmp_path / "m.gguf", number)) == known


def test_rounded_weights_of_an_encoder(tmp_path: Path) -> None:
    """As llama.cpp rounds them: matrices, but not segments and positions."""

    def kinds(name: str, array: np.ndarray) -> int:
        rounded = name.startswith(("blk.", "token_embd.")) and array.ndim > 1
        return Q8_0 if rounded else F32

    sizes = {"hidden_size": 64, "intermediate_size": 96}
    folder = write_bert(tmp_path / "model", **sizes)
    path = write_encoder_file(folder, tmp_path / "m.gguf", 1, kinds=kinds)
    exact = texts(folder)
    np.testing.assert_allclose(texts(path), exact, atol=0.02)
    with LLM(str(path), device="native") as llm:
        together = [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]
        np.testing.assert_allclose(together, exact, atol=0.02)
        assert together == [llm.embed(text, use_tqdm=False)[0].outputs.embedding for text in TEXTS]


@pytest.mark.parametrize("architecture", ["BertModel", "XLMRobertaModel", "NomicBertModel"])
def test_the_longest_text_is_that_of_the_file(architecture: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", architecture, "embed")
    path = write_encoder_file(folder, tmp_path / "m.gguf", 1)
    for place in (folder, path):
        with load(place) as llm, pytest.raises(QuireError, match="reads at most 40 tokens"):
            llm.embed("a " * 39)


def test_no_text_of_an_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_encoder_file(write_bert(tmp_path / "model"), tmp_path / "m.gguf", 1))
    with pytest.raises(SystemExit) as left:
        main(["run", path, "hello", "--device", "reference"])
    assert left.value.code == 1
    assert "embeddings" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="cannot be used for task = 'generate'"):
        load(Path(path), task="generate")


FAULTS_OF_ENCODERS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown pooling": ({"pooling_type": 9}, "bert.pooling_type = 9 is not supported"),
    "a vector of each token": ({"pooling_type": 0}, "a vector for each token is not supported"),
    "causal": ({"attention.causal": True}, "attention to earlier tokens alone is not supported"),
    "no heads": ({"attention.head_count": None}, "has no 'bert.attention.head_count'"),
    "no length": ({"context_length": None}, "has no 'bert.context_length'"),
    "another length": ({"context_length": 39}, "position_embeddings"),
    "no head": ({"pooling_type": 4}, "a part of its head, cls.weight, was left out"),
}


@pytest.mark.parametrize("fault", FAULTS_OF_ENCODERS)
def test_encoders_refused(fault: str, tmp_path: Path) -> None:
    changed, words = FAULTS_OF_ENCODERS[fault]
    path = write_encoder_file(write_bert(tmp_path / "model"), tmp_path / "m.gguf", 1, **changed)
    with pytest.raises(ConfigError, match=words):
        load(path)


def test_another_number_of_segments_or_labels_is_refused(tmp_path: Path) -> None:
    folder = write_cross_encoder(tmp_path / "model")
    arrays = arrays_of(folder)
    arrays["classifier.dense.weight"] = np.zeros((16, 16), np.float32)
    arrays["classifier.dense.bias"] = np.zeros(16, np.float32)
    weight, bias = arrays.pop("classifier.weight"), arrays.pop("classifier.bias")
    stated = json.loads((folder / "config.json").read_text())
    for labels, segments, words in ((2, 2, "has 2 labels"), (1, 3, "is not that of token_types.weight")):
        arrays["classifier.out_proj.weight"] = np.tile(weight, (labels, 1))
        arrays["classifier.out_proj.bias"] = np.tile(bias, labels)
        (folder / "config.json").write_text(json.dumps(stated | {"type_vocab_size": segments}))
        save_file(arrays, folder / "model.safetensors")
        path = write_encoder_file(folder, tmp_path / "m.gguf", None)
        with pytest.raises(ConfigError, match=words):
            load(path)


def test_a_head_without_its_first_layer_is_refused(tmp_path: Path) -> None:
    """Converters leave out BERT's pooler, without which its scores are others."""
    folder = write_cross_encoder(tmp_path / "model")
    arrays = arrays_of(folder)
    for part in ("weight", "bias"):
        arrays[f"classifier.out_proj.{part}"] = arrays.pop(f"classifier.{part}")
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"a part of its head, cls.weight, was left out"):
        load(write_encoder_file(folder, tmp_path / "m.gguf", None))


def test_embedding_gemma_and_its_modules(tmp_path: Path) -> None:
    folder = write_embedding_gemma(tmp_path / "model", rope_scaling=None)
    path = write_gemma_file(folder, tmp_path / "m.gguf")
    # norms are stored plus one, which rounds them
    np.testing.assert_allclose(texts(path), texts(folder), atol=2e-6)
    with load(path) as llm:
        ids = [{"prompt_token_ids": [5] * count} for count in (30, 31)]
        long, longer = (one.outputs.embedding for one in llm.embed(ids, use_tqdm=False))
        assert len(long) == 12
        assert long != longer
    shutil.rmtree(folder / "3_Dense")
    shutil.rmtree(folder / "2_Dense")
    write_modules(folder, 16, "mean")
    alone = write_gemma_file(folder, tmp_path / "alone.gguf", dense=False)
    np.testing.assert_allclose(texts(alone), texts(folder), atol=2e-6)


FAULTS_OF_GEMMA: dict[str, tuple[dict[str, Any], str]] = {
    "no pooling": ({"pooling_type": None}, "has no 'gemma-embedding.pooling_type'"),
    "causal": ({"attention.causal": True}, "attention to earlier tokens alone is not supported"),
    "scores": ({"pooling_type": 4}, "cls.weight, was left out"),
    "an odd number of heads": ({"attention.head_count_kv": 3}, "heads"),
}


@pytest.mark.parametrize("fault", FAULTS_OF_GEMMA)
def test_embedding_gemma_refused(fault: str, tmp_path: Path) -> None:
    more, words = FAULTS_OF_GEMMA[fault]
    folder = write_embedding_gemma(tmp_path / "model", rope_scaling=None)
    with pytest.raises(ConfigError, match=words):
        load(write_gemma_file(folder, tmp_path / "m.gguf", **more))


def test_a_module_of_another_width_is_refused(tmp_path: Path) -> None:
    folder = write_embedding_gemma(tmp_path / "model", rope_scaling=None)
    save_file({"linear.weight": np.zeros((12, 41), np.float32)}, folder / "3_Dense" / "model.safetensors")
    with pytest.raises(ConfigError, match="dense_3 takes 41 numbers, and gets 40"):
        load(write_gemma_file(folder, tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("stated", "keys"),
    [
        ({"global_attn_every_n_layers": 2, "local_attention": 4}, {}),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "hidden_activation": "silu"},
            {"attention.sliding_window_pattern": [True, False]},
        ),
        ({"layer_types": ["full_attention"] * 2}, {"attention.sliding_window": None}),
    ],
)
def test_windows_of_modernbert(stated: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    folder = encoder(tmp_path / "model", "ModernBertModel", "embed", norm_eps=1e-5, **stated)
    known = texts(folder)
    assert texts(write_encoder_file(folder, tmp_path / "m.gguf", None, **keys)) == known
    plain = encoder(tmp_path / "model", "ModernBertModel", "embed", norm_eps=1e-5)
    assert texts(plain)[0] != known[0]


def test_scores_of_modernbert_are_refused(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "model", "ModernBertModel", "embed")
    with pytest.raises(ConfigError, match="scores of modern-bert are not supported"):
        load(write_encoder_file(folder, tmp_path / "m.gguf", 4))
