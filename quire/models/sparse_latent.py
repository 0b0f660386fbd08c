"""DeepSeek-V3.2 (arXiv:2512.02556) and GLM-5 to 5.2: DeepSeek-V3 with attention to positions that an indexer
chooses; in GLM-5.2 most layers attend to those that a layer before them chose.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError, quoted
from quire.models.config import MAX_HEAD_DIM, ModelConfig
from quire.models.deepseek import Choose, latent_attention_layer, later_layer, like_last
from quire.models.layers import embed_tokens, head
from quire.models.moe import biased_routing
from quire.models.prediction import Has, joined, shared_head
from quire.program import Builder, Names, PagedIndex, Program, Value
from quire.program.ops import ChoosePositions
from quire.program.rope import Rope

_EPS = 1e-6  # of the norm of index keys, whatever rms_norm_eps is
_MOST = 1 << 16  # heads of an indexer, and positions that it chooses: far above any model
_KINDS = {"F": True, "S": False, "full": True, "shared": False}  # whether a layer has an indexer


def deepseek_v32(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _layers(b, cfg, w, (True,) * cfg.num_hidden_layers, interleaved=False)


def glm_moe_dsa(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _layers(b, cfg, w, _has_indexer(cfg), interleaved=True)


def mtp_v32(b: Builder, cfg: ModelConfig, w: Names, has: Has) -> Program:
    return _prediction(b, cfg, w, interleaved=False)


def mtp_glm_dsa(b: Builder, cfg: ModelConfig, w: Names, has: Has) -> Program:
    return _prediction(b, cfg, w, interleaved=True)


def _prediction(b: Builder, cfg: ModelConfig, w: Names, interleaved: bool) -> Program:
    """Record the layer that predicts further tokens, which has an indexer in all of these models."""
    p, dim = later_layer(cfg, w), cfg.size("qk_rope_head_dim")
    choose = _Indexers(b, cfg, cfg.rope(dim=dim, interleaved=interleaved)).of(p / "self_attn.indexer")
    x, rope = joined(b, cfg, w, p), cfg.rope(dim=dim, interleaved=True)
    x = latent_attention_layer(b, cfg, like_last(cfg), x, p, rope, biased_routing, choose=choose)
    return shared_head(b, cfg, w, p, x)


def _layers(
    b: Builder, cfg: ModelConfig, w: Names, has_indexer: tuple[bool, ...], interleaved: bool
) -> Value:
    """Record all layers; `interleaved` tells how indexers rotate, latents always do so."""
    dim = cfg.size("qk_rope_head_dim")
    rope = cfg.rope(dim=dim, interleaved=True)
    cfg.size("q_lora_rank")  # indexers read the latent of the queries
    indexers = _Indexers(b, cfg, cfg.rope(dim=dim, interleaved=interleaved))
    x = embed_tokens(b, cfg, w)
    for i, own in enumerate(has_indexer):
        p = w / f"model.layers.{i}"
        choose = indexers.of(p / "self_attn.indexer") if own else indexers.last
        x = latent_attention_layer(b, cfg, i, x, p, rope, biased_routing, choose=choose)
    return head(b, cfg, x, w)


def _has_indexer(cfg: ModelConfig) -> tuple[bool, ...]:
    """Return which layers have an indexer: as listed, or by a pattern, or from an offset on every so many."""
    layers = cfg.num_hidden_layers
    listed = cfg.get("indexer_types")
    if listed is None:
        listed = cfg.get("index_topk_pattern")
    if listed is None:
        every = max(1, int(cfg.number("index_topk_freq")))
        offset = int(cfg.number("index_skip_topk_offset"))
        return tuple(max(0, i - offset + 1) % every == 0 for i in range(layers))
    kinds = list(listed) if isinstance(listed, str | list) else []
    if len(kinds) < layers or not all(isinstance(kind, str) and kind in _KINDS for kind in kinds):
        problem = f"{quoted(listed)} does not say of each layer whether it has an indexer"
        raise ConfigError(f"config.json: {problem}")
    return tuple(_KINDS[kind] for kind in kinds[:layers])


@dataclass
class _Indexers:
    """Records indexers, of which the last has chosen for the layers that follow without one."""

    b: Builder
    cfg: ModelConfig
    rope: Rope
    chosen: Value | None = None

    def of(self, p: Names) -> Choose:
        """Return what records the indexer with these weights."""

        def choose(h: Value, q: Value) -> Value:
            self.chosen = self._choose(h, q, p)
            return self.chosen

        return choose

    def last(self, h: Value, q: Value) -> Value:
        if self.chosen is None:
            raise ConfigError("config.json: the first layer has no indexer, and none before it to share")
        return self.chosen

    def _choose(self, h: Value, q: Value, p: Names) -> Value:
        """Record the choice by the products of rotated queries and keys, of which the first part rotates.

        The factors by which the model scales scores are left out, being positive: they change no choice.
        """
        b, cfg = self.b, self.cfg
        heads, dim = cfg.size("index_n_heads", _MOST), cfg.size("index_head_dim", MAX_HEAD_DIM)
        queries = b.rotary(b.linear(q, p / "wq_b", (heads, dim)), self.rope)
        k = b.layer_norm(b.linear(h, p / "wk", (1, dim)), p / "k_norm", _EPS)
        k = b.rotary(k, self.rope)
        factors = b.linear(h, p / "weights_proj", heads)
        lists = b.value((cfg.size("index_topk", _MOST),), dtype="int32")
        return b.record(ChoosePositions(lists, queries, factors, k, b.cache(PagedIndex(dim)))).out
