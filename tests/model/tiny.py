"""Tiny models for tests: a config of each family, random weights for any program, and a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.backends.backend import Backend
from quire.backends.reference import ReferenceBackend
from quire.models import Model, read_model
from quire.program import Load, Program
from quire.program.batch import Batch

VOCAB = 32
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 256,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.2], "long_factor": [1.5, 4.0]}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 256}
_LOCAL = {"num_hidden_layers": 3, "sliding_window": 24, "query_pre_attn_scalar": 4}

# name -> config.json: the 17 families, then settings of theirs that change what a context means
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **_SIZES},
    "mistral": {"architectures": ["MistralForCausalLM"], **_SIZES, "sliding_window": 20},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **_SIZES, "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **_SIZES},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        **_SIZES,
        **_MOE,
        "moe_intermediate_size": 8,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        **_SIZES,
        **_LOCAL,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **_SIZES,
        **_LOCAL,
        "sliding_window_pattern": 3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], **_SIZES},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], **_SIZES},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], **_SIZES, "no_rope_layers": [1, 0]},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        **_SIZES,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"],
        **_SIZES,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4": {"architectures": ["Glm4ForCausalLM"], **_SIZES, "attention_bias": True},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], **_GPT2},
    "mixtral": {"architectures": ["MixtralForCausalLM"], **_SIZES, **_MOE},
    "olmoe": {"architectures": ["OlmoeForCausalLM"], **_SIZES, **_MOE},
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        **_SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {**_YARN, "truncate": False},
    },
    "llama-mqa-bias": {
        "architectures": ["LlamaForCausalLM"],
        **_SIZES,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-llama3": {"architectures": ["LlamaForCausalLM"], **_SIZES, "rope_scaling": _LLAMA3},
    "llama-dynamic": {
        "architectures": ["LlamaForCausalLM"],
        **_SIZES,
        "max_position_embeddings": 64,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "phi3-longrope": {
        "architectures": ["Phi3ForCausalLM"],
        **_SIZES,
        "original_max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": _LONGROPE,
    },
}
FAMILIES = tuple(CONFIGS)[:17]


def tiny(name: str) -> Model:
    return read_model(CONFIGS[name])


@dataclass(frozen=True)
class Dense:
    """A float32 weight."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def dense(self) -> np.ndarray:
        return self.array


def random_weights(program: Program, seed: int = 0) -> dict[str, Dense]:
    """Values of a size that keeps every layer alive: matrices by their width, vectors near one."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, spec in program.weights().items():
        scale = 2.0 / np.sqrt(spec.shape[-1]) if len(spec.shape) > 1 else 0.3
        mean = 1.0 if "norm" in name or "ln_" in name else 0.0
        out[name] = Dense((mean + scale * rng.standard_normal(spec.shape)).astype(np.float32))
    return out


@dataclass
class Sequence:
    """Tokens of one request, its blocks, and how many tokens are in the cache."""

    token_ids: list[int]
    blocks: list[int]
    variant: int = 0
    computed: int = 0
    slot: int = 0


@dataclass
class Paged:
    """Runs sequences through a cache whose blocks are handed out shuffled, otherwise in each cache group.

    `make` is what computes: it takes the program, the weights, and the options of ReferenceBackend.
    """

    program: Program
    weights: Any
    block_size: int = 16
    num_blocks: int = 80
    kv_cache_dtype: str = "auto"
    seed: int = 0
    make: Callable[..., Backend] = ReferenceBackend
    free: list[int] = field(init=False)
    num_sequences: int = 0

    def __post_init__(self) -> None:
        num_tables = len(self.program.cache_groups)
        self.backend = self.make(
            self.program,
            self.weights,
            num_blocks=[self.num_blocks] * num_tables,
            block_size=self.block_size,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        rng = np.random.default_rng(self.seed)
        self.free = rng.permutation(self.num_blocks).tolist()
        others = [rng.permutation(self.num_blocks) for _ in range(1, num_tables)]
        self.ids = [np.arange(self.num_blocks), *others]  # by group: of each block, its id there

    def sequence(self, token_ids: Iterable[int], variant: int = 0) -> Sequence:
        tokens = list(token_ids)
        blocks = [self.free.pop() for _ in range(-(-len(tokens) // self.block_size))]
        self.num_sequences += 1
        return Sequence(tokens, blocks, variant, slot=self.num_sequences - 1)

    def step(self, rows: list[tuple[Sequence, int]]) -> list[np.ndarray]:
        """Compute the next `count` tokens of each sequence in one batch: their logits [count, vocab]."""
        batch = batch_of(rows, self.block_size, ids=self.ids)
        logits = np.array(self.backend.execute(batch))  # kept from the next step
        for sequence, count in rows:
            sequence.computed += count
        return np.split(logits, np.cumsum([count for _, count in rows])[:-1])

    def prefill(self, sequence: Sequence, chunks: Iterable[int] = ()) -> np.ndarray:
        """All tokens that are left, in chunks of these sizes and then the rest: logits [tokens, vocab]."""
        parts = []
        for chunk in (*chunks, len(sequence.token_ids)):
            count = min(chunk, len(sequence.token_ids) - sequence.computed)
            if count:
                parts += self.step([(sequence, count)])
        return np.concatenate(parts)


def batch_of(
    rows: list[tuple[Sequence, int]],
    block_size: int,
    logits: np.ndarray | None = None,
    ids: Iterable[np.ndarray] = (),
) -> Batch:
    """The next `count` tokens of each sequence as one Batch, with logits of every token.

    `ids` (see Paged) has for each cache group what the sequences' blocks are called there.
    """
    counts = [count for _, count in rows]
    positions = [np.arange(s.computed, s.computed + count) for s, count in rows]
    tables = np.zeros((len(rows), max(len(s.blocks) for s, _ in rows)), np.int64)
    for table, (sequence, _) in zip(tables, rows, strict=True):
        table[: len(sequence.blocks)] = sequence.blocks
    return Batch(
        token_ids=np.concatenate([s.token_ids[s.computed : s.computed + count] for s, count in rows]),
        positions=np.concatenate(positions),
        row_offsets=np.cumsum([0, *counts]),
        block_tables=tuple(names[tables] for names in ids) or (tables,),
        context_lens=np.array([s.computed + count for s, count in rows]),
        slots=np.array([s.slot for s, _ in rows]),
        variants=np.array([s.variant for s, _ in rows]),
        logit_rows=np.arange(sum(counts)) if logits is None else logits,
        block_size=block_size,
    )


def load_of(rows: list[tuple[Sequence, int]], kv_itemsize: int = 4) -> Load:
    """The Load of the same batch."""
    parts = tuple((s.computed, count) for s, count in rows)
    return Load(parts, sum(count for _, count in parts), kv_itemsize)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal shapes and equal float32 bits."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
