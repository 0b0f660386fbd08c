"""A model that is all in one thing, with weights in a kind that Quire has never seen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_tokenizers as small
from tiny import CONFIGS, random_weights

from quire import LLM, SamplingParams, description
from quire.cli.inspect import as_dict
from quire.config import QUANTIZATIONS, EngineConfig
from quire.errors import ConfigError
from quire.frontend import Frontend
from quire.models import read_model
from quire.program import numerics
from quire.quantize.kinds import Dense, StoredWeight, Which
from quire.quantize.round_to_nearest import SCHEMES
from quire.weights.folder import ModelFolder
from quire.weights.source import TokenizerData
from quire.weights.tensors import Tensor, Tensors


@dataclass(frozen=True)
class ShiftedStorage:
    """A byte each, and four for each group."""

    kind: str = "shifted"
    is_float: bool = False

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape[:-1]) * (shape[-1] + 4 * -(-shape[-1] // 8))

    def product_bytes(self, shape: tuple[int, ...]) -> int:
        return 4 * math.prod(shape[-2:])

    def __str__(self) -> str:
        return "shifted (groups of 8)"


@dataclass(frozen=True, eq=False)
class Shifted(StoredWeight):
    """Bytes in groups of 8 inputs, each with a float16 scale and minimum; products are of float32."""

    block_scaled_rows = False

    values: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray

    @classmethod
    def of(cls, array: np.ndarray) -> Shifted:
        groups = np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, -array.shape[-1] % 8)], mode="edge")
        groups = groups.reshape(*array.shape[:-1], -1, 8)
        least = groups.min(-1).astype(np.float16)
        scale = ((groups.max(-1) - least) / 255).astype(np.float16)
        q = np.clip(np.rint((groups - least[..., None]) / np.maximum(scale, 1e-3)[..., None]), 0, 255)
        values = q.reshape(*array.shape[:-1], -1)[..., : array.shape[-1]].astype(np.uint8)
        return cls(values, scale, least)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.values, self.scales, self.minimums

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def storage(self) -> ShiftedStorage:
        return ShiftedStorage()

    def dense(self) -> np.ndarray:
        scale, least = (
            np.repeat(a.astype(np.float32), 8, -1)[..., : self.shape[-1]] for a in self.arrays[1:]
        )
        return scale * self.values.astype(np.float32) + least

    def product(self, x: np.ndarray) -> np.ndarray:
        return numerics.matmul(x, self.dense())

    def rows(self, ids: np.ndarray) -> np.ndarray:
        return self[ids].dense()

    def __getitem__(self, index: Any) -> Shifted:
        return Shifted(*(array[index] for array in self.arrays))

    def outputs(self, which: Which, axis: int = -2) -> Shifted:
        return Shifted(*(array[..., which, :] for array in self.arrays))

    def split(self, count: int) -> Shifted:
        return Shifted(*(array.reshape(count, -1, array.shape[-1]) for array in self.arrays))

    def transposed(self) -> Shifted:
        raise ValueError("groups of inputs cannot become outputs")

    @classmethod
    def stack(cls, parts: Sequence[Shifted]) -> Shifted:
        one = len(parts) == 1
        arrays = zip(*(part.arrays for part in parts), strict=True)
        return cls(*(np.ascontiguousarray(a[0]) if one else np.stack(a) for a in arrays))


@dataclass(frozen=True)
class Fact:
    shape: tuple[int, ...]
    nbytes: int
    storage: Any
    place: str = "one file"


class Held(Tensors):
    """Weights in memory."""

    where = "memory"

    def __init__(self, weights: Mapping[str, StoredWeight]) -> None:
        self.weights = weights
        self.opened = 0

    def __getitem__(self, name: str) -> Tensor:
        weight = self.weights[name]
        return Fact(weight.shape, weight.nbytes, weight.storage)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def pull(self, name: str) -> StoredWeight:
        return self.weights[name]

    def prefetch(self, name: str) -> None: ...

    def release(self, name: str) -> None: ...

    def identity(self) -> bytes:
        return b"held"

    def close(self) -> None: ...


@dataclass
class OneThing:
    """A model source that holds everything itself."""

    raw: dict[str, Any]
    weights: Held
    words: TokenizerData | None = None
    where: str = "one thing"
    has_weights: bool = True
    opened: int = 0

    def config(self) -> dict[str, Any]:
        return self.raw

    def generation_config(self) -> dict[str, Any]:
        return {"temperature": 0.25, "eos_token_id": 3}

    def tokenizer(self) -> TokenizerData | None:
        return self.words

    def sentence_settings(self) -> None:
        """It is not for embeddings."""

    def image_processor(self) -> dict[str, Any]:
        return {}

    def chat_templates(self) -> dict[str, str]:
        return {"default": "{{ messages[0].content }}"}

    def without_weights(self) -> str:
        return "none"

    def tensors(self) -> Tensors:
        self.opened += 1
        return self.weights


def one_thing(name: str, shifted: bool) -> OneThing:
    """A tiny model, matrices rounded to Shifted; or the same numbers as float32."""
    program, arrays = read_model(CONFIGS[name]).program, {}
    for spec_name, weight in random_weights(program).items():
        spec = program.weights()[spec_name]
        parts = list(weight.array) if len(spec.sources) > 1 else [weight.array]
        for source, part in zip(spec.sources, parts, strict=True):
            if part.ndim > 1:
                part = part.swapaxes(-1, -2) if spec.transposed else part
                rounded = Shifted.of(part)
                arrays[source] = rounded if shifted else Dense(rounded.dense())
            else:
                arrays[source] = Dense(part)
    return OneThing(CONFIGS[name], Held(arrays))


def generated(monkeypatch: pytest.MonkeyPatch, source: OneThing) -> tuple[Any, LLM]:
    monkeypatch.setattr(description, "open_model", lambda *names, **how: source)
    llm = LLM("anything", device="reference")
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, detokenize=False, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [3, 1, 4, 1, 5]}], params, use_tqdm=False)
    return [[(t, lp.logprob) for t, lp in step.items()] for step in output.outputs[0].logprobs or []], llm


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_kind_of_ones_own_computes_on_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices, embeddings and experts that are stacked of one tensor each."""
    source = one_thing(name, shifted=True)
    found, llm = generated(monkeypatch, source)
    assert source.opened == 1
    facts = as_dict(description.describe(EngineConfig(device="reference")))
    word = "shifted (groups of 8)"
    kept = sum(weight.nbytes for weight in source.weights.weights.values() if isinstance(weight, Shifted))
    assert facts["weight_bytes"][word] == kept
    vectors = [weight for weight in source.weights.weights.values() if isinstance(weight, Dense)]
    assert facts["memory"]["working_weight_bytes"] == kept + sum(4 * w.array.size for w in vectors)
    llm.close()
    expected, plain = generated(monkeypatch, one_thing(name, shifted=False))
    plain.close()
    assert found == expected


def test_what_cannot_be_done_with_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "open_model", lambda *names, **how: one_thing("llama", shifted=True))
    with pytest.raises(ConfigError, match=r"stored as shifted .* native backend has no kernel") as raised:
        description.describe(EngineConfig())
    assert "device='reference'" in (raised.value.hint or "")


def test_parts_of_it_are_parts_of_its_values() -> None:
    weight = Shifted.of(np.random.default_rng(0).standard_normal((3, 6, 20), np.float32))
    dense = weight.dense()
    assert weight.storage.nbytes(weight.shape) == weight.nbytes
    np.testing.assert_array_equal(weight.outputs(slice(1, None, 2)).dense(), dense[:, 1::2])
    np.testing.assert_array_equal(Shifted.stack([weight[0], weight[2]]).dense(), dense[[0, 2]])


def test_text_comes_from_the_source(tmp_path: Path) -> None:
    source = one_thing("llama", shifted=False)
    model = read_model({**CONFIGS["llama"], "vocab_size": 512})
    source.words = ModelFolder.at(small.byte_level(tmp_path)).tokenizer()
    frontend = Frontend(source, model, max_model_len=64, longest_context=64, seed=0)
    try:
        text = "the quick brown fox"
        encoded = frontend.encode_chat([{"role": "user", "content": text}])
        assert encoded.text == text
        assert frontend.need_tokenizer().decode(encoded.token_ids) == text
        assert frontend.default_params["temperature"] == 0.25
        assert 3 in frontend.eos_token_ids
    finally:
        frontend.close()


def test_every_quantization_of_the_configuration_is_a_scheme() -> None:
    assert tuple(SCHEMES) == QUANTIZATIONS
    assert all(name == scheme.storage.kind for name, scheme in SCHEMES.items())
