"""What is special in DeepSeek-V4: its layers by either spelling of config.json, rotations, listed experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tiny import CONFIGS, VOCAB, Paged, random_weights
from written_formats import write

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Program
from quire.program.ops import CompressedAttention, Experts, Rotary
from quire.program.rope import Rope
from quire.quantize.walk import TextRun, text_batch
from quire.recording.identity import checkpoint_digest, link_fingerprint
from quire.weights.formats.expected import expected_storage
from quire.weights.load import load
from quire.weights.plan import plan

_TABLE = "layers.0.ffn.gate.tid2eid"


def program(**changes: Any) -> Program:
    return read_model({**CONFIGS["deepseek_v4"], **changes}).program


def test_layers_compress_tokens_as_either_spelling_says() -> None:
    def layers(**changes: Any) -> list[tuple[int, int | None, bool]]:
        ops = [op for op in program(**changes) if isinstance(op, CompressedAttention)]
        assert all(op.window == 20 for op in ops)
        return [(op.every, op.most, op.entries is not None) for op in ops]

    assert layers() == [(0, None, False), (4, 5, True), (8, None, True)]
    unstated = {"layer_types": None, "compress_rates": None}
    assert layers(**unstated) == [(128, None, True)] * 3
    assert layers(**unstated, num_hidden_layers=4)[3] == (4, 5, True)
    assert layers(**unstated, compress_ratios=[4, 0, 128, 0]) == [
        (4, 5, True),
        (0, None, False),
        (128, None, True),
    ]
    assert [every for every, _, _ in layers(compress_rate_csa=2, compress_rate_hca=16)] == [0, 2, 16]


def test_rotations() -> None:
    """Layers with entries have a base and a scaling of their own, without a factor of cosine and sine."""

    def ropes(**changes: Any) -> list[Any]:
        rotated = (op for op in program(**changes) if isinstance(op, Rotary))
        return [(op.rope, op.first, op.inverse) for op in rotated]

    plain = Rope(4, 10_000.0, interleaved=True, original_max_position=256)
    scaled = Rope(4, 160_000.0, True, "yarn", 4.0, 64)
    after_4, after_8 = (replace(scaled, behind=number) for number in (3, 7))
    kinds = [(plain, 8, False), (plain, 8, False), (plain, 8, True)]
    kinds += [(scaled, 8, False), (scaled, 8, False), (after_4, 8, False), (scaled, 2, False)]
    kinds += [(after_4, 2, False), (scaled, 8, True)]
    kinds += [(scaled, 8, False), (scaled, 8, False), (after_8, 8, False), (scaled, 8, True)]
    assert ropes() == kinds
    nested = {"main": {"rope_theta": 7.0e3, "partial_rotary_factor": 0.5}, "compress": {"rope_theta": 90.0}}
    found = [rope for rope, _, _ in ropes(rope_scaling=None, rope_parameters=nested)]
    assert found[:3] == [Rope(6, 7000.0, interleaved=True, original_max_position=256)] * 3
    assert found[3] == Rope(4, 90.0, interleaved=True, original_max_position=256)


def test_experts_of_the_first_layers_are_listed() -> None:
    def listed(**changes: Any) -> str:
        ops = [op for op in program(**changes) if isinstance(op, Experts)]
        assert all((op.limit, op.shifted, op.routing.affinity) == (0.5, False, "sqrtsoftplus") for op in ops)
        assert all((op.routing.bias is None) == (op.routing.listed is not None) for op in ops)
        return "".join("l" if op.routing.listed else "c" for op in ops)

    assert listed() == "lcc"
    assert listed(num_hash_layers=None) == "lll"
    assert listed(num_hash_layers=0) == "ccc"
    assert listed(mlp_layer_types=["moe", "hash_moe", "moe"]) == "clc"


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"layer_types": ["sliding_attention"]},
        {"layer_types": None, "compress_ratios": [0, 4, 16]},
        {"layer_types": None, "compress_ratios": [0, 4]},
        {"compress_rates": [4, 8]},
        {"compress_rates": {"compressed_sparse_attention": 4}},
        {"compress_rate_csa": 0},
        {"mlp_layer_types": ["moe", "dense", "moe"]},
        {"mlp_layer_types": ["moe"]},
        {"num_hash_layers": -1},
        {"o_groups": 3},
        {"hc_mult": 65},
        {"hc_sinkhorn_iters": 0},
        {"index_head_dim": 2},
        {"qk_rope_head_dim": 3},
        {"partial_rotary_factor": 1.5},
        {"rope_scaling": None, "rope_parameters": {"main": {}, "compress": 1}},
        {"swiglu_limit": 0.0},
        {"num_key_value_heads": 2},
        {"scoring_func": "sigmoid"},
        {"tie_word_embeddings": True},
        {"model_type": "deepseek_ref"},
    ],
    ids=str,
)
def test_configs_that_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        program(**changes)


def fp8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A matrix as 8-bit floats, the e8m0 scales of its blocks of 128 x 128, and what these say."""
    rows, columns = (-(-size // 128) for size in matrix.shape)
    codes = np.random.default_rng(0).integers(118, 124, (rows, columns)).astype(np.uint8)
    scales = np.ldexp(np.float32(1), codes.astype(int) - 127).repeat(128, 0).repeat(128, 1)
    scales = scales[: matrix.shape[0], : matrix.shape[1]]
    values = (matrix / scales).astype(ml_dtypes.float8_e4m3fn)
    return values, codes.view(ml_dtypes.float8_e8m0fnu), values.astype(np.float32) * scales


def fp4(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same as 4-bit floats, two in a byte, with scales of 32 inputs."""
    rng, (rows, columns) = np.random.default_rng(0), matrix.shape
    codes = rng.integers(122, 126, (rows, columns // 32)).astype(np.uint8)
    packed = rng.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    wide = np.stack([values[packed & 15], values[packed >> 4]], axis=-1).reshape(matrix.shape)
    scales = np.ldexp(np.float32(1), codes.astype(int) - 127).repeat(32, 1)
    return packed.view(np.int8), codes.view(ml_dtypes.float8_e8m0fnu), wide * scales


def test_checkpoints_as_they_are_published(tmp_path: Path) -> None:
    """8-bit matrices, 4-bit experts, tables of integers, and a prediction layer that is left out."""
    config = {**CONFIGS["deepseek_v4"], "hidden_size": 64, "moe_intermediate_size": 32, "expert_dtype": "fp4"}
    recorded = read_model(config).program
    specs = recorded.weights()
    rng = np.random.default_rng(1)
    tensors: dict[str, np.ndarray] = {"mtp.0.e_proj.weight": np.zeros((4, 4), np.float32)}
    expected = {}
    for spec in specs.values():
        shape = spec.shape[1:] if len(spec.sources) > 1 else spec.stored or spec.shape
        if spec.by_head:
            shape = (spec.shape[0] * spec.shape[1], spec.shape[2])
        for source in spec.sources:
            if spec.below:
                tensors[source] = expected[source] = rng.integers(0, spec.below, shape)
                continue
            dense = rng.standard_normal(shape).astype(np.float32)
            if spec.quantizable and "compressor" not in source and source != "head.weight":
                pack = fp4 if ".experts." in source else fp8
                tensors[source], scales, dense = pack(dense)
                tensors[source.removesuffix("weight") + "scale"] = scales
            tensors.setdefault(source, dense)
            expected[source] = dense
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "fmt": "e4m3"}
    found = write(tmp_path, settings, tensors, **config)
    planned = plan(specs, found, ignored=recorded.ignored, left_out=recorded.left_out)
    assert "the prediction layer" in planned.left_out
    for name, weight in load(planned).items():
        whole = np.stack([expected[source] for source in specs[name].sources])
        np.testing.assert_array_equal(weight.dense().reshape(-1), whole.reshape(-1))
    llm = LLM(str(tmp_path), device="native")
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": [1, 2, 3] * 20}], params, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 8
    llm.close()


def test_tables_of_integers_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    """Of what identifies it, and of what `quire quantize` writes."""
    tensors = dict[str, np.ndarray]()
    weights = random_weights(program())
    for spec in program().weights().values():
        array = weights[spec.name].array.astype(np.int64 if spec.below else np.float32)
        array = array.reshape(spec.stored) if spec.stored else array
        array = array.reshape(-1, array.shape[-1]) if spec.by_head else array
        for number, source in enumerate(spec.sources):
            tensors[source] = array[number] if len(spec.sources) > 1 else array
    digests = []
    for name, change in (("one", 0), ("two", 1)):
        table = {_TABLE: (tensors[_TABLE] + change) % 4}
        (tmp_path / name).mkdir()
        write(tmp_path / name, None, {**tensors, **table}, **CONFIGS["deepseek_v4"])
        description = describe(EngineConfig(model=str(tmp_path / name), device="native"))
        digests.append((checkpoint_digest(description), link_fingerprint(description, "")))
    assert digests[0][0] == digests[1][0]  # of names and shapes
    assert digests[0][1] != digests[1][1]


def test_texts_that_are_walked_op_by_op_have_the_same_logits() -> None:
    """As `quire quantize` computes them, which holds few caches at once."""
    recorded, weights = program(), random_weights(program())
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 45))
    run = TextRun(recorded, text_batch(recorded, ids, 0))
    of_op = [{spec.name: weights[spec.name].array for spec in op.weights()} for op in recorded]
    for number in range(len(recorded.ops) - 1):
        run.compute(number, of_op[number])
    (logits,) = run.results(recorded.ops[-1], of_op[-1])
    paged = Paged(recorded, weights)
    whole = np.concatenate([paged.prefill(paged.sequence(row.tolist())) for row in ids])
    np.testing.assert_allclose(logits, whole, rtol=1e-5, atol=1e-5)


def test_config_alone_tells_the_kind_of_experts() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    listed = {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "ignore": ["*.attn.*", "head"]}
    of_nvidia = {"quant_method": "fp8", "fmt": "e4m3", **listed}
    for config, kind in (
        ({"quantization_config": fp8}, "fp8"),
        ({"quantization_config": fp8, "expert_dtype": "fp4"}, "mxfp4"),
        ({"quantization_config": {**fp8, "expert_dtype": "fp4"}}, "mxfp4"),
        ({"quantization_config": of_nvidia, "expert_dtype": "fp4"}, "nvfp4"),
    ):
        expect, specs = expected_storage(config, "bf16"), program().weights()
        found = {name: expect(specs[name]).kind for name in ("layers.1.attn.wq_a.weight", "head.weight")}
        assert found == {"layers.1.attn.wq_a.weight": "fp8", "head.weight": "bf16"}
        assert expect(specs["layers.1.ffn.experts.w1.weight"]).kind == kind
