"""Loading: the right tensors in the right places, or one error and nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from written_formats import write

from quire.errors import ConfigError
from quire.program.program import Rows, WeightSpec
from quire.quantize.integers import Int4, Int8
from quire.quantize.kinds import Dense
from quire.quantize.round_to_nearest import quantize
from quire.weights import load as loading
from quire.weights.plan import check, plan
from quire.weights.safetensors import Checkpoint
from quire.weights.tensors import Tensors


def load(
    specs: Mapping[str, WeightSpec],
    source: Tensors,
    ignored: Iterable[str] = (),
    quantization: str | None = None,
    **how: Any,
) -> Any:
    """Plan and load, with nothing left over but what is `ignored`."""
    return loading.load(plan(specs, source, quantization, ignored), **how)


RNG = np.random.default_rng(0)


def checkpoint(folder: Path, arrays: Mapping[str, np.ndarray]) -> Checkpoint:
    save_file(dict(arrays), folder / "model.safetensors")
    return Checkpoint.open(folder)


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def spec(name: str, *shape: int, quantizable: bool = False, **how: Any) -> WeightSpec:
    sources = how.pop("sources", (name,))
    return WeightSpec(name, shape, sources, quantizable=quantizable, **how)


def by_name(*specs: WeightSpec) -> dict[str, WeightSpec]:
    return {s.name: s for s in specs}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dense_weights_keep_their_bits_and_are_not_copied(tmp_path: Path, dtype: Any) -> None:
    w, n = numbers(6, 4, dtype=dtype), numbers(4, dtype=dtype)
    loaded = load(by_name(spec("w", 6, 4), spec("n", 4)), checkpoint(tmp_path, {"w": w, "n": n}))
    assert list(loaded) == ["w", "n"]
    for name, array in (("w", w), ("n", n)):
        weight = loaded[name]
        assert isinstance(weight, Dense)
        assert weight.array.tobytes() == array.tobytes()
        assert weight.array.dtype == array.dtype
        assert not weight.array.flags.owndata
        assert not weight.array.flags.writeable


def test_sources_are_turned_taken_apart_and_stacked(tmp_path: Path) -> None:
    arrays = {
        "conv": numbers(4, 6),  # [in, out]
        "plain": numbers(6, 4),
        "e.0": numbers(5, 4),
        "e.1": numbers(5, 4),
        "turned.0": numbers(4, 5),
        "turned.1": numbers(4, 5),
        "packed": numbers(3, 4, 10),  # [experts, in, gate and up in turns]
        "packed_bias": numbers(3, 10),
        "both": numbers(10, 4),
        "both_bias": numbers(10),
    }
    specs = by_name(
        spec("conv", 6, 4, transposed=True),
        spec("experts", 2, 5, 4, sources=("e.0", "e.1")),
        spec("experts_turned", 2, 5, 4, sources=("turned.0", "turned.1"), transposed=True),
        spec("gate", 3, 5, 4, sources=("packed",), transposed=True, rows=Rows(2, ((0, 1),))),
        spec("up", 3, 5, 4, sources=("packed",), transposed=True, rows=Rows(2, ((1, 1),))),
        spec("plain", 6, 4, sources=("plain",), transposed="either"),
        spec("swapped", 6, 4, sources=("conv",), transposed="either"),
        spec("up_bias", 3, 5, sources=("packed_bias",), rows=Rows(2, ((1, 1),))),
        spec("second", 5, 4, sources=("both",), rows=Rows(2, ((1, 1),))),
        spec("second_bias", 5, sources=("both_bias",), rows=Rows(2, ((1, 1),))),
        spec("half", 5, 4, sources=("both",), rows=Rows(10, ((5, 5),))),
        spec("regrouped", 6, 4, sources=("both",), rows=Rows(5, ((3, 2), (0, 1)))),
        spec("of_values", 2, 3, 4, sources=("both",), rows=Rows(5, ((2, 3),)), by_head="outputs"),
        spec("of_keys", 2, 4, 2, sources=("both",), rows=Rows(5, ((0, 2),)), by_head="inputs"),
        spec("one_head", 1, 4, 10, sources=("both",), by_head="inputs"),
        spec("in_turns", 10, 4, sources=("both",), turns=2),
    )
    loaded = load(specs, checkpoint(tmp_path, arrays))
    expected = {
        "conv": arrays["conv"].T,
        "plain": arrays["plain"],
        "swapped": arrays["conv"].T,
        "experts": np.stack([arrays["e.0"], arrays["e.1"]]),
        "experts_turned": np.stack([arrays["turned.0"].T, arrays["turned.1"].T]),
        "gate": arrays["packed"].swapaxes(1, 2)[:, 0::2],
        "up": arrays["packed"].swapaxes(1, 2)[:, 1::2],
        "up_bias": arrays["packed_bias"][:, 1::2],
        "second": arrays["both"][1::2],
        "second_bias": arrays["both_bias"][1::2],
        "half": arrays["both"][5:],
        "regrouped": arrays["both"][[3, 4, 8, 9, 0, 5]],
        "of_values": arrays["both"].reshape(2, 5, 4)[:, 2:],
        "of_keys": arrays["both"].reshape(2, 5, 4)[:, :2].swapaxes(1, 2),
        "one_head": arrays["both"].T[None],
        "in_turns": arrays["both"][:, [0, 2, 1, 3]],
    }
    assert set(loaded) == set(expected)
    for name, array in expected.items():
        weight = loaded[name]
        assert isinstance(weight, Dense)
        assert weight.shape == specs[name].shape
        assert weight.array.flags.c_contiguous
        np.testing.assert_array_equal(weight.dense(), array)


def test_experts_stored_in_different_formats_meet_in_float32(tmp_path: Path) -> None:
    arrays = {"e.0": numbers(4, 4, dtype=ml_dtypes.bfloat16), "e.1": numbers(4, 4, dtype=np.float16)}
    specs = by_name(spec("experts", 2, 4, 4, sources=("e.0", "e.1")))
    source = checkpoint(tmp_path, arrays)
    loaded = load(specs, source)["experts"]
    assert isinstance(loaded, Dense)
    assert loaded.storage == plan(specs, source).storage["experts"]
    np.testing.assert_array_equal(loaded.dense(), np.stack([a.astype(np.float32) for a in arrays.values()]))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integers_are_read_where_a_weight_has_them(tmp_path: Path, dtype: Any) -> None:
    table = by_name(spec("t", 6, stored=(2, 3), below=5))
    stored = np.array([[4, 0, 1], [2, 2, 3]], dtype)
    loaded = load(table, checkpoint(tmp_path, {"t": stored}))["t"]
    assert loaded.dense().tolist() == [4, 0, 1, 2, 2, 3]
    for wrong in (stored + 1, -stored):
        with pytest.raises(ConfigError, match="tensor t has numbers that are not from 0 to 4"):
            load(table, checkpoint(tmp_path, {"t": wrong}))
    with pytest.raises(ConfigError, match="stored as F32, not as one of I32, I64"):
        load(table, checkpoint(tmp_path, {"t": stored.astype(np.float32)}))
    with pytest.raises(ConfigError, match="which is not supported"):
        load(by_name(spec("t", 2, 3)), checkpoint(tmp_path, {"t": stored}))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_only_quantizable_weights_are_quantized(tmp_path: Path, scheme: str) -> None:
    arrays = {
        "w": numbers(8, 172),
        "t": numbers(64, 8),
        "e.0": numbers(8, 64),
        "e.1": numbers(8, 64),
        "n": numbers(64),
    }
    specs = by_name(
        spec("w", 8, 172, quantizable=True),
        spec("t", 8, 64, quantizable=True, transposed=True),
        spec("e", 2, 8, 64, quantizable=True, sources=("e.0", "e.1")),
        spec("n", 64),
    )
    source = checkpoint(tmp_path, arrays)
    planned = plan(specs, source, scheme).storage
    loaded = load(specs, source, quantization=scheme, num_threads=1)
    threaded = load(specs, source, quantization=scheme, num_threads=4)
    canonical = {"w": arrays["w"], "t": arrays["t"].T, "e": np.stack([arrays["e.0"], arrays["e.1"]])}
    for name, weight in loaded.items():
        assert weight.storage == planned[name]
        assert weight.nbytes == planned[name].nbytes(specs[name].shape)
        assert weight.dense().tobytes() == threaded[name].dense().tobytes()
        if name == "n":
            assert isinstance(weight, Dense)
        else:
            assert isinstance(weight, Int8 if scheme == "int8" else Int4)
            direct = quantize(specs[name], canonical[name], scheme)
            np.testing.assert_array_equal(weight.dense(), direct.dense())


def test_progress_counts_the_bytes_of_the_checkpoint(tmp_path: Path) -> None:
    arrays = {"a": numbers(4, 4), "b": numbers(8), "unused": numbers(99)}
    seen: list[tuple[int, int]] = []
    source = checkpoint(tmp_path, arrays)
    load(by_name(spec("a", 4, 4), spec("b", 8)), source, ["unused"], progress=lambda *at: seen.append(at))
    assert seen == [(64, 96), (96, 96)]


def test_every_fault_is_listed_in_one_error_before_any_data_is_read(tmp_path: Path) -> None:
    arrays = {"a": numbers(4, 4), "b": numbers(8), "extra": numbers(1), "rotary.inv_freq": numbers(1)}
    specs = by_name(spec("a", 4, 5), spec("b", 8), spec("c", 2), spec("d", 2, 2, sources=("d.0", "d.1")))
    source = checkpoint(tmp_path, arrays)
    source.read = lambda name: pytest.fail("data was read")  # type: ignore[method-assign]
    with pytest.raises(ConfigError) as caught:
        load(specs, source, ["*.inv_freq"])
    assert caught.value.message == (
        f"{tmp_path}: the checkpoint does not fit the model: "
        "3 tensors missing (c, d.0, d.1); "
        "1 tensor not part of this model (extra); "
        "1 tensor of another shape than config.json says (a [4, 4] in model.safetensors, expected [4, 5])"
    )
    assert caught.value.hint


def test_long_lists_are_cut(tmp_path: Path) -> None:
    specs = by_name(*(spec(f"w{i:02}", 1) for i in range(25)))
    with pytest.raises(ConfigError, match=r"25 tensors missing \(w00, .*, w09, and 15 more\)"):
        check(specs, checkpoint(tmp_path, {}))


@pytest.mark.parametrize(
    ("stored", "how"),
    [
        ((4, 6), {}),
        ((6, 4), {"transposed": True}),
        ((6, 4, 1), {}),
        ((24,), {}),
        ((6, 4), {"rows": Rows(2, ((0, 1),))}),
        ((11, 4), {"rows": Rows(2, ((0, 1),))}),
        ((12, 4), {"transposed": True, "rows": Rows(2, ((0, 1),))}),
    ],
)
def test_shapes_are_taken_literally(tmp_path: Path, stored: tuple[int, ...], how: dict[str, Any]) -> None:
    source = checkpoint(tmp_path, {"w": numbers(*stored)})
    with pytest.raises(ConfigError, match="1 tensor of another shape"):
        load(by_name(spec("w", 6, 4, **how)), source)


def test_unread_number_formats_name_the_tensor(tmp_path: Path) -> None:
    arrays = {"w": np.zeros((4, 4), np.int8), "bias_mask": np.zeros(3, np.uint8), "n": numbers(4)}
    source = checkpoint(tmp_path, arrays)
    specs = by_name(spec("n", 4), spec("w", 4, 4, quantizable=True))
    assert list(load(by_name(spec("n", 4)), source, ["bias_mask", "w"])) == ["n"]
    source.read = lambda name: pytest.fail("data was read")  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor 'w' is stored as I8"):
        load(specs, source, ["bias_mask"], quantization="int8")


@pytest.mark.parametrize(
    ("wanted", "stored", "hint"),
    [
        ("model.norm.weight", "transformer.model.norm.weight", "with the prefix 'transformer.'"),
        ("lm_head.weight", None, "tie_word_embeddings"),
        ("w", None, "incomplete"),
        ("w", "v", "different models"),
    ],
)
def test_hints(tmp_path: Path, wanted: str, stored: str | None, hint: str) -> None:
    source = checkpoint(tmp_path, {stored: numbers(2)} if stored else {})
    with pytest.raises(ConfigError) as caught:
        load(by_name(spec(wanted, 2)), source)
    assert hint in str(caught.value.hint)


def test_gpt2_as_it_was_published(tmp_path: Path) -> None:
    """Without the prefix of the whole model, and with the masks that GPT-2 keeps."""
    arrays = {"wte.weight": numbers(3, 2), "h.0.attn.bias": numbers(1, 1, 4, 4)}
    source = checkpoint(tmp_path, arrays)
    specs = by_name(spec("transformer.wte.weight", 3, 2))
    assert str(plan(specs, source, ignored=["*.attn.bias"]).storage["transformer.wte.weight"]) == "f32"
    loaded = load(specs, source, ["*.attn.bias"])["transformer.wte.weight"]
    np.testing.assert_array_equal(loaded.dense(), arrays["wte.weight"])
    with pytest.raises(ConfigError, match=r"1 tensor missing .*transformer\.ln_f\.weight"):
        load(by_name(spec("transformer.wte.weight", 3, 2), spec("transformer.ln_f.weight", 2)), source)


def test_planning_raises_what_loading_would(tmp_path: Path) -> None:
    arrays = {"a": numbers(2), "b": numbers(2), "norm.weight": numbers(2), "i": np.zeros(2, np.int8)}
    source = checkpoint(tmp_path, arrays)
    assert str(plan(by_name(spec("a", 2)), source).storage["a"]) == "f32"
    with pytest.raises(ConfigError, match=r"1 tensor missing \(model\.norm\.weight\)") as caught:
        plan(by_name(spec("a", 2), spec("b", 2), spec("model.norm.weight", 2)), source)
    assert "without the prefix" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="of another shape"):
        plan(by_name(spec("a", 3)), source)
    with pytest.raises(ConfigError, match="stored as I8"):
        plan(by_name(spec("i", 2)), source)
    with pytest.raises(ConfigError, match="3 tensors not part of this model"):
        plan(by_name(spec("a", 2)), source, ignored=())


def test_patterns_of_ignored_tensors(tmp_path: Path) -> None:
    source = checkpoint(
        tmp_path, {"a": numbers(1), "lm_head.weight": numbers(1), "h.0.attn.bias": numbers(1)}
    )
    check(by_name(spec("a", 1)), source, ("lm_head.weight", "h.*.attn.bias"))
    with pytest.raises(ConfigError, match=r"not part of this model \(lm_head"):
        check(by_name(spec("a", 1)), source, ("LM_HEAD.weight", "h.*.attn.bias"))


def test_a_weight_that_cannot_be_quantized_leaves_nothing(tmp_path: Path) -> None:
    bad = numbers(4, 64)
    bad[3, 7] = np.nan
    specs = by_name(spec("good", 4, 64, quantizable=True), spec("bad", 4, 64, quantizable=True))
    with pytest.raises(ConfigError, match="tensor 'bad' cannot be quantized"):
        load(specs, checkpoint(tmp_path, {"good": numbers(4, 64), "bad": bad}), quantization="int4")


def test_published_checkpoints(shared_data: Path) -> None:
    """A single file in float32 and two shards in bfloat16, loaded whole and in fewer bits."""
    models = shared_data / "models"
    for folder in (models / "stories260K", models / "tiny-random" / "llama-bf16-sharded"):
        source = Checkpoint.open(folder)
        specs = by_name(*(spec(n, *e.shape, quantizable=len(e.shape) == 2) for n, e in source.items()))
        exact = load(specs, source)
        for scheme, bound in (("int8", 0.01), ("int4", 0.16)):
            for name, weight in load(specs, source, quantization=scheme).items():
                wide = exact[name].dense()
                assert np.linalg.norm(weight.dense() - wide) <= bound * np.linalg.norm(wide)


def test_quantized_sources_are_not_turned(tmp_path: Path) -> None:
    """Checkpoints of floats have [experts, in, gate and up in turns], as the spec says; others never."""
    blocks = RNG.integers(0, 255, (3, 10, 1, 16)).astype(np.uint8)
    scales = np.full((3, 10, 1), 127, np.uint8)
    found = write(tmp_path, {"quant_method": "mxfp4"}, {"packed_blocks": blocks, "packed_scales": scales})
    whole, turned = found.pull("packed").dense(), {"transposed": True, "rows": Rows(2, ((1, 1),))}
    loaded = load(by_name(spec("up", 3, 5, 32, sources=("packed",), **turned)), found)
    np.testing.assert_array_equal(loaded["up"].dense(), whole[:, 1::2])
    with pytest.raises(ConfigError, match=r"expected \[3, 64, 5\]"):
        load(by_name(spec("up", 3, 32, 5, sources=("packed",), **turned)), found)
