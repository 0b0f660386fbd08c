"""Compressed attention against the layers of transformers' DeepSeek-V4, in chunks and at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import Paged, random_weights

from quire.models.compressed import choose_entries, compress, compressed_attention
from quire.program import Builder, Names, Program, Value
from quire.program.rope import Rope

torch = pytest.importorskip("torch")
deepseek_v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

HIDDEN, HEADS, DIM, ROTATED, WINDOW, TOKENS = 32, 4, 16, 8, 10, 90
INDEX_HEADS, INDEX_DIM, NUMBER = 16, 8, 5  # so many heads that hardly a score is zero
ROPE = Rope(ROTATED, 160_000.0, interleaved=True)
EVERY = {"sliding": 0, "compressed_sparse": 4, "heavily_compressed": 16}
Tensors = dict[str, np.ndarray]


def layer(kind: str) -> torch.nn.Module:
    kinds = [f"{name}_attention" for name in EVERY]
    config = deepseek_v4.DeepseekV4Config(
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        head_dim=DIM,
        q_lora_rank=12,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=INDEX_HEADS,
        index_head_dim=INDEX_DIM,
        index_topk=NUMBER,
        sliding_window=WINDOW,
        layer_types=kinds,
        compress_rates={f"{name}_attention": every for name, every in EVERY.items() if every},
        partial_rotary_factor=ROTATED / DIM,
        rope_theta=ROPE.theta,
        num_hash_layers=0,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    made = deepseek_v4.DeepseekV4Attention(config, kinds.index(f"{kind}_attention"))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made.eval()


@torch.no_grad()
def expected(made: torch.nn.Module, x: torch.Tensor) -> np.ndarray:
    """What the layer mixes for each head, before its rotation is undone."""
    positions = torch.arange(TOKENS)[None]
    rope = deepseek_v4.DeepseekV4RotaryEmbedding(made.config)
    both = {name: rope(x, position_ids=positions, layer_type=name) for name in ("main", "compress")}
    at = torch.arange(TOKENS)
    apart = at[:, None] - at
    mask = torch.where((apart >= 0) & (apart < WINDOW), 0.0, -torch.inf)[None, None]
    found: list[torch.Tensor] = []
    made.o_a_proj.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    made(x, position_embeddings=both, position_ids=positions, attention_mask=mask)
    mixed = found[0].reshape(1, TOKENS, HEADS, DIM).transpose(1, 2)
    return deepseek_v4.apply_rotary_pos_emb(mixed, *both["main"]).transpose(1, 2)[0].numpy()


@torch.no_grad()
def inputs(made: torch.nn.Module, x: torch.Tensor) -> tuple[Tensors, Tensors]:
    """What the ops are given for each token, and their weights."""
    positions = torch.arange(TOKENS)[None]
    rope = deepseek_v4.DeepseekV4RotaryEmbedding(made.config)(x, position_ids=positions, layer_type="main")

    def rotated(heads: torch.Tensor) -> np.ndarray:
        turned = deepseek_v4.apply_rotary_pos_emb(heads.transpose(1, 2), *rope).transpose(1, 2)
        return leading(turned[0].numpy())

    latent = made.q_a_norm(made.q_a_proj(x))
    given = {
        "q": rotated(made.q_b_norm(made.q_b_proj(latent).view(1, TOKENS, HEADS, DIM))),
        "k": rotated(made.kv_norm(made.kv_proj(x)).view(1, TOKENS, 1, DIM)),
    }
    weights = {"sinks": made.sinks.numpy()}
    parts = {"": made.compressor}
    if index := getattr(made.compressor, "indexer", None):
        parts["index_"] = index
        given["index_q"] = rotated(index.q_b_proj(latent).view(1, TOKENS, INDEX_HEADS, INDEX_DIM))
        given["factors"] = index.scorer.weights_proj(x)[0].numpy()
    for name, part in parts.items() if made.compressor else ():
        width = len(part.kv_norm.weight)
        given[name + "values"], given[name + "gates"] = (
            leading(to(x)[0].numpy(), width) for to in (part.kv_proj, part.gate_proj)
        )
        weights[name + "bias"] = leading(part.position_bias.numpy(), width)
        weights[name + "norm.weight"] = leading(part.kv_norm.weight.numpy())
    return given, weights


def leading(x: np.ndarray, width: int | None = None) -> np.ndarray:
    """The numbers of vectors with those that rotate first: products and norms are the same."""
    parts = x.reshape(-1, width or x.shape[-1])
    return np.concatenate([parts[:, -ROTATED:], parts[:, :-ROTATED]], axis=-1).reshape(x.shape)


def program(given: Tensors, kind: str) -> Program:
    b, first, every, eps = Builder(), 0, EVERY[kind], 1e-6
    wide = b.embed(Names("x"), TOKENS, sum(part[0].size for part in given.values()))
    values = {}
    for name, part in given.items():
        values[name] = b.slice(wide, first, part.shape[1:])
        first += values[name].width

    def entries(prefix: str) -> Value:
        found = compress(
            b,
            values[prefix + "values"],
            values[prefix + "gates"],
            Names(prefix + "bias"),
            every,
            overlapping=every == 4,
        )
        return b.rotary(b.rms_norm(found, Names(prefix + "norm"), eps), replace(ROPE, behind=every - 1))

    made = entries("") if every else None
    chosen = None
    if "factors" in values:
        keys = entries("index_")
        chosen = choose_entries(b, values["index_q"], values["factors"], keys, every, NUMBER)
    how = {"window": WINDOW, "scale": DIM**-0.5, "sinks": Names("sinks"), "chosen": chosen}
    return b.program(compressed_attention(b, values["q"], values["k"], made, every, **how))


@pytest.mark.parametrize("chunks", [(), (1,) * TOKENS, (7, 1, 1, 30)], ids=["at once", "one by one", "some"])
@pytest.mark.parametrize("kind", EVERY)
def test_layers(kind: str, chunks: tuple[int, ...]) -> None:
    made = layer(kind)
    x = torch.randn(1, TOKENS, HIDDEN)
    given, kept = inputs(made, x)
    recorded = program(given, kind)
    weights = random_weights(recorded)
    weights["x.weight"].array[...] = np.concatenate([part.reshape(TOKENS, -1) for part in given.values()], 1)
    for name, array in kept.items():
        if name in weights:
            weights[name].array[...] = array
    paged = Paged(recorded, weights)
    found = paged.prefill(paged.sequence(range(TOKENS)), chunks).reshape(TOKENS, HEADS, DIM)
    np.testing.assert_allclose(found, leading(expected(made, x)), rtol=1e-4, atol=1e-5)
