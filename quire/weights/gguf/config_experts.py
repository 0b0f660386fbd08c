"""The configurations of Ernie 4.5 and Hunyuan with experts, from the metadata of their GGUF files."""

from __future__ import annotations

import re
from typing import Any

from quire.errors import ConfigError
from quire.weights.gguf.keys import Keys, experts

_SPARSE = re.compile(r"blk\.(\d{1,4})\.ffn_gate_inp\.weight", re.ASCII)  # of a layer with experts


def ernie4_5_moe(keys: Keys) -> dict[str, Any]:
    """A file states no last layer with experts: it follows from its tensors, as does the first."""
    sparse = [int(found[1]) for name in keys.tensors if (found := _SPARSE.fullmatch(name))]
    if not sparse:
        raise ConfigError(f"{keys.metadata.where}: has no layer with experts", "is the file complete?")
    return experts(keys) | {
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.optional_size("expert_shared_count") or 0,
        "moe_layer_start_index": min(sparse),
        "moe_layer_end_index": max(sparse),
        "moe_layer_interval": keys.size("interleave_moe_layer_step", 1),
    }


def hunyuan_moe(keys: Keys) -> dict[str, Any]:
    """The base of a file's rope is the stretched one."""
    inner, shared = keys.size("expert_feed_forward_length"), keys.size("expert_shared_feed_forward_length")
    if inner != shared:
        raise ConfigError(f"{keys.metadata.where}: the shared expert has another width than the others")
    return experts(keys) | {"intermediate_size": inner}
