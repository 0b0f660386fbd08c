"""Tiny models for vectors in folders as sentence-transformers has them, with a tokenizer of BERT's kind."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file
from tiny import CONFIGS, random_weights
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from quire.models import read_model
from quire.models.encoders import read_encoder
from quire.models.purpose import Pooling
from quire.program import Program

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
_DISTILBERT = {
    "vocab_size": 64,
    "dim": 16,
    "hidden_dim": 24,
    "n_layers": 2,
    "n_heads": 4,
    "activation": "relu",
    "max_position_embeddings": 40,
}
_ROBERTA = {**CONFIG, "type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 42}
_NOMIC = {  # as nomic-embed-text-v1.5 has them, but for the sizes
    "vocab_size": 64,
    "n_embd": 16,
    "n_inner": 24,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 160,
    "max_trained_positions": 40,
    "type_vocab_size": 2,
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-12,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "causal": False,
    "prenorm": False,
    "parallel_block": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
}
_GTE = {**CONFIG, "type_vocab_size": 1, "position_embedding_type": "rope", "rope_theta": 1000.0}
_MODERN = {**CONFIG, "local_attention": 8, "max_position_embeddings": 40}
# By what the names of architectures begin with
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": CONFIG,
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "DistilBert": _DISTILBERT,
    "MPNet": {**CONFIG, "max_position_embeddings": 42},
    "ModernBert": _MODERN,
    "NomicBert": _NOMIC,
    "New": _GTE,
    "Gte": _GTE,
}
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MODULES = "sentence_transformers.models."
# The dense modules of EmbeddingGemma, of another size: name of the activation, outputs
WIDER_AND_BACK = (("Identity", 40), ("Identity", 12))


def write_bert(folder: Path, pooling: str = "mean", **more: Any) -> Path:
    """Write an embedding model with normalized vectors and a prompt for queries."""
    config = {**CONFIG, **more}
    write_modules(folder, config["hidden_size"], pooling)
    _write(folder, config, read_encoder("BertModel", config, Pooling("embed")).program)
    return folder


def write_encoder(folder: Path, architecture: str, task: Literal["embed", "score"]) -> Path:
    """Write any encoder, without modules.json."""
    folder.mkdir(exist_ok=True)
    (config,) = (own for name, own in ENCODERS.items() if re.match(f"{name}(Model|For)", architecture))
    config = {**config, "architectures": [architecture], "id2label": {"0": "LABEL_0"}}
    _write(folder, config, read_encoder(architecture, config, Pooling(task, "mean")).program)
    return folder


def write_embedding_gemma(folder: Path, **more: Any) -> Path:
    """Write the layers of Gemma 3, with attention both ways, and two dense modules."""
    config = {**CONFIGS["gemma3"], "vocab_size": 64, "use_bidirectional_attention": True, **more}
    write_modules(folder, config["hidden_size"], "mean", WIDER_AND_BACK)
    _write(folder, {**config, "architectures": ["Gemma3TextModel"]}, read_model(config).program, "model.")
    return folder


def write_decoder(folder: Path, config: dict[str, Any], pooling: str, normalized: bool = True) -> Path:
    """Write a decoder that embeds."""
    config = {**config, "vocab_size": 64}
    write_modules(folder, 16, pooling, normalized=normalized)
    _write(folder, config, read_model(config).program)
    return folder


def write_modules(
    folder: Path,
    hidden_size: int,
    pooling: str,
    dense: Sequence[tuple[str, int]] = (),
    normalized: bool = True,
    bias: bool = False,
) -> None:
    """Write modules.json, and the folders of its modules."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalized]
    paths = [f"{i}_{kind}" if i else "" for i, kind in enumerate(kinds)]
    for path in paths:
        (folder / path).mkdir(parents=True, exist_ok=True)
    listed = [{"path": path, "type": _MODULES + kind} for path, kind in zip(paths, kinds, strict=True)]
    (folder / "modules.json").write_text(json.dumps(listed))
    modes = {f"pooling_mode_{name}": name == f"{pooling}_tokens" for name in ("mean_tokens", "max_tokens")}
    modes |= {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_lasttoken": pooling == "last"}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    prompts = {"prompts": {"query": "find: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    rng, width = np.random.default_rng(1), hidden_size
    for number, (activation, size) in enumerate(dense, 2):
        said = {"in_features": width, "out_features": size, "bias": bias}
        said["activation_function"] = f"torch.nn.modules.some.{activation}"
        (folder / f"{number}_Dense" / "config.json").write_text(json.dumps(said))
        arrays = {"linear.weight": rng.standard_normal((size, width)).astype(np.float32)}
        if bias:
            arrays["linear.bias"] = rng.standard_normal(size).astype(np.float32)
        save_file(arrays, folder / f"{number}_Dense" / "model.safetensors")
        width = size


def write_cross_encoder(folder: Path, **more: Any) -> Path:
    """Write a model that scores pairs."""
    folder.mkdir(exist_ok=True)
    own = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    config = {**CONFIG, **own, **more}
    _write(folder, config, read_encoder(config["architectures"][0], config, Pooling("score")).program)
    return folder


def _write(folder: Path, config: dict[str, Any], program: Program, without: str = "") -> None:
    """Write config.json, a tokenizer and random weights, their names without this beginning."""
    (folder / "config.json").write_text(json.dumps(config))
    specs, arrays = program.weights(), {}
    for name, weight in random_weights(program).items():
        array, rows = weight.array, specs[name].rows
        if rows is not None and name.endswith(".of_tokens.weight"):  # the rest is read by nothing
            array, (name, *_) = np.full((rows.period, *array.shape[1:]), np.float32(100)), specs[name].sources
            array[rows.of(rows.period)] = weight.array
        arrays[name.removeprefix(without)] = array
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
