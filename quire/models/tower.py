"""The parts that vision towers share, and the places of their embeddings in a text model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ConfigError, quoted
from quire.images.normalization import Normalization
from quire.images.patches import TiledPatches
from quire.images.sizes import GridTiles
from quire.models.config import Fields
from quire.program import Builder, Names, Program, Value, WeightSpec, ops

BICUBIC = 3  # the usual filter of resizing, by its number in Pillow
# Numbers of pixels by channel, of a processor that does not say otherwise
_CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
_QUICK, _MOST_TILES = 1.702, 100
_ROPES = ("axial", "default")  # names of rotations by place


def tower_fields(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> Fields:
    """Return the fields of vision_config, those that are null by default."""
    return Fields({**defaults, **{key: own for key, own in raw["vision_config"].items() if own is not None}})


def image_token(raw: Mapping[str, Any], default: int | None = None) -> int:
    """Return the token that stands for an image, which older files call image_token_index."""
    name = "image_token_index" if "image_token_index" in raw else "image_token_id"
    return Fields(raw if default is None else {"image_token_id": default, **raw}).size(name)


def embed_patches(b: Builder, given: Value, w: Names, shape: tuple[int, ...], *, bias: bool = True) -> Value:
    """Multiply the pixels of patches with a convolution as large as a patch, stored in `shape`."""
    pixels = math.prod(shape[1:])
    weight = WeightSpec(w / "weight", (shape[0], pixels), (w / "weight",), stored=shape)
    added = WeightSpec(w / "bias", shape[:1], (w / "bias",)) if bias else None
    x = b.slice(given, 0, pixels)
    return b.record(ops.Linear(b.value(shape[:1]), x, weight, added)).out


def add_learned(b: Builder, x: Value, mixed: Value, name: Names, number: int) -> Value:
    """Add to patches x a mix of the `number` learned positions in a table, as MixedRows takes it."""
    table = WeightSpec(name, (number, x.width), (name,))
    return b.add(x, b.record(ops.MixedRows(b.value((x.width,)), mixed, table)).out)


def embed_beside_class(
    b: Builder, shape: tuple[int, ...], patches: Names, token: WeightSpec, places: WeightSpec, *, bias: bool
) -> Value:
    """Embed patches and a class token after them, each with a learned position.

    The convolution of the patches is stored in `shape`; the token is a table of one row.
    """
    pixels, hidden = math.prod(shape[1:]), token.shape[1:]
    given = b.record(ops.Patches(b.value((pixels + 6,)))).out
    x = embed_patches(b, given, patches, shape, bias=False)
    tables = [(token, 4), (places, 0)]
    if bias:
        name = patches / "bias"
        tables.insert(0, (WeightSpec(name, token.shape, (name,), stored=hidden), 2))
    for table, column in tables:
        own = b.slice(given, pixels + column, 2)
        x = b.add(x, b.record(ops.MixedRows(b.value(hidden), own, table)).out)
    return x


def activate(b: Builder, x: Value, activation: str) -> Value:
    """Apply an activation, also quick_gelu, which only towers have: x sigmoid(1.702 x)."""
    if activation != "quick_gelu":
        return b.activation(x, activation)
    return b.scale(b.activation(b.scale(x, _QUICK), "silu"), 1 / _QUICK)


def project(
    b: Builder, whole: Fields, x: Value, w: Names, width: int, *, inner: int | None = None, bias: bool = True
) -> Value:
    """Return x as embeddings of `width` numbers, by two matrices with `inner` numbers between, or as many."""
    h = b.linear(x, w / "linear_1", inner or width, bias=bias)
    return b.linear(activate(b, h, str(whole.get("projector_hidden_act"))), w / "linear_2", width, bias=bias)


def text_width(raw: Mapping[str, Any]) -> int:
    """Return the width of the text model of a config.json."""
    return Fields(raw["text_config"]).size("hidden_size")


def square_size(cfg: Fields, name: str) -> int:
    """Return a size that may be stated for both sides. Raises ConfigError if these differ."""
    stated = cfg.get(name)
    if isinstance(stated, list | tuple) and len(stated) == 2 and stated[0] == stated[1]:
        return Fields({name: stated[0]}).size(name)
    return cfg.size(name)


def grid_tiles(
    cfg: Fields, processor: Mapping[str, Any], merge: int, *, classed: bool = False, fitted: bool = False
) -> TiledPatches:
    """Return how images are cut into tiles as large as a tower takes. Raises ConfigError for other sizes."""
    patch, side = square_size(cfg, "patch_size"), square_size(cfg, "image_size")
    require_squares(side, patch, merge, cfg.size("num_channels"))
    require_same(processor, {"size": {"height": side, "width": side}})
    tiles = Fields({"min_patches": 1, "max_patches": 12, **processor})
    fewest, most = tiles.size("min_patches"), tiles.size("max_patches", _MOST_TILES)
    rule = GridTiles(side, fewest, most + 1 if most > 1 else 1, fitted)
    return TiledPatches(patch, merge, rule, *clip_pixels(processor), classed)


def require_squares(side: int, patch: int, merge: int, channels: int) -> None:
    """Raise ConfigError unless the patches of an image of this side are in squares of `merge` x `merge`."""
    if side // patch % merge or side < patch or channels != 3:
        problem = f"{side // patch} patches of a side, in squares of {merge} x {merge}"
        raise ConfigError(f"config.json: vision_config: {problem}, are not supported")


def require_last_layer(whole: Fields) -> None:
    """Raise ConfigError unless the text model gets what the last layer of the tower gives."""
    if (layer := whole.get("vision_feature_layer")) not in (-1, [-1], None):
        problem = f"vision_feature_layer = {quoted(layer)} is not supported"
        raise ConfigError(f"config.json: {problem}: only -1, the last")


def require_same(processor: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Raise ConfigError if a processor states other sizes than a tower has."""
    for name, value in sizes.items():
        if (other := processor.get(name, value)) != value:
            problem = f"{name} = {quoted(other)}, but the vision tower has {value}"
            raise ConfigError(f"preprocessor_config.json: {problem}")


def normalization(processor: Mapping[str, Any], *, halves: bool = False) -> Normalization:
    """Return how pixels become numbers. Raises ConfigError for what are no numbers of three channels."""
    plain = Normalization()
    if processor.get("do_rescale") is False:
        processor = {**processor, "rescale_factor": 1.0}
    if processor.get("do_normalize") is False:
        processor = {**processor, "image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0)}
    mean, std = processor.get("image_mean", plain.mean), processor.get("image_std", plain.std)
    factor = processor.get("rescale_factor", plain.factor)
    for name, values in (("image_mean", mean), ("image_std", std), ("rescale_factor", [factor] * 3)):
        numbers = isinstance(values, list | tuple) and all(type(value) in (int, float) for value in values)
        if not numbers or len(values) != 3 or (name != "image_mean" and min(values) <= 0):
            problem = f"preprocessor_config.json: {name} = {quoted(processor.get(name))} is not usable"
            raise ConfigError(problem)
    return Normalization(factor, tuple(mean), tuple(std), halves)


def image_sizes(
    processor: Mapping[str, Any], default: tuple[int, int] = (56 * 56, 28 * 28 * 1280)
) -> tuple[int, int]:
    """Return the fewest and most pixels of a resized image."""
    size = processor.get("size")
    size = size if isinstance(size, Mapping) else {}
    stated = {key: value for key, value in {**size, **processor}.items() if value is not None}
    least = stated.get("min_pixels", stated.get("shortest_edge", default[0]))
    most = stated.get("max_pixels", stated.get("longest_edge", default[1]))
    for value in (least, most):
        if type(value) is not int or value < 1:
            raise ConfigError(f"preprocessor_config.json: {quoted(value)} is not a number of pixels")
    return least, most


def clip_pixels(processor: Mapping[str, Any]) -> tuple[Normalization, int]:
    """Return how pixels become numbers, by default as CLIP's do, and the filter of resizing."""
    return normalization({**_CLIP, **processor}), processor.get("resample", BICUBIC)


def theta_of(cfg: Fields, default: float) -> float:
    """Return the base of rotations by place. Raises ConfigError for those of another kind."""
    stated = cfg.get("rope_parameters") or {}
    if not isinstance(stated, Mapping) or stated.get("rope_type", _ROPES[0]) not in _ROPES:
        problem = f"vision_config: rope_parameters = {quoted(stated)} are not supported"
        raise ConfigError(f"config.json: {problem}")
    return Fields({"rope_theta": default, **stated}).positive("rope_theta")


def doubled(plain: Normalization) -> Normalization:
    """Return 2 x - 1 of what another normalization gives, x."""
    (a, b, c), (p, q, r) = plain.mean, (half / 2 for half in plain.std)
    return replace(plain, mean=(a + p, b + q, c + r), std=(p, q, r))


def unquantized(program: Program) -> Program:
    """Return a program whose weights stay as they are stored: rounding would cost more than it saves."""
    made = [
        replace(op, weight=replace(op.weight, quantizable=False)) if isinstance(op, ops.Linear) else op
        for op in program
    ]
    return replace(program, ops=tuple(made))


def place_images(b: Builder, x: Value) -> Value:
    """Return x [T, width] with the embeddings of images in place of those of their tokens."""
    return b.record(ops.PlaceImages(b.value(x.shape), x, 0)).out


def add_images(b: Builder, x: Value, number: int) -> Value:
    """Add to the tokens of images in x what the tower gives besides embeddings, the `number`-th part."""
    return b.record(ops.PlaceImages(b.value(x.shape), x, number * x.width, True)).out
