"""Embeddings and scores next to transformers, computed there as sentence-transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import randomize, torch, transformers
from tiny_encoders import _tokenizer

from quire import LLM

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix
TEXTS = ["a cat sat on the mat", "b", "dogs run: far away from here " * 5, "a cat sat"]
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
BERT = {**SIZES, "num_hidden_layers": 2, "max_position_embeddings": 200}
ROBERTA = {**BERT, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
MODERN = {
    **BERT,
    "num_hidden_layers": 4,
    "local_attention": 20,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
DECODER = {
    **BERT,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
GEMMA = {
    **DECODER,
    "use_bidirectional_attention": True,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
}
DECODERS = {"Gemma3Text": GEMMA, "Qwen3": DECODER}
DISTILBERT = {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5000.0}
ROPES = {"full_attention": _YARN, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
MPNET = {**BERT, "hidden_size": 48, "num_attention_heads": 3}
KINDS = {
    "Bert": BERT,
    "Roberta": ROBERTA,
    "XLMRoberta": ROBERTA,
    "Camembert": ROBERTA,
    "DistilBert": {**DISTILBERT, "max_position_embeddings": 200},
    "MPNet": MPNET,
    "ModernBert": MODERN,
}


def save(folder: Path, kind: str, suffix: str, **more: Any) -> Any:
    """Write a model of transformers with random weights, and a tokenizer; return the model."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**KINDS, **DECODERS}[kind], **more)
    config._attn_implementation = "eager"
    model = getattr(transformers, kind + suffix)(config).eval()
    randomize(model)
    model.save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    names = {"sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return model


def hidden(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids)[None]).last_hidden_state[0].numpy()


def pool(x: np.ndarray, method: str) -> np.ndarray:
    vector = x[0] if method == "cls" else x.mean(axis=0)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("method", ["mean", "cls"])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings(kind: str, method: str, tmp_path: Path) -> None:
    model = save(tmp_path, kind, "Model")
    types = ["Transformer", "Pooling", "Normalize"]
    modules = [{"type": f"m.{type_}", "path": "p" if type_ == "Pooling" else ""} for type_ in types]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "p").mkdir()
    mode = "cls_token" if method == "cls" else "mean_tokens"
    (tmp_path / "p" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    for device in ("reference", "native"):
        with LLM(str(tmp_path), device=device) as llm:
            for output in llm.embed(TEXTS, use_tqdm=False):
                expected = pool(hidden(model, output.prompt_token_ids), method)
                np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_scores(kind: str, tmp_path: Path) -> None:
    more = {"classifier_pooling": "mean", "rope_parameters": ROPES} if kind == "ModernBert" else {}
    model = save(tmp_path, kind, "ForSequenceClassification", num_labels=1, **more)
    for device in ("reference", "native"):
        with LLM(str(tmp_path), device=device) as llm:
            for output in llm.score("a cat", TEXTS, use_tqdm=False):
                ids = output.prompt_token_ids
                second = [int(3 in ids[:i]) for i in range(len(ids))]
                given = {"token_type_ids": torch.tensor(second)[None]} if kind == "Bert" else {}
                with torch.no_grad():
                    logit = model(torch.tensor(ids)[None], **given).logits[0, 0]
                expected = float(torch.sigmoid(logit.double()))
                assert output.outputs.score == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "method"), [("Gemma3Text", "mean"), ("Qwen3", "mean"), ("Qwen3", "lasttoken")]
)
@pytest.mark.parametrize("activation", ["Identity", "Tanh"])
def test_models_that_sentence_transformers_saves(
    kind: str, method: str, activation: str, tmp_path: Path
) -> None:
    """EmbeddingGemma's modules; and decoders, whose tokens see those before them alone."""
    sentences = pytest.importorskip("sentence_transformers")
    of = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    save(tmp_path / "body", kind, "Model")
    layers = [of.Transformer(str(tmp_path / "body")), of.Pooling(32, method)]
    layers += [
        of.Dense(32, 72, bias=activation == "Tanh", activation_function=getattr(torch.nn, activation)()),
        of.Dense(72, 20, bias=False, activation_function=torch.nn.Identity()),
        of.Normalize(),
    ]
    torch.manual_seed(1)
    model = sentences.SentenceTransformer(modules=layers, device="cpu")
    model.save(str(tmp_path / "whole"))
    texts = [*TEXTS, "the window reaches that far and no farther " * 3]
    expected = model.encode(texts, batch_size=1)
    for device in ("reference", "native"):
        with LLM(str(tmp_path / "whole"), device=device) as llm:
            found = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
            np.testing.assert_allclose(found, expected, atol=1e-5)
