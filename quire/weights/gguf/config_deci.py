"""The configuration of Llama-Nemotron, whose layers have sizes of their own, from its GGUF file."""

from __future__ import annotations

from typing import Any

from quire.weights.gguf.keys import Keys


def deci(keys: Keys) -> dict[str, Any]:
    """A layer with heads of queries alone has one matrix in the place of attention, one of width 0 no MLP."""
    heads, hidden = keys.heads, keys.size("embedding_length")
    queries, widths = keys.of_layers("attention.head_count"), keys.of_layers("feed_forward_length")
    blocks = []
    for own, groups, width in zip(queries, keys.kv_heads_of_layers, widths, strict=True):
        attention: dict[str, Any] = {"no_op": not own}
        if own and groups:
            attention = {"n_heads_in_group": own // groups}
        elif own:
            attention = {"replace_with_linear": True}
        mlp = {"ffn_mult": 3 * width / (2 * hidden)} if width else {"no_op": True}
        blocks.append({"attention": attention, "ffn": mlp})
    return {"block_configs": blocks, "num_key_value_heads": heads}
