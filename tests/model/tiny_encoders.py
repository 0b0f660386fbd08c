"""Tiny encoders in folders as sentence-transformers has them, with a tokenizer of BERT's kind."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from tiny import random_weights
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from quire.models.encoders import read_encoder
from quire.models.purpose import Pooling

CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MODULES = "sentence_transformers.models."


def write_bert(folder: Path, pooling: str = "mean", **more: Any) -> Path:
    """Write an embedding model with normalized vectors and a prompt for queries."""
    folder.mkdir(exist_ok=True)
    config = {**CONFIG, **more}
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [{"idx": i, "path": path, "type": _MODULES + kind} for i, (path, kind) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name == f"{pooling}_tokens" for name in ("mean_tokens", "max_tokens")}
    modes["pooling_mode_cls_token"] = pooling == "cls"
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    prompts = {"prompts": {"query": "find: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    _write(folder, config, Pooling("embed"))
    return folder


def write_cross_encoder(folder: Path, **more: Any) -> Path:
    """Write a model that scores pairs."""
    folder.mkdir(exist_ok=True)
    own = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    _write(folder, {**CONFIG, **own, **more}, Pooling("score"))
    return folder


def _write(folder: Path, config: dict[str, Any], pooling: Pooling) -> None:
    model = read_encoder(config["architectures"][0], config, pooling)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: weight.array for name, weight in random_weights(model.program).items()}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def _tokenizer() -> Tokenizer:
    letters = [*string.ascii_lowercase, ":"]
    vocab = {token: i for i, token in enumerate([*_SPECIAL, *letters, *(f"##{c}" for c in letters)])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocab[name]) for name in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer
