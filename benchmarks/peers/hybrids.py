"""Published models with states or shared keys beside attention, as GGUF files of random blocks.

Speed does not depend on the values. Names and keys are those of llama.cpp, which loads the same file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from peers.checkpoints import Shape

FLOAT, FEW, MORE, TABLE = "float", "few", "more", "table"  # classes of tensors: what type they have in a file
Tensors = Iterator[tuple[str, tuple[int, ...], str]]


@dataclass(frozen=True)
class HybridShape(Shape):
    """A shape that only GGUF files have here.

    `own` are the keys of its metadata and `layer_of` gives the tensors of a layer; `attends` are the layers
    whose keys and values are cached, `states` the bytes of the states of a sequence.
    """

    architecture: str = ""
    attends: tuple[int, ...] = ()
    states: int = 0
    own: dict[str, Any] = field(default_factory=dict)
    layer_of: Callable[[HybridShape, int], Tensors] | None = None
    outside: tuple[tuple[str, tuple[int, ...], str], ...] = ()

    def files_tensors(self) -> Tensors:
        """Yield names, shapes and classes of all tensors of a file."""
        assert self.layer_of is not None
        yield "token_embd.weight", (self.vocab, self.hidden), TABLE
        yield from self.outside
        for index in range(self.layers):
            for name, dims, kind in self.layer_of(self, index):
                yield f"blk.{index}.{name}", dims, kind

    def sizes(self) -> dict[str, Any]:
        """Return the metadata of the architecture."""
        keys = {
            "context_length": self.max_positions,
            "embedding_length": self.hidden,
            "block_count": self.layers,
            "feed_forward_length": self.intermediate,
            "attention.head_count": self.heads,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": self.rope_theta,
            "vocab_size": self.vocab,
            **self.own,
        }
        found = {f"{self.architecture}.{key}": value for key, value in keys.items()}
        return {"general.architecture": self.architecture, **found}

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers that a token is multiplied with."""
        layers = (dims for name, dims, _ in self.files_tensors() if name.startswith("blk.") and len(dims) > 1)
        return sum(math.prod(dims) for dims in layers)

    @property
    def cached_numbers(self) -> int:
        return len(self.attends) * 2 * self.kv_heads * self.head_dim

    @property
    def pair_macs(self) -> int:
        return len(self.attends) * 2 * self.heads * self.head_dim

    @property
    def state_bytes(self) -> int:
        return self.states


def _mlp(shape: HybridShape, width: int) -> Tensors:
    yield "ffn_gate.weight", (width, shape.hidden), FEW
    yield "ffn_up.weight", (width, shape.hidden), FEW
    yield "ffn_down.weight", (shape.hidden, width), MORE


def _attention(shape: HybridShape, head_dim: int, norms: bool, keys: bool = True) -> Tensors:
    queries, groups = shape.heads * head_dim, shape.kv_heads * head_dim
    yield "attn_q.weight", (queries, shape.hidden), FEW
    yield "attn_output.weight", (shape.hidden, queries), FEW
    if norms:
        yield "attn_q_norm.weight", (head_dim,), FLOAT
    if keys:
        yield "attn_k.weight", (groups, shape.hidden), FEW
        yield "attn_v.weight", (groups, shape.hidden), MORE
    if norms and keys:
        yield "attn_k_norm.weight", (head_dim,), FLOAT


def _norms(shape: HybridShape, *names: str) -> Tensors:
    for name in names:
        yield f"{name}.weight", (shape.hidden,), FLOAT


def _lfm2_layer(shape: HybridShape, index: int) -> Tensors:
    yield from _norms(shape, "attn_norm", "ffn_norm")
    yield from _mlp(shape, shape.intermediate)
    if index in shape.attends:
        yield from _attention(shape, shape.head_dim, norms=True)
        return
    yield "shortconv.conv.weight", (shape.hidden, 3), FLOAT
    yield "shortconv.in_proj.weight", (3 * shape.hidden, shape.hidden), FEW
    yield "shortconv.out_proj.weight", (shape.hidden, shape.hidden), FEW


MAMBA_HEADS, MAMBA_DIM, MAMBA_STATE, MAMBA_KERNEL = 48, 64, 128, 4


def _granite_layer(shape: HybridShape, index: int) -> Tensors:
    yield from _norms(shape, "attn_norm", "ffn_norm")
    yield from _mlp(shape, shape.intermediate)
    if index in shape.attends:
        yield from _attention(shape, shape.head_dim, norms=False)
        return
    inner = MAMBA_HEADS * MAMBA_DIM
    conv = inner + 2 * MAMBA_STATE
    yield "ssm_in.weight", (inner + conv + MAMBA_HEADS, shape.hidden), FEW
    yield "ssm_conv1d.weight", (conv, MAMBA_KERNEL), FLOAT
    yield "ssm_conv1d.bias", (conv,), FLOAT
    yield "ssm_dt.bias", (MAMBA_HEADS,), FLOAT
    yield "ssm_a", (MAMBA_HEADS, 1), FLOAT
    yield "ssm_d", (MAMBA_HEADS, 1), FLOAT
    yield "ssm_norm.weight", (1, inner), FLOAT
    yield "ssm_out.weight", (shape.hidden, inner), FEW


PER_LAYER, WIDE, NUM_SHARED = 256, 512, 20  # of Gemma 4 E2B


def _gemma4_layer(shape: HybridShape, index: int) -> Tensors:
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
    yield from _norms(shape, *norms)
    yield "layer_output_scale.weight", (1,), FLOAT
    shared, full = index not in shape.attends, (index + 1) % 5 == 0
    yield from _mlp(shape, shape.intermediate * (2 if shared else 1))
    yield from _attention(shape, WIDE if full else shape.head_dim, norms=True, keys=not shared)
    yield "inp_gate.weight", (PER_LAYER, shape.hidden), FEW
    yield "proj.weight", (shape.hidden, PER_LAYER), FEW


def _lfm2() -> HybridShape:
    attends = (2, 5, 8, 10, 12, 14)
    own = {
        "attention.head_count_kv": [8 if i in attends else 0 for i in range(16)],
        "shortconv.l_cache": 3,
    }
    return HybridShape(
        *("LFM2 1.2B", 2048, 16, 32, 8, 64, 8192, 65_536, 1e6, 128_000),
        architecture="lfm2",
        attends=attends,
        states=10 * 2048 * 2 * 4,
        own=own,
        layer_of=_lfm2_layer,
        outside=(("token_embd_norm.weight", (2048,), FLOAT),),
    )


def _granite() -> HybridShape:
    attends = (5, 15, 25, 35)
    inner = MAMBA_HEADS * MAMBA_DIM
    own = {
        "attention.head_count_kv": [4 if i in attends else 0 for i in range(40)],
        "attention.scale": 0.0078125,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 6.0,
        "rope.dimension_count": 128,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": MAMBA_KERNEL,
        "ssm.inner_size": inner,
        "ssm.state_size": MAMBA_STATE,
        "ssm.group_count": 1,
        "ssm.time_step_rank": MAMBA_HEADS,
    }
    return HybridShape(
        *("Granite 4.0 H 1B", 1536, 40, 12, 4, 128, 4096, 100_352, 10_000.0, 131_072),
        architecture="granitehybrid",
        attends=attends,
        states=36 * inner * MAMBA_STATE * 4,
        own=own,
        layer_of=_granite_layer,
        outside=(("output_norm.weight", (1536,), FLOAT),),
    )


def _gemma4() -> HybridShape:
    layers, vocab, hidden, inner = 35, 65_536, 1536, 6144
    first = layers - NUM_SHARED
    own = {
        "feed_forward_length": [inner] * first + [2 * inner] * NUM_SHARED,
        "attention.head_count_kv": 1,
        "attention.key_length": WIDE,
        "attention.value_length": WIDE,
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": [(i + 1) % 5 != 0 for i in range(layers)],
        "attention.shared_kv_layers": NUM_SHARED,
        "embedding_length_per_layer_input": PER_LAYER,
        "final_logit_softcapping": 30.0,
        "rope.freq_base_swa": 10_000.0,
        "rope.dimension_count": WIDE,
        "rope.dimension_count_swa": 256,
    }
    outside = (
        ("per_layer_token_embd.weight", (vocab, layers * PER_LAYER), TABLE),
        ("per_layer_model_proj.weight", (layers * PER_LAYER, hidden), FEW),
        ("per_layer_proj_norm.weight", (PER_LAYER,), FLOAT),
        ("output_norm.weight", (hidden,), FLOAT),
        ("rope_freqs.weight", (WIDE // 2,), FLOAT),
    )
    return HybridShape(
        *("Gemma 4 E2B with a vocabulary of 65,536", hidden, layers, 8, 1, 256, inner, vocab, 1e6, 131_072),
        architecture="gemma4",
        attends=tuple(range(first)),
        own=own,
        layer_of=_gemma4_layer,
        outside=outside,
    )


HYBRIDS: dict[str, Shape] = {"lfm2": _lfm2(), "granite4h": _granite(), "gemma4e": _gemma4()}
