"""Embeddings and scores: goldens, exactness in batches, what is refused, and settings of models."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from checkpoints import read_weights
from safetensors.numpy import load_file, save_file
from tiny import CONFIGS, Paged, random_weights
from tiny_encoders import (
    CONFIG,
    write_bert,
    write_cross_encoder,
    write_decoder,
    write_embedding_gemma,
    write_encoder,
    write_modules,
)
from tokenizers import models, pre_tokenizers, processors, trainers

from quire import LLM, AsyncLLM, pooled_texts
from quire.errors import ConfigError, QuireError, RequestError
from quire.frontend import Encoded
from quire.models import read_model
from quire.models.encoders import CROSS_ENCODERS, ENCODERS, read_encoder
from quire.models.purpose import Pooling
from quire.program.ops import EmbedSegments, RowAttention
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import LONG_TEXT, Tokenizer
from quire.text.vocabulary import load_vocabulary
from quire.weights.sentence import read_settings

TEXTS = ["a cat sat on the mat", "b", "dogs run: far away from here", "a cat sat", "zebra and a horse"]


_FIRST = '{"type": "a.Transformer", "path": ""}'


def load(folder: Path, **how: Any) -> LLM:
    return LLM(str(folder), device="reference", **how)


@pytest.mark.parametrize("name", ["qwen3_embedding", "bert"])
def test_embeddings_of_released_layouts(name: str, shared_data: Path) -> None:
    folder = shared_data / "models" / "tiny-random-2" / name
    golden = json.loads((folder / "golden.json").read_text())
    with load(folder) as llm:
        asked = [one for one in golden["prompts"] if 1 not in one.get("types", ())]
        found = llm.embed([{"prompt_token_ids": one["ids"]} for one in asked], use_tqdm=False)
        assert len(found) >= 3
        for one, output in zip(asked, found, strict=True):
            np.testing.assert_allclose(output.outputs.embedding, one["output"], atol=1e-5)


def test_a_pair_of_segments(shared_data: Path) -> None:
    """The golden has token types: the second segment begins after token 232."""
    folder = shared_data / "models" / "tiny-random-2" / "bert"
    (golden,) = [
        one
        for one in json.loads((folder / "golden.json").read_text())["prompts"]
        if 1 in one.get("types", ())
    ]
    assert golden["types"].index(1) == golden["ids"].index(232) + 1
    raw = json.loads((folder / "config.json").read_text())
    program = read_encoder("BertModel", raw, Pooling("embed", "mean", True, separator=232)).program
    paged = Paged(program, read_weights(folder, program))
    found = paged.prefill(paged.sequence(golden["ids"]))
    np.testing.assert_allclose(found, np.tile(golden["output"], (len(found), 1)), atol=1e-5)


def test_a_reranker_that_answers_yes_or_no(shared_data: Path) -> None:
    folder = shared_data / "models" / "tiny-random-2" / "qwen3_reranker"
    golden = json.loads((folder / "golden.json").read_text())
    with load(folder, hf_overrides={"classifier_from_token": [33, 107]}) as llm:
        asked = [Encoded(tuple(one["ids"]), pooling="score") for one in golden["prompts"]]
        found = llm._run(asked, SamplingParams(detokenize=False), False)
        for one, output in zip(golden["prompts"], found, strict=True):
            assert llm.pooled.score(output.vector) == pytest.approx(one["output"][0], abs=1e-5)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("models") / "cross")


@pytest.mark.parametrize("device", ["reference", "native"])
@pytest.mark.parametrize("write", [write_bert, write_embedding_gemma])
def test_an_embedding_has_its_bits_in_any_batch(device: str, write: Any, tmp_path: Path) -> None:
    with LLM(str(write(tmp_path / "model")), device=device, max_num_batched_tokens=40) as llm:
        together = [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]
        alone = [llm.embed(text, use_tqdm=False)[0].outputs.embedding for text in TEXTS]
        assert together == alone
        assert len({str(one) for one in alone}) == len(TEXTS)
        np.testing.assert_allclose(np.square(alone).sum(axis=1), 1, atol=1e-6)


def test_prompts_and_tokens_of_an_embedding_model(bert: Path) -> None:
    with load(bert) as llm:
        first = llm.embed("a cat", use_tqdm=False)[0]
        assert (first.prompt_token_ids[0], first.prompt_token_ids[-1]) == (2, 3)
        again, prompted, same = (
            llm.embed({"prompt_token_ids": first.prompt_token_ids}, use_tqdm=False)[0],
            llm.embed("a cat", use_tqdm=False, prompt_name="query")[0],
            llm.embed("find: a cat", use_tqdm=False)[0],
        )
        assert again.outputs == first.outputs
        assert prompted.outputs == same.outputs != first.outputs
        short = llm.embed("a cat", use_tqdm=False, dimensions=5)[0].outputs.embedding
        whole = np.array(first.outputs.embedding[:5])
        np.testing.assert_allclose(short, whole / np.linalg.norm(whole), atol=1e-7)
        assert 0 < llm.score("a cat", ["a cat", "dogs"], use_tqdm=False)[1].outputs.score < 1
        assert llm.score("a cat", "a cat", use_tqdm=False)[0].outputs.score == pytest.approx(1)


def test_tasks_of_an_event_loop_embed_and_score(bert: Path, cross: Path) -> None:
    async def embedded() -> list[list[float]]:
        async with AsyncLLM(str(bert), device="reference") as llm:
            found = await asyncio.gather(*(llm.embed(text, dimensions=4) for text in TEXTS))
            with pytest.raises(RequestError, match="reads no pairs"):
                await llm.score("a", "b")
        return [one.outputs.embedding for one in found]

    async def scored() -> float:
        async with AsyncLLM(str(cross), device="reference") as llm:
            with pytest.raises(RequestError, match="gives scores of pairs"):
                await llm.embed("a")
            return (await llm.score("a cat", "dogs run")).outputs.score

    with load(bert) as llm:
        alone = llm.embed(TEXTS, use_tqdm=False, dimensions=4)
    assert asyncio.run(embedded()) == [one.outputs.embedding for one in alone]
    with load(cross) as llm:
        assert asyncio.run(scored()) == llm.score("a cat", "dogs run", use_tqdm=False)[0].outputs.score


def test_long_texts_are_refused_or_cut(bert: Path, cross: Path) -> None:
    text = "a " * 60
    with load(bert) as llm:
        with pytest.raises(RequestError, match="40 tokens"):
            llm.embed(text)
        cut = llm.embed(text, use_tqdm=False, truncate_prompt_tokens=-1)[0].prompt_token_ids
        assert (len(cut), cut[0], cut[-1]) == (40, 2, 3)
        with pytest.raises(RequestError, match="truncate_prompt_tokens = 41"):
            llm.embed(text, truncate_prompt_tokens=41)
    with load(cross) as llm:
        cut = llm.score("b " * 30, text, use_tqdm=False, truncate_prompt_tokens=20)[0].prompt_token_ids
        assert (len(cut), [i for i, token in enumerate(cut) if token == 3]) == (20, [9, 19])
        cut = llm.score("b b", text, use_tqdm=False, truncate_prompt_tokens=20)[0].prompt_token_ids
        assert (len(cut), [i for i, token in enumerate(cut) if token == 3]) == (20, [3, 19])


def test_of_a_text_that_is_cut_its_end_is_not_encoded(
    bert: Path, cross: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take 250 bytes of memory for each character."""
    lengths = list[int]()

    def watched(self: Tokenizer, text: str, other: str | None = None, limit: int | None = None) -> list[int]:
        lengths.extend([len(text), *([len(other)] if other is not None else ())])
        return encode_whole(self, text, other, limit)

    encode_whole = Tokenizer.encode_whole
    monkeypatch.setattr(Tokenizer, "encode_whole", watched)
    monkeypatch.setattr(pooled_texts, "LONGEST_TEXT", 1 << 14)
    long = "a " * (1 << 14)
    with load(bert) as llm:
        embedded = llm.embed([long, "a " * 60], use_tqdm=False, truncate_prompt_tokens=-1)
        assert embedded[0].outputs == embedded[1].outputs
    with load(cross) as llm:
        llm.score(long, long, use_tqdm=False, truncate_prompt_tokens=-1)
    assert lengths == [1 << 14, 120, 1 << 14, 1 << 14]


def test_scores_know_the_segments_of_a_pair(cross: Path) -> None:
    with load(cross) as llm:
        one, other = (
            llm.score("a cat", "dogs run", use_tqdm=False)[0],
            llm.score("dogs run", "a cat", use_tqdm=False)[0],
        )
        assert 0 < one.outputs.score < 1
        assert one.outputs.score != other.outputs.score
        assert llm.frontend.model.pooling.separator == 3
        many = llm.score("a cat", ["dogs run", "b"], use_tqdm=False)
        assert many[0].outputs == one.outputs


def test_a_model_refuses_what_it_is_not_for(bert: Path, cross: Path, demo_folder: Path) -> None:
    for folder, refused in (
        (bert, "generate"),
        (cross, "embed"),
        (cross, "generate"),
        (demo_folder, "embed"),
    ):
        with load(folder) as llm, pytest.raises(RequestError, match=r"this model gives|generates text"):
            getattr(llm, refused)("a cat")
    with load(demo_folder, task="embed") as llm:
        assert len(llm.embed("a cat", use_tqdm=False)[0].outputs.embedding) > 16
    with pytest.raises(ConfigError, match="task = 'generate'"):
        load(bert, task="generate")
    with pytest.raises(ConfigError, match=r"two tokens|no token"):
        load(demo_folder, task="score")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", "[1, 2]", "not a module"),
        ("modules.json", "{}", "not a list"),
        (
            "modules.json",
            '[{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "1"}]',
            "Dense",
        ),
        (
            "modules.json",
            f'[{_FIRST}, {{"type": "a.Pooling", "path": "1_Pooling"}}, {{"type": "a.LayerNorm"}}]',
            "Pooling, LayerNorm are not supported",
        ),
        (
            "modules.json",
            f'[{_FIRST}, {{"type": "a.Pooling", "path": "1_Pooling"}}, {{"type": "a.Dense"}}]',
            "without a folder",
        ),
        (
            "modules.json",
            '[{"type": "a.Transformer", "path": ""}, {"type": "a.P", "path": "../x"}]',
            "folder",
        ),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "max_tokens"),
        ("1_Pooling/config.json", '{"pooling_mode_mean_tokens": true, "include_prompt": false}', "prompt"),
        ("sentence_bert_config.json", '{"max_seq_length": -1}', "max_seq_length"),
        ("config_sentence_transformers.json", '{"prompts": {"a": 1}}', "prompts"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "a"}', "default_prompt_name"),
    ],
)
def test_settings_that_are_refused(name: str, content: str, message: str, tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "bert")
    (folder / name).write_text(content)
    with pytest.raises(QuireError, match=message):
        read_settings(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_features": 0}, "is not a size"),
        ({"out_features": "9"}, "is not a size"),
        ({"bias": 1}, "bias = 1"),
        (
            {"activation_function": "torch.nn.Softmax"},
            "activation 'torch.*Softmax' is not",
        ),
        ({"module_input_name": "token_embeddings"}, "module_input_name = 'token_embeddings'"),
        ({"use_residual": True}, "use_residual = True"),
    ],
)
def test_dense_modules_that_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_embedding_gemma(tmp_path / "model")
    path = folder / "3_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match="3_Dense/config.json.*" + message):
        read_settings(folder)


def test_dense_modules_that_do_not_fit(tmp_path: Path) -> None:
    folder = write_embedding_gemma(tmp_path / "model")
    path = folder / "3_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"in_features": 39}))
    with pytest.raises(ConfigError, match="3_Dense takes 39 numbers, and gets 40"):
        load(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"in_features": 40, "out_features": 13}))
    with pytest.raises(ConfigError, match=r"3_Dense\.linear\.weight"):
        load(folder)
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="2_Dense: no safetensors weights"):
        load(folder)


@pytest.mark.parametrize("device", ["reference", "native"])
def test_dense_modules_follow_pooling(device: str, tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "model")
    write_modules(folder, 16, "mean", normalized=False)
    with LLM(str(folder), device=device) as llm:
        plain = [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]
    write_modules(folder, 16, "mean", (("Tanh", 24), ("Identity", 10)), bias=True)
    with LLM(str(folder), device=device) as llm:
        found = [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]
        assert len(llm.embed("a", dimensions=9, use_tqdm=False)[0].outputs.embedding) == 9
        with pytest.raises(RequestError, match="have 10 numbers"):
            llm.embed("a", dimensions=11)
    first, second = (load_file(folder / f"{i}_Dense" / "model.safetensors") for i in (2, 3))
    x = np.tanh(np.array(plain) @ first["linear.weight"].T + first["linear.bias"])
    x = x @ second["linear.weight"].T + second["linear.bias"]
    np.testing.assert_allclose(found, x / np.linalg.norm(x, axis=1, keepdims=True), atol=1e-5)


def test_the_layers_of_embedding_gemma_see_both_sides(tmp_path: Path) -> None:
    """Half a window on either side, and the whole text in the last of three layers. No more is cached."""
    with load(write_embedding_gemma(tmp_path / "model")) as llm:
        program = llm.frontend.model.program
        reaches = [op.reach for op in program if isinstance(op, RowAttention)]
        assert (reaches, program.caches) == ([12, 12, None], ())
        assert (program.output.shape, llm.frontend.model.pooling.method) == ((12,), "mean")
        text = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
        same, other = (llm.embed(start + text, use_tqdm=False)[0].outputs for start in ("z ", "y "))
        assert same != other
        with pytest.raises(RequestError, match="it generates none"):
            llm.generate("a")
    with pytest.raises(ConfigError, match="see those after them") as error:
        load(tmp_path / "model", task="generate", hf_overrides={"architectures": ["Gemma3ForCausalLM"]})
    assert error.value.hint == "start it with task = 'embed'"


@pytest.mark.parametrize("device", ["reference", "native"])
@pytest.mark.parametrize("name", ["llama", "gemma4", "gemma3n", "falcon_h1", "deepseek_v3"])
def test_the_mean_of_a_decoder_is_that_of_all_its_last_hidden_states(
    name: str, device: str, tmp_path: Path
) -> None:
    ids = np.random.default_rng(0).integers(5, 60, 37).tolist()
    folder = write_decoder(tmp_path / "model", CONFIGS[name], "last", normalized=False)
    with LLM(str(folder), device=device) as llm:
        prompts = [{"prompt_token_ids": ids[: count + 1]} for count in range(len(ids))]
        hidden = [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False)]
    for pooling, expected in (("mean", np.mean(hidden, axis=0)), ("cls", hidden[0])):
        write_modules(folder, 16, pooling)
        with LLM(str(folder), device=device) as llm:
            (found,) = llm.embed({"prompt_token_ids": ids}, use_tqdm=False)
        np.testing.assert_allclose(
            found.outputs.embedding, expected / np.linalg.norm(expected), atol=1e-5, err_msg=pooling
        )


def test_the_length_of_texts_is_a_setting(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "bert", pooling="cls")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    with load(folder) as llm:
        assert llm.frontend.max_model_len == 8
        assert llm.frontend.model.pooling.method == "cls"


def test_texts_are_read_in_small_letters_where_the_settings_say_so(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "bert")
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | {"normalizer": None}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for stated in (True, False):
        (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": stated}))
        with load(folder) as llm:
            one, other = llm.embed(["A Cat", "a cat"], use_tqdm=False)
        assert (one.prompt_token_ids == other.prompt_token_ids) == stated


def test_files_as_released_models_have_them(tmp_path: Path) -> None:
    """Tensors of a body, buffers, a pooler and the modules of a cross-encoder are no obstacle."""
    for write in (write_bert, write_cross_encoder):
        plain = write(tmp_path / write.__name__)
        ask = "embed" if write is write_bert else "score"
        asked = ("a cat",) if write is write_bert else ("a cat", "b")
        with load(plain) as llm:
            expected = getattr(llm, ask)(*asked, use_tqdm=False)[0].outputs
        tensors = load_file(plain / "model.safetensors")
        tensors["embeddings.position_ids"] = np.arange(40)[None]
        if write is write_bert:
            tensors["pooler.dense.bias"] = np.zeros(16, np.float32)
        else:
            (plain / "modules.json").write_text(f"[{_FIRST}]")
        named = {n if n.startswith("classifier") else f"bert.{n}": array for n, array in tensors.items()}
        save_file(named, plain / "model.safetensors")
        with load(plain) as llm:
            assert getattr(llm, ask)(*asked, use_tqdm=False)[0].outputs == expected


def test_a_rope_for_long_contexts_is_not_that_of_a_text_that_is_none(tmp_path: Path) -> None:
    """Nothing is generated after a text, so its own length chooses the frequencies."""
    folder = write_encoder(tmp_path / "modern", "ModernBertModel", "embed")
    scaled = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}

    def embedded(num_tokens: int, **how: Any) -> list[float]:
        with load(folder, **how) as llm:
            text = {"prompt_token_ids": [5 + i % 50 for i in range(num_tokens)]}
            return list(llm.embed([text], use_tqdm=False)[0].outputs.embedding)

    assert embedded(40, hf_overrides=scaled) == embedded(40)
    longer = embedded(41, hf_overrides=scaled)
    assert longer != embedded(41, hf_overrides={**scaled, "max_position_embeddings": 41})


def test_fields_that_no_one_reads_are_refused(bert: Path, shared_data: Path) -> None:
    decoder = shared_data / "models" / "tiny-random-2" / "qwen3_embedding"
    for folder in (bert, decoder):
        with pytest.raises(ConfigError, match="reads no field 'rope_thetas'"):
            load(folder, hf_overrides={"rope_thetas": 1})
    with pytest.raises(ConfigError, match="'ElectraModel' of a model for embeddings"):
        load(bert, hf_overrides={"architectures": ["ElectraModel"]})
    (bert / "modules.json").rename(bert / "no")
    with load(bert, hf_overrides={"architectures": ["BertForMaskedLM"]}) as llm:
        assert llm.frontend.model.pooling == Pooling("embed", "mean")
    (bert / "no").rename(bert / "modules.json")
    with load(bert, hf_overrides={"layer_norm_eps": 1e-3}) as llm:
        assert llm.frontend.model.config.norm_eps == 1e-3


@pytest.mark.parametrize("architecture", ENCODERS)
def test_every_encoder_embeds(architecture: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", architecture, "embed")
    with load(folder) as llm:
        assert llm.frontend.max_model_len == 40
        expected = [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]
        assert len({str(one) for one in expected}) == len(TEXTS)
    with LLM(str(folder), device="native", max_num_batched_tokens=40) as llm:
        found = [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]
        alone = [llm.embed(text, use_tqdm=False)[0].outputs.embedding for text in TEXTS]
    assert found == alone
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("architecture", CROSS_ENCODERS)
def test_every_cross_encoder_scores(architecture: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", architecture, "score")
    with load(folder) as llm:
        expected = [one.outputs.score for one in llm.score("a cat", TEXTS, use_tqdm=False)]
        assert len(set(expected)) == len(TEXTS)
    with LLM(str(folder), device="native") as llm:
        found = [one.outputs.score for one in llm.score("a cat", TEXTS, use_tqdm=False)]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_both_texts_of_a_pair_are_one_segment_of_roberta() -> None:
    """Its tokenizers give no types of tokens, even where the table has several rows (of BERT)."""
    for name, segments in (("Bert", True), ("Roberta", False)):
        config = {**CONFIG, "pad_token_id": 1, "id2label": {"0": "LABEL_0"}}
        pooling = Pooling("score", separator=3)
        program = read_encoder(f"{name}ForSequenceClassification", config, pooling).program
        (found,) = (op.separator for op in program if isinstance(op, EmbedSegments))
        assert (found == 3) == segments


@pytest.mark.parametrize("begin", ["bert.", ""])
def test_names_of_bert_as_it_was_published(begin: str, tmp_path: Path) -> None:
    """With gamma and beta in norms, and the heads of pre-training."""
    folder = write_encoder(tmp_path / "model", "BertForPreTraining", "embed")
    with load(folder) as llm:
        expected = llm.embed(TEXTS, use_tqdm=False)
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors, heads = {}, ("cls.seq_relationship.weight", "cls.predictions.transform.LayerNorm.gamma")
    for name, array in load_file(folder / "model.safetensors").items():
        tensors[begin + re.sub("LayerNorm.*", lambda end: ends[end[0]], name)] = array
    assert any(name.endswith(".gamma") for name in tensors)
    more = dict.fromkeys((*heads, f"{begin}pooler.dense.bias"), np.zeros(16, np.float32))
    save_file({**tensors, **more}, folder / "model.safetensors")
    with load(folder) as llm:
        assert llm.embed(TEXTS, use_tqdm=False) == expected


def _trained(model: Any, trainer: Any, post: Any, split: Any) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = split
    library.train_from_iterator(["hello world how are you", "what is the answer to the query"] * 9, trainer)
    library.post_processor = post
    return library


_NAMES = ["<s>", "<pad>", "</s>", "<unk>"]
_PAIR = {"single": "<s> $A </s>", "pair": "<s> $A </s> </s> $B </s>"}
_TOKENIZERS = {
    "xlm-r": lambda: _trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=60, special_tokens=_NAMES, unk_token="<unk>", show_progress=False),
        processors.TemplateProcessing(**_PAIR, special_tokens=[("<s>", 0), ("</s>", 2)]),
        pre_tokenizers.Metaspace(),
    ),
    "roberta": lambda: _trained(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=_NAMES,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
        processors.RobertaProcessing(("</s>", 2), ("<s>", 0)),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ),
}


@pytest.mark.parametrize("kind", _TOKENIZERS)
def test_texts_and_pairs_are_encoded_and_cut_as_by_the_library(kind: str) -> None:
    library = _TOKENIZERS[kind]()
    own = Tokenizer(load_vocabulary(library.to_str().encode(), kind))
    texts = (
        "hello world, how are you?",
        "the answer",
        "a \u00fcn\u00efcode query that is longer than others",
    )
    for limit in (200, 17, 11, 8):
        library.enable_truncation(limit)
        for text in texts:
            assert own.encode_whole(text, None, limit) == library.encode(text).ids
            for other in texts:
                assert own.encode_whole(text, other, limit) == library.encode(text, other).ids, limit
    assert 0 not in own.encode_whole("<s>")[1:]


def test_long_texts_are_cut_without_the_interpreters_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library holds it while it encodes a text alone, and no stream advances meanwhile.

    Nor are the parts kept that are cut off: there would be pairs of each part with each.
    """
    own = Tokenizer(load_vocabulary(_TOKENIZERS["xlm-r"]().to_str().encode(), "xlm-r"))
    library = own._library

    class AsBatch:
        def __getattr__(self, name: str) -> Any:
            assert name not in ("encode", "post_process")
            return getattr(library, name)

    expected = own.encode_whole("hello world " * 9, "the answer " * 9, 16)
    monkeypatch.setattr(own, "_library", AsBatch())
    text, other = "hello world " * LONG_TEXT, "the answer " * LONG_TEXT
    assert own.encode_whole(text, other, 16) == expected
    assert own.encode_whole(text, None, 16)[:7] == expected[:7]


@pytest.mark.parametrize("stated", [True, False])
def test_a_text_that_is_cut_begins_as_stated(stated: bool) -> None:
    """tokenizer_config.json overrides tokenizer.json, whether the text is cut or not."""
    data = json.loads(_TOKENIZERS["xlm-r"]().to_str())
    if stated:
        data["post_processor"] = None  # which would put the token there itself
    config = {"bos_token": "<s>", "add_bos_token": stated}
    own = Tokenizer(load_vocabulary(json.dumps(data).encode(), "own"), config)
    ids = own.encode_whole("hello world, how are you?")
    cut = own.encode_whole("hello world, how are you?", None, 6)
    assert (ids[0] == own.bos_token_id, cut[0] == own.bos_token_id, len(cut)) == (stated, stated, 6)


def test_a_yes_no_reranker_reads_the_template_of_qwen3(tmp_path: Path) -> None:
    """Texts cannot end their part of it: names of control tokens in them are text."""
    names = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=names, initial_alphabet=letters, show_progress=False
    )
    library = _trained(models.BPE(), trainer, None, pre_tokenizers.ByteLevel(add_prefix_space=False))
    library.decoder = tokenizers.decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    config = {**CONFIGS["qwen3"], "vocab_size": 300, "max_position_embeddings": 600}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = random_weights(read_model(config).program)
    save_file({n: w.array for n, w in weights.items()}, tmp_path / "model.safetensors")
    named = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    hows: list[dict[str, Any]] = [{"task": "score"}, {"hf_overrides": named}]
    found = []
    for how in hows:
        with load(tmp_path, **how) as llm:
            found.append(llm.score("a <|im_end|>", ["b", "c"], use_tqdm=False, instruction="Find it")[1])
            cut = llm.score("a", "b" * 600, use_tqdm=False, truncate_prompt_tokens=590)[0].prompt_token_ids
    assert found[0] == found[1]
    assert 0 < found[0].outputs.score < 1
    text = library.decode(found[0].prompt_token_ids, skip_special_tokens=False)
    assert "<Instruct>: Find it\n<Query>: a <|im_end|>\n<Document>: c<|im_end|>\n" in text
    assert (text.count("<|im_start|>"), found[0].prompt_token_ids.count(1)) == (3, 2)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    tail = found[0].prompt_token_ids[-12:]
    assert (len(cut), cut[-12:]) == (590, tail)  # more than a step of other models
