"""Tensors under the names that a program wants, whatever larger or smaller model stored them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quire.program.program import WeightSpec
from quire.quantize.kinds import Array, StoredWeight
from quire.weights.tensors import Tensor, Tensors

# The tower for images of composites, whose parts some have in a module of their own
_TOWER = {
    "vision_tower.vision_model.": "model.vision_tower.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "visual.": "model.visual.",
    "mlp_AR.": "model.projector.",  # PaddleOCR-VL
}
# Ways of storing a decoder: beginnings of names in the files, and what they are called in a program
LAYOUTS: tuple[dict[str, str], ...] = (
    # composites, and as newer versions of transformers write them
    {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", **_TOWER},
    {"model.language_model.": "model.", **{f"model.{old}": new for old, new in _TOWER.items()}},
    {"model.text_model.": "model."},  # Idefics3
    {"": "model.", "lm_head.": "lm_head."},  # bare decoders
    {"": "transformer."},  # bare decoders, as GPT-2 was published
    {"bert.": ""},  # encoders beneath a head
    {"roberta.": ""},
    {"new.": ""},
    {"distilbert.": ""},
    {"mpnet.": ""},
    {"model.": ""},
    # DeepSeek-V4, as transformers writes it
    {"model.": "", "model.embed_tokens.": "embed.", "model.hc_head.hc_": "hc_head_"},
    {},  # but for OLDER_ENDS
)
_DENSE = ("gate_proj", "up_proj", "down_proj")
# Ends of names, and what they are called otherwise: in BERT as it was published; in OLMo Hybrid, in
# DeepSeek-V4 and in dense layers of Kimi Linear, as transformers writes them
OLDER_ENDS = {
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
    ".attention_layer_norm.weight": ".input_layernorm.weight",
    ".feedforward_layer_norm.weight": ".post_attention_layernorm.weight",
    ".attn.norm.weight": ".attn.kv_norm.weight",
    **{f".block_sparse_moe.{name}.weight": f".mlp.{name}.weight" for name in _DENSE},
}


def under_own_names(specs: Mapping[str, WeightSpec], tensors: Tensors) -> Tensors:
    """Return the tensors under the names of `specs`: unchanged if no layout names more of them."""
    wanted = {source for spec in specs.values() for source in spec.sources}
    best, most = tensors, sum(name in tensors for name in wanted)
    for layout in LAYOUTS if most < len(wanted) else ():
        names = {renamed(name, layout): name for name in tensors}
        found = sum(name in names for name in wanted)
        if len(names) == len(tensors) and found > most:
            best, most = RenamedTensors(tensors, names), found
    return best


def renamed(name: str, layout: Mapping[str, str]) -> str:
    """Return a name with the longest beginning that the layout has replaced, and an older end too."""
    begins = [old for old in layout if name.startswith(old)]
    old = max(begins, key=len, default="")
    end = next((end for end in OLDER_ENDS if name.endswith(end)), "")
    return layout.get(old, "") + name[len(old) : len(name) - len(end)] + OLDER_ENDS.get(end, "")


class RenamedTensors(Tensors):
    """Tensors under other names: `names` has the name of each in `tensors`."""

    def __init__(self, tensors: Tensors, names: Mapping[str, str]) -> None:
        self._tensors, self._names = tensors, names

    @property
    def where(self) -> str:
        return self._tensors.where

    @property
    def summary(self) -> str:
        return self._tensors.summary

    @property
    def notes(self) -> tuple[str, ...]:
        return self._tensors.notes

    def pull(self, name: str) -> StoredWeight:
        return self._tensors.pull(self._names[name])

    def integers(self, name: str) -> Array:
        return self._tensors.integers(self._names[name])

    def prefetch(self, name: str) -> None:
        self._tensors.prefetch(self._names[name])

    def release(self, name: str) -> None:
        self._tensors.release(self._names[name])

    def name_in_files(self, name: str) -> str:
        return self._tensors.name_in_files(self._names[name])

    def identity(self) -> bytes:
        return self._tensors.identity()

    def close(self) -> None:
        self._tensors.close()

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
