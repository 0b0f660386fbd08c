"""The storage kinds that config.json alone leads to expect, to describe a model without its weights.

An estimate: only the tensors tell what each module has.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from quire.program.program import WeightSpec
from quire.quantize.coded import CodedStorage
from quire.quantize.kinds import FloatStorage, Storage
from quire.quantize.scales import ScaleForm
from quire.weights.formats.names import ModuleNames
from quire.weights.formats.registry import quantization_of
from quire.weights.formats.settings import Settings
from quire.weights.plan import Expect, all_in

_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")
_HEAD, _SUFFIX = "lm_head", ".weight"
_EXPERTS = ".experts."
_NVFP4 = CodedStorage("nvfp4", 4, "fp4", 16, ScaleForm("f32", "e4m3", 8, 0))
_MXFP4 = CodedStorage("mxfp4", 4, "fp4", 32, ScaleForm("e8m0"))


def expected_storage(config: Mapping[str, Any], floats: str) -> Expect:
    """Return a function that tells the storage kind of a weight, `floats` if it is not quantized."""
    stated, plain = quantization_of(config), FloatStorage(floats)
    kind = None if stated is None else _kind(*stated)
    if stated is None or kind is None:
        return all_in(floats)
    method, settings = stated
    listed = [name for field in _LISTS for name in settings.names(field)]
    apart = _experts_apart(method, settings, config)
    if apart is not None:  # what lists name is not of the kind of experts
        listed = []
    patterns = ModuleNames(listed)
    head = method == "mlx" or settings.flag(_HEAD)

    def expect(spec: WeightSpec) -> Storage:
        name = spec.sources[0].removesuffix(_SUFFIX)
        table = method == "mlx" and len(spec.shape) > 1 and "embed" in name
        left_out = name in patterns or _left_out(name, listed) or (name.endswith("head") and not head)
        if method == "mxfp4":
            left_out = len(spec.shape) < 3
        own = apart if apart is not None and _EXPERTS in name else kind
        return plain if left_out or not (spec.quantizable or table) else own

    return expect


def _experts_apart(method: str, settings: Settings, config: Mapping[str, Any]) -> CodedStorage | None:
    """Return the kind of experts that are 4-bit floats beside matrices of 8-bit floats (DeepSeek-V4)."""
    if method != "fp8":
        return None
    if settings.get("moe_quant_algo") == "NVFP4":
        return _NVFP4
    return _MXFP4 if "fp4" in (config.get("expert_dtype"), settings.get("expert_dtype")) else None


def _kind(method: str, settings: Settings) -> CodedStorage | None:
    """Return the kind of quantized matrices."""
    if method == "mxfp4":
        return _MXFP4
    if method in ("fp8", "fbgemm_fp8"):
        blocks = settings.get("weight_block_size") is not None or settings.get("quant_algo") is not None
        form = "e8m0" if settings.get("scale_fmt") == "ue8m0" else "f32"
        return CodedStorage("fp8", 8, "e4m3", 128 if blocks else None, ScaleForm(form))
    if method == "modelopt":
        four = "NVFP4" in str(settings.get("quant_algo"))
        return _NVFP4 if four else CodedStorage("fp8", 8, "e4m3", None, ScaleForm("f32"))
    if method == "bitsandbytes":
        if settings.flag("load_in_8bit"):
            return CodedStorage("bitsandbytes int8", 8, "signed", None, ScaleForm("f32"))
        return CodedStorage("bitsandbytes nf4", 4, "unsigned", 64, ScaleForm("f32"))
    if method == "bitnet":
        return CodedStorage("bitnet", 2, "offset", None, ScaleForm("bf16"))
    if method == "compressed-tensors":
        return _of_groups(settings)
    if str(settings.get("mode", default="")).startswith("mxfp4"):
        return _MXFP4
    bits = settings.integer("bits", "w_bit", default=4, low=2, high=8)
    group = settings.integer("group_size", "q_group_size", default=128, low=-1)
    minimums = ScaleForm("bf16") if method == "mlx" else None
    return CodedStorage(
        method, bits, "unsigned", group if group > 0 else None, ScaleForm("f16"), minimums, method != "mlx"
    )


def _of_groups(settings: Settings) -> CodedStorage | None:
    """Return the kind of the first group of compressed-tensors that has weights."""
    groups = settings.inner("config_groups")
    schemes = [groups.inner(name) for name in groups.values] if groups else []
    weights = next((own for group in schemes if group and (own := group.inner("weights"))), None)
    if weights is None:
        return None
    bits, size = weights.integer("num_bits", low=2, high=8), weights.integer("group_size", default=-1, low=-1)
    group = size if size > 0 else None
    if weights.get("type") != "float":
        return CodedStorage("compressed-tensors", bits, "offset", group, ScaleForm("bf16"))
    if bits == 4:
        return _MXFP4 if group == 32 else _NVFP4
    blocks = weights.get("block_structure") is not None
    return CodedStorage("fp8", 8, "e4m3", 128 if blocks else group, ScaleForm("bf16"))


def _left_out(name: str, listed: list[str]) -> bool:
    """Return True if a list of names and wildcards has a module, or a module around it."""
    return any(name == own or name.startswith(own + ".") or fnmatchcase(name, own) for own in listed)
