"""Quantized checkpoints that the formats' own tools wrote: each matrix to the bit, and the logits."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from quantized_files import FOLDERS, error_of, golden_of
from safetensors.numpy import load_file, save_file
from tiny import Paged

from quire import LLM
from quire.cli.main import main
from quire.config import EngineConfig
from quire.description import Description, describe
from quire.errors import ConfigError
from quire.quantize.coded import Coded
from quire.quantize.kinds import Dense
from quire.weights.kinds_report import in_a_line
from quire.weights.load import load

# Of the largest logit, where activations meet integers and are rounded too. The model has some inputs that
# are far larger than others, which costs more than in trained models.
ROUNDED = 0.25


def described(folder: Path, quantization: str | None = None) -> Description:
    return describe(
        EngineConfig.from_keywords(model=str(folder), device="reference", quantization=quantization)
    )


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, "<f4").tobytes()).hexdigest()


@pytest.mark.parametrize("name", FOLDERS)
def test_each_matrix_is_what_the_tool_of_its_format_makes_of_it(name: str, shared_data: Path) -> None:
    folder = shared_data / "quantized" / name
    facts, golden = described(folder), golden_of(folder)
    tensors = facts.weights.need_tensors()
    coded = 0
    for tensor, sha256 in golden["sha256"].items():
        weight = tensors.pull(tensor)
        coded += isinstance(weight, Coded)
        turned = len(weight.shape) == 3  # gpt-oss: hashes of [experts, in, out]
        assert digest(weight.dense().swapaxes(1, 2) if turned else weight.dense()) == sha256, tensor
        assert weight.storage == tensors[tensor].storage
        assert weight.shape == tensors[tensor].shape
        assert weight.nbytes == weight.storage.nbytes(weight.shape)
    assert coded == sum(not tensor.storage.is_float for tensor in tensors.values()) >= 4
    weights = load(facts.weights)
    plain = {n: Dense(weight.dense()) for n, weight in weights.items()}
    assert error_of(facts.model, Paged(facts.program, plain, num_blocks=300), golden) < 1e-5
    assert error_of(facts.model, Paged(facts.program, weights, num_blocks=300), golden) < ROUNDED


def test_every_folder_is_tested(shared_data: Path) -> None:
    folder = shared_data / "quantized"
    assert {str(found.parent.relative_to(folder)) for found in folder.glob("*/*/config.json")} == set(FOLDERS)


def test_biases_of_zeros_for_every_matrix_are_passed_over(shared_data: Path, tmp_path: Path) -> None:
    """AutoGPTQ wrote them, whatever the model has."""
    folder = tmp_path / "gptq"
    shutil.copytree(shared_data / "quantized" / "gptq-awq" / "gptq-4bit-g128", folder)
    tensors = load_file(folder / "model.safetensors")
    matrices = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    biases = {f"{name}.bias": np.zeros(tensors[f"{name}.scales"].shape[1], np.float16) for name in matrices}
    save_file(tensors | biases, folder / "model.safetensors")
    assert described(folder).weights.summary.startswith("GPTQ, 4 bits, groups of 128")
    biases[f"{matrices[0]}.bias"][1] = 1
    save_file(tensors | biases, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"1 tensor not part of this model \\({matrices[0]}.bias\\)"):
        described(folder)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *words, "--device", "reference"])
    assert not ended.value.code
    return capsys.readouterr().out


def test_inspect_tells_kinds_and_what_is_rounded_twice(
    shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gptq, fp8 = (str(shared_data / "quantized" / name) for name in (FOLDERS[12], FOLDERS[9]))
    text = shown(capsys, gptq)
    assert "GPTQ, 4 bits" in text
    assert "gptq (4 bits, groups of 128, f16 scales): mlp.down_proj\n" in text
    assert "activations rounded to int8 by 128 inputs" in text
    assert "7.79 bits a weight\n" in text
    assert "twice" not in text
    text = shown(capsys, gptq, "--quantization", "int8")
    assert "int8, rounded twice" in text
    assert "hint: these weights are rounded already" in text
    facts = json.loads(shown(capsys, gptq, "--quantization", "int8", "--json"))
    assert sum(kind["rounded_twice"] for kind in facts["weight_kinds"]) == 2
    text = shown(capsys, fp8, "--quantization", "int8")
    assert "int8, rounded from 8-bit floats" in text
    assert "static scales of activations are not used" in text
    assert "twice" not in text


def test_a_model_says_in_a_line_what_it_holds_and_how_it_is_computed(shared_data: Path) -> None:
    folder = shared_data / "quantized" / "compressed-tensors" / "w8a8"
    line = "compressed-tensors, 8 bits, a scale for each output: activations rounded to int8 by row"
    assert in_a_line(described(folder).weights) == line
    assert in_a_line(described(folder, "int4").weights).endswith(": int4, rounded twice")
    chosen = LLM(str(folder), device="reference").chosen
    assert (chosen["weights"], chosen["checkpoint"]) == ("as stored", line)
    weights = load(described(folder, "int4").weights)
    assert {weight.storage.kind for weight in weights.values()} == {"bf16", "int4"}


@pytest.mark.parametrize("name", FOLDERS)
def test_config_alone_tells_which_weights_are_quantized(name: str, shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "quantized" / name
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    config = EngineConfig.from_keywords(model=str(tmp_path), device="reference")
    expected, found = describe(config, weights=False).weights, described(folder).weights
    for spec in found.specs.values():
        stored, guess = found.stored[spec.name], expected.stored[spec.name]
        assert stored.is_float == guess.is_float, spec.name
        assert getattr(stored, "bits", 16) == getattr(guess, "bits", 16)
        if not stored.is_float:
            assert guess.nbytes(spec.shape) == pytest.approx(stored.nbytes(spec.shape), rel=0.35)
