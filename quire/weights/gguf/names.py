"""The place of a file's tensors in the model, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.errors import ConfigError
from quire.weights.gguf.architectures import Architecture
from quire.weights.gguf.changes import PLAIN, Alteration, Order
from quire.weights.gguf.keys import Keys
from quire.weights.gguf.tables import DENSE, PLAIN_NAMES

# Tensors of no layer; a name that is whole as it is in a table begins with one of the others.
_OF_NO_LAYER = {
    *("token_embd", "position_embd", "output_norm", "output", "token_embd_norm", "altup_proj"),
    *("altup_unembd_proj", "per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm"),
    *("token_types", "cls", "cls.output", *DENSE),
}
_LAYER = re.compile(r"(?:blk\.(\d{1,4})\.)?(.+)", re.ASCII)
_PART = re.compile(r"([a-z0-9_.]+?)(?:\.(\d{1,4}))?(\.weight|\.bias)", re.ASCII)
_PREDICTION = "mtp."  # names of a prediction layer in config.json's world


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model that names and orders of its tensors depend on.

    `layers` without prediction layers; `kv_heads` of each, 0 for one without attention. `pairs` is the order
    of queries and keys in a head, None if it is that of the model. `values` is the order of the value heads
    of delta nets, None if it is that of their keys; `keys_width` are the queries and keys of all heads before
    them.
    """

    layers: int
    heads: int
    kv_heads: tuple[int, ...]
    pairs: Order | None = None
    values: Order | None = None
    keys_width: int = 0

    def kv_heads_of(self, layer: int | None) -> int:
        """Return the heads of keys of a layer; the most that any has for one that states none."""
        own = self.kv_heads[layer] if layer is not None and layer < self.layers else 0
        return own or max(*self.kv_heads, 1)


def sizes_of(keys: Keys, architecture: Architecture) -> Sizes:
    """Return the sizes of the model in a file."""
    plain = Sizes(keys.layers, keys.heads, tuple(keys.kv_heads_of_layers))
    if architecture.halved and keys.value("rope.dimension_sections") is not None:
        return replace(plain, pairs=Order(keys.rotated // 2, rest=keys.head_dim - keys.rotated))
    if not architecture.tiled_values:
        return plain
    values, by_key = keys.size("ssm.time_step_rank"), keys.size("ssm.group_count")
    if values % by_key:
        raise ConfigError(f"{keys.metadata.where}: {values} heads of values cannot share {by_key} of keys")
    if values == by_key:
        return plain
    each = keys.size("ssm.inner_size") // values
    return replace(plain, values=Order(by_key, each), keys_width=2 * by_key * keys.size("ssm.state_size"))


@dataclass(frozen=True, slots=True)
class Naming:
    """The place of a tensor of a file in the model: its `name` there, and how it is stored in the file.

    With `stacked` the tensor has all experts, or all of a list, and the name one of them in place of each *.
    """

    name: str
    change: Alteration = PLAIN
    stacked: bool = False


def naming_of(architecture: Architecture, sizes: Sizes, name: str) -> Naming | None:
    """Return the place of a tensor named `name` in a file; None if the architecture has none of this name."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return None
    layer, rest = None if found[1] is None else int(found[1]), found[2]
    table = {**PLAIN_NAMES, **architecture.own}
    if layer is not None and layer >= sizes.layers:
        table |= architecture.predicting
    elif layer is not None and not sizes.kv_heads[layer]:
        table |= architecture.without_keys
    if (looked_up := _looked_up(table, architecture, rest)) is None:
        return None
    whole, part, expert = looked_up
    if whole.startswith(_PREDICTION):
        if layer is None or layer < sizes.layers:
            return None
    elif (layer is None) != (part in _OF_NO_LAYER):
        return None
    elif layer is not None and layer >= sizes.layers and architecture.prediction:
        whole = f"{architecture.prediction}.{layer - sizes.layers}.{whole}"
    elif layer is not None:
        whole = f"{architecture.layers}.{layer}.{whole}"
    if expert is not None:
        whole = whole.replace("*", expert)
    return Naming(whole, _change(architecture, sizes, layer, rest, part), "*" in whole)


def _looked_up(
    table: Mapping[str, str], architecture: Architecture, rest: str
) -> tuple[str, str, str | None] | None:
    """Return the name of a tensor in its layer, its part of the name in the file, and its expert, if any."""
    part = rest.rpartition(".")[0] if rest.endswith((".weight", ".bias", ".scale")) else rest
    if rest in table:
        return table[rest], part, None
    if (found := _PART.fullmatch(rest)) is None:
        return None
    part, expert, suffix = found.groups()
    module = table.get(part if expert is None else f"{part}.*")
    if module is None:
        return None
    whole = module + suffix
    if module in architecture.bare:
        whole = module if suffix == ".weight" else architecture.bare[module]
    return whole, part, None if expert is None else str(int(expert))


def _change(architecture: Architecture, sizes: Sizes, layer: int | None, rest: str, part: str) -> Alteration:
    """Return how a tensor differs from the one that the model needs."""
    change, is_weight = architecture.changes.get(rest, PLAIN), rest.endswith(".weight")
    pairs = Order(2) if architecture.paired else sizes.pairs
    if pairs is not None and part in ("attn_q", "attn_k"):
        heads = sizes.heads if part == "attn_q" else sizes.kv_heads_of(layer)
        change = replace(change, rows=replace(pairs, outer=heads))
    if architecture.one_plus and part.endswith("norm") and part != "ssm_norm" and is_weight:
        change = replace(change, numbers="plus one")
    if architecture.own.get(part, "") in architecture.transposed and is_weight:
        change = replace(change, transposed=True)
    if sizes.values is not None:
        change = _in_order_of_keys(change, sizes, part)
    return change


def _in_order_of_keys(change: Alteration, sizes: Sizes, part: str) -> Alteration:
    """Return the change with the value heads of a delta net beside those that share their key head."""
    assert sizes.values is not None
    if part in ("attn_qkv", "ssm_conv1d"):
        return replace(change, rows=replace(sizes.values, first=sizes.keys_width))
    if part == "attn_gate":
        return replace(change, rows=sizes.values)
    if part in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return replace(change, rows=replace(sizes.values, each=1))
    return replace(change, columns=sizes.values) if part == "ssm_out" else change
