"""Which reader reads a checkpoint, by what config.json says; and what is refused, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire.errors import ConfigError, quoted, shortened
from quire.weights.formats.awq import read_awq
from quire.weights.formats.bitnet import read_bitnet
from quire.weights.formats.bitsandbytes import read_bitsandbytes
from quire.weights.formats.compressed_tensors import read_compressed_tensors
from quire.weights.formats.fp8 import read_fp8
from quire.weights.formats.gptq import read_gptq
from quire.weights.formats.mlx import read_mlx
from quire.weights.formats.modelopt import read_modelopt
from quire.weights.formats.mxfp4 import read_mxfp4
from quire.weights.formats.raw import BETTER, QuantizedWeight, RawTensors, Reading
from quire.weights.formats.settings import Settings
from quire.weights.quantized import QuantizedTensors
from quire.weights.safetensors import Checkpoint
from quire.weights.tensors import Tensors

Config = Mapping[str, Any]
Reader = Callable[[Settings, RawTensors, Config], Reading]


def _alone(read: Callable[[Settings, RawTensors], Reading]) -> Reader:
    """Return a reader that needs nothing else of config.json."""
    return lambda settings, raw, config: read(settings, raw)


# quant_method -> reader
READERS: dict[str, Reader] = {
    "awq": _alone(read_awq),
    "bitnet": _alone(read_bitnet),
    "bitsandbytes": _alone(read_bitsandbytes),
    "compressed-tensors": _alone(read_compressed_tensors),
    "fbgemm_fp8": read_fp8,
    "fp8": read_fp8,
    "gptq": _alone(read_gptq),
    "mlx": _alone(read_mlx),
    "modelopt": read_modelopt,
    "mxfp4": _alone(read_mxfp4),
}
# Names of tensors that only quantized checkpoints have -> the format they suggest
_TELLING = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".trellis": "EXL3",
    ".W_q": "HQQ",
}


def open_tensors(checkpoint: Checkpoint, config: Config) -> Tensors:
    """Return the tensors of a checkpoint, read as its config.json says that they are quantized, if they are.

    Raises ConfigError for an unknown or refused format, and for tensors that contradict it.
    """
    stated = quantization_of(config)
    if stated is None:
        return _unquantized(checkpoint)
    method, settings = stated
    reader, raw = reader_of(method), RawTensors(checkpoint)
    reading = reader(settings, raw, config)
    if reading.summary and not reading.weights:
        what = f"config.json says that its weights are quantized ({quoted(method)}), but no tensor is"
        raise ConfigError(f"{checkpoint.where}: {what}", "remove quantization_config if they are floats")
    _check_names(checkpoint, reading.weights)
    named = Reading(
        described(reading.summary, reading.weights), reading.weights, reading.notes, reading.unused
    )
    return QuantizedTensors(checkpoint, named, repr((method, sorted(settings.values.items(), key=repr))))


def check_format(config: Config) -> None:
    """Raise ConfigError if config.json states a format of quantized weights that is not supported."""
    if (stated := quantization_of(config)) is not None:
        reader_of(stated[0])


def quantization_of(config: Config) -> tuple[str, Settings] | None:
    """Return the name of the format of quantized weights and its settings, None for a checkpoint of floats.

    Raises ConfigError if it is not clear.
    """
    text = config.get("text_config")
    places = [config, text] if isinstance(text, Mapping) else [config]
    for place, field in (
        (place, field) for place in places for field in ("quantization_config", "quantization")
    ):
        stated = place.get(field)
        if stated is None or stated == {}:
            continue
        if not isinstance(stated, Mapping):
            raise ConfigError(f"config.json: {field} = {quoted(stated)} is not an object")
        settings = Settings(stated, field)
        return _method(settings), settings
    return None


def _method(settings: Settings) -> str:
    """Return the name of the format: a key of READERS if it is supported. Raises ConfigError for none."""
    method = settings.get("quant_method")
    if method is None and settings.get("quant_algo") is not None:
        return "modelopt"
    if method is None and settings.get("bits") is not None and settings.get("group_size") is not None:
        return "mlx"
    if not isinstance(method, str):
        raise ConfigError(f"config.json: {settings.where} names no quant_method", BETTER)
    method = method.lower().replace("_", "-").removeprefix("intel/") if "round" in method else method.lower()
    if method == "auto-round":
        packing = str(settings.get("packing_format", default="auto_round:auto_gptq"))
        return next((own for own in ("gptq", "awq") if packing.endswith(f"auto_{own}")), packing)
    return method


def reader_of(method: str) -> Reader:
    """Return the reader of a format. Raises ConfigError for one that is not supported."""
    if method not in READERS:
        raise ConfigError(
            f"the checkpoint is quantized ({shortened(method)}), which is not supported", BETTER
        )
    return READERS[method]


def described(title: str, weights: Iterable[QuantizedWeight]) -> str:
    """Describe weights in a few words: "GPTQ, 4 bits, groups of 128"."""
    kinds = {weight.storage for weight in weights}
    if not kinds:
        return title
    bits = _listed(sorted({kind.bits for kind in kinds}))
    sizes = sorted({kind.group or 0 for kind in kinds})
    groups = [f"groups of {_listed([size for size in sizes if size])}"] if any(sizes) else []
    groups += [] if all(sizes) else ["a scale for each output"]
    more = ["act-order"] if any(kind.ordered for kind in kinds) else []
    return ", ".join([title, f"{bits} bits", " or ".join(groups), *more])


def _listed(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _unquantized(checkpoint: Checkpoint) -> Tensors:
    """Return a checkpoint of floats. Raises ConfigError if its names tell that it is quantized."""
    for name in checkpoint:
        for ending, format in _TELLING.items():
            if name.endswith(ending):
                what = f"tensor {quoted(name)} is one of {format}, but config.json has no quantization_config"
                raise ConfigError(f"{checkpoint.where}: {what}", "fetch all JSON files of the model again")
    return checkpoint


def _check_names(checkpoint: Checkpoint, weights: Iterable[QuantizedWeight]) -> None:
    """Raise ConfigError if a weight is there twice: quantized and as floats, or as two kinds."""
    seen = set[str]()
    for weight in weights:
        if weight.name in seen or (weight.name in checkpoint and weight.name not in weight.parts):
            raise ConfigError(f"{checkpoint.where}: weight {quoted(weight.name)} is there twice", BETTER)
        seen.add(weight.name)
