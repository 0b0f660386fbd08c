"""Prediction layers of checkpoints (multi-token prediction, arXiv:2412.19437, section 2.2), which draft.

For a token and the hidden state of the position before it, such a layer predicts the token that follows. Both
are normalized and joined by a product, a layer of the model's kind goes on from there, and the embedding and
the output matrix are the model's. Several tokens are predicted by giving it its own hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens
from quire.program import Builder, Names, Program, Value
from quire.program.ops import Join, PreviousHidden

Has = Callable[[str], bool]  # True if the checkpoint has a tensor of this name
RecordPrediction = Callable[[Builder, ModelConfig, Names, Has], Program]


def joined(
    b: Builder,
    cfg: ModelConfig,
    w: Names,
    p: Names,
    names: tuple[str, str, str] = ("enorm", "hnorm", "eh_proj"),
    norm_offset: float = 0.0,
) -> Value:
    """Return the product of the token's embedding and the hidden state before it, side by side."""
    of_token, of_hidden, product = names
    hidden = b.record(PreviousHidden(b.value((cfg.hidden_size,)))).out
    hidden = b.rms_norm(hidden, p / of_hidden, cfg.norm_eps, norm_offset)
    token = b.rms_norm(embed_tokens(b, cfg, w), p / of_token, cfg.norm_eps, norm_offset)
    both = b.record(Join(b.value((2 * cfg.hidden_size,)), token, hidden)).out
    return b.linear(both, p / product, cfg.hidden_size)


def shared_head(b: Builder, cfg: ModelConfig, w: Names, p: Names, x: Value) -> Program:
    """Return the program of a layer of DeepSeek's kind, which hands on its hidden states before the norm."""
    hidden = b.sampled_rows(x)
    return predicting(b, cfg, w, b.rms_norm(hidden, p / "shared_head.norm", cfg.norm_eps), hidden)


def predicting(b: Builder, cfg: ModelConfig, w: Names, x: Value, hidden: Value) -> Program:
    """Return the program: the logits are x times the model's output matrix."""
    return replace(b.program(b.linear(x, w / cfg.lm_head, cfg.vocab_size)), hidden=hidden)
