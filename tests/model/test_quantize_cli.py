"""`quire quantize`: from a checkpoint to a folder that runs, and every error leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import CONFIGS
from tokenizers import Tokenizer, models, pre_tokenizers

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.cli.quantize_choice import mixed
from quire.cli.quantize_model import Original, grid_of, matrices, parts_of, width_of
from quire.cli.quantize_run import Rounding
from quire.models import read_model
from quire.quantize.grid import nearest
from quire.quantize.walk import tables
from quire.weights.folder import ModelFolder
from quire.weights.hub import open_model

FEW = ("--calibration-tokens", "256", "--num-threads", "1")


def quantize(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["quantize", *words])
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def short_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.quantize.MOST_LOGITS", 2048 * 300)


def report_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_model_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result loses less than rounding to nearest, has every file, and answers."""
    out = tmp_path / "made" / "small"
    assert (
        quantize("demo-draft", "-o", str(out), "--embedding", "--json", "--calibration-tokens", "1024") == 0
    )
    report = report_of(capsys)
    assert report["bits_per_quantized_weight"] == 4.5
    assert report["file_bytes"] < 4.6 / 8 * report["parameters"] + 3000
    quality = report["quality"]
    assert 0.001 < quality["written"]["mean"] < 0.8 * quality["nearest"]["mean"]
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert [path.name for path in out.parent.iterdir()] == ["small"]
    llm = LLM(str(out), device="reference")
    answer = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert len(answer[0].outputs[0].token_ids) == 5
    assert quantize(str(out), "-o", str(tmp_path / "twice"), *FEW) == 1
    assert "quantized already" in capsys.readouterr().err
    assert quantize("demo-draft", "-o", str(out)) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "layer"), [("qwen3_5", "mtp."), ("glm4_moe", "model.layers.3.")])
def test_a_prediction_layer_is_kept_and_drafts(
    name: str, layer: str, shared_data: Path, tmp_path: Path
) -> None:
    """Its weights are those of the original, which the configuration says, and the bits those without it."""
    folder, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(shared_data / "models" / "tiny-random-2" / name, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert quantize(str(folder), "-o", str(out), *FEW) == 0
    before, after = (ModelFolder.at(one).tensors() for one in (folder, out))
    own = [key for key in before if key.startswith(layer)]
    assert all(np.array_equal(before.pull(key).floats(), after.pull(key).floats()) for key in own)
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    matrices = {key.removesuffix(".weight") for key in own if len(before[key].shape) == 2}
    assert matrices
    assert {key for key in ignored if key.startswith(layer)} == matrices
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, detokenize=False)
    found = []
    for speculative in ("off", "mtp"):
        with LLM(str(out), speculative=speculative, num_threads=1, packed_cache=False) as llm:
            (answer,) = llm.generate([{"prompt_token_ids": [*range(20)]}], params, use_tqdm=False)
        found.append(answer.outputs[0].token_ids)
    assert answer.metrics.num_drafted > 0
    assert found[0] == found[1]


def test_a_composite_keeps_its_names_and_its_towers(tmp_path: Path) -> None:
    demo, folder = open_model("demo-draft"), tmp_path / "composite"
    shutil.copytree(demo.path, folder)
    arrays = {f"language_model.{name}": demo.tensors().pull(name).floats() for name in demo.tensors()}
    save_file(arrays | {"vision_tower.w": np.ones((2, 2), np.float32)}, folder / "model.safetensors")
    text = {**demo.config(), "model_type": "mistral", "sliding_window": None}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {}}
    (folder / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    out = tmp_path / "made"
    assert quantize(str(folder), "-o", str(out), *FEW) == 0
    names = load_file(out / "model.safetensors")
    assert "language_model.model.layers.0.mlp.down_proj.weight_packed" in names
    assert "language_model.model.embed_tokens.weight" in names
    assert names["vision_tower.w"].sum() == 4
    llm = LLM(str(out), device="reference")
    answer = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert len(answer[0].outputs[0].token_ids) == 5


def test_a_model_for_embeddings_stays_one(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "made"
    shutil.copytree(open_model("demo-draft").path, folder)
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    listed = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in modules.items()]
    files = {
        "modules.json": listed,
        "config_sentence_transformers.json": {"prompts": {"query": "find: "}},
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True},
        "2_Dense/config.json": {"in_features": width, "out_features": 5, "bias": False},
        "processor_config.json": {"image_processor": {}},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    weight = np.linspace(-1, 1, 5 * width, dtype=np.float32).reshape(5, width)
    save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
    assert quantize(str(folder), "-o", str(out), *FEW) == 0
    assert {name: json.loads((out / name).read_text()) for name in files} == files
    with LLM(str(out), device="reference") as llm:
        (found,) = llm.embed("a cat", use_tqdm=False, prompt_name="query")
    assert len(found.outputs.embedding) == 5


def test_mixed_precision_keeps_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mixed"
    assert quantize("demo-draft", "-o", str(out), "--bits", "5.5", *FEW) == 0
    shown = capsys.readouterr().out
    assert "as written" in shown
    assert "--embedding quantizes it" in shown
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert {group["weights"]["num_bits"] for group in groups} == {4, 8}
    scheme = {module: name for name, group in enumerate(groups) for module in group["targets"]}
    layer = "model.layers.0"
    assert len({scheme[f"{layer}.self_attn.{name}_proj"] for name in "qkv"}) == 1
    assert len({scheme[f"{layer}.mlp.{name}_proj"] for name in ("gate", "up")}) == 1
    tensors = ModelFolder.at(out).tensors()
    packed = [tensors[name] for name in tensors if not tensors[name].storage.is_float]
    assert len(packed) == 7
    weights = sum(int(np.prod(tensor.shape)) for tensor in packed)
    assert 5.2 < 8 * sum(t.storage.nbytes(t.shape) for t in packed) / weights <= 5.5


class Case(NamedTuple):
    words: tuple[str, ...]
    status: int
    message: str


@pytest.mark.parametrize(
    "case",
    [
        Case(("demo",), 2, "folder to write"),
        Case((), 2, "MODEL is missing"),
        Case(("demo", "-o", "OUT", "--bits", "3"), 2, "--bits 3"),
        Case(("demo", "-o", "OUT", "--bits", "4.5", "--group-size", "64"), 2, "--group-size needs"),
        Case(("demo-draft", "-o", "OUT", "--bits", "4.05"), 1, "at least 4."),
        Case(("demo", "-o", "OUT", "--calibration-tokens", "1"), 2, "at least 32"),
        Case(("demo", "-o", "OUT", "--calibration", "missing.txt"), 1, "no such file"),
        Case(("demo", "-o", "OUT", "--calibration", "short.txt"), 1, "too few"),
        Case(("demo", "-o", "OUT", "--calibration", "binary.txt"), 1, "not UTF-8"),
        Case(("demo", "-o", "file.txt/OUT"), 1, "cannot be created"),
    ],
    ids=str,
)
def test_errors(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one message; nothing is left where the folder would have been."""
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("Hello.")
    Path("binary.txt").write_bytes(b"\xff\xfe" * 500)
    Path("file.txt").write_text("")
    before = {path.name for path in tmp_path.iterdir()}
    assert quantize(*case.words) == case.status
    assert case.message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_full_disk_and_an_interruption_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, demo_folder: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    with monkeypatch.context() as patched:
        patched.setattr("quire.cli.quantize_output.shutil.disk_usage", lambda path: usage)
        assert quantize("demo-draft", "-o", str(tmp_path / "out"), *FEW) == 1
    error = capsys.readouterr().err
    assert "not enough space" in error
    assert "MB are needed and 1.05 MB are free" in error

    before = signal.getsignal(signal.SIGTERM)
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):

        def interrupted(*told: Any, number: int = number) -> None:
            assert len(list(tmp_path.iterdir())) == 1
            signal.raise_signal(number)
            raise AssertionError("it went on")

        with monkeypatch.context() as patched:
            patched.setattr(Rounding, "run", interrupted)
            assert quantize("demo-draft", "-o", str(tmp_path / "out"), *FEW) == status
        assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    original = opened(tmp_path, "llama")
    specs = matrices(original, embedding=True)
    name = next(iter(specs))
    grids = {n: grid_of(original, spec, 4, 32) for n, spec in specs.items()}

    class Damaged(Original):
        def weights(self, op: Any) -> Any:
            found = super().weights(op)
            return {n: np.full_like(w, np.nan) if n == name else w for n, w in found.items()}

    damaged = Damaged(original.source, original.model, original.tensors)
    with pytest.raises(Exception, match="not finite"):
        Rounding(damaged, grids, lambda *told: None).run(ids(2, 32), lambda *told: None)


def opened(tmp_path: Path, name: str) -> Original:
    """Return a tiny model of a family, with random weights in a folder of its own."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    rng, tensors = np.random.default_rng(0), {}
    for spec in read_model(CONFIGS[name]).program.weights().values():
        shape = spec.shape[1:] if len(spec.sources) > 1 else spec.shape
        if spec.rows is not None and len(shape) < 4 and spec.sources[0].endswith("_proj.weight"):
            own = spec.size // width_of(spec)
            shape = (own // spec.rows.taken * spec.rows.period, width_of(spec))
        if spec.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        for source in spec.sources:
            tensors[source] = rng.standard_normal(shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return Original.opened(ModelFolder.at(folder))


def ids(texts: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 32, (texts, length))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3", "deepseek_v3"])
def test_every_matrix_of_a_family_is_rounded_once(tmp_path: Path, name: str) -> None:
    """Experts too, each with the inputs that it gets; all in one order, so that a file could be a stream."""
    original = opened(tmp_path, name)
    specs = matrices(original, embedding=True)
    grids = {n: grid_of(original, spec, 4, 32) for n, spec in specs.items()}
    found = {}

    def write(source: str, rounded: Any) -> None:
        assert source not in found
        found[source] = rounded

    Rounding(original, grids, write).run(ids(4, 32), lambda *told: None)
    assert found.keys() == {source for spec in specs.values() for source in spec.sources}
    for source, rounded in found.items():
        weight = original.tensors.pull(source).dense()
        error = np.abs(rounded.dense() - weight).mean()
        plain = np.abs(nearest(weight, rounded.grid).dense() - weight).mean()
        assert error < 2 * plain, source
    grids = mixed(original, specs, 6.0, ids(2, 16), lambda *told: None)
    tied = tables(original.program)
    assert {grid.bits for name, grid in grids.items() if name not in tied} == {4, 8}
    assert {grids[name].bits for name in tied} <= {6}  # of 4, 5, 6 and 8
    assert sum(len(part) for part in parts_of(original.program, specs)) == len(specs)


@pytest.mark.parametrize("threads", ["0", "100000"])
def test_more_threads_than_processors_are_refused(
    threads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize("demo-draft", "-o", str(tmp_path / "out"), "--num-threads", threads) == 2
    assert f"--num-threads: give 1 to {len(os.sched_getaffinity(0))}" in capsys.readouterr().err


def test_a_model_stored_transposed_is_refused(tmp_path: Path) -> None:
    original = opened(tmp_path, "gpt2")
    with pytest.raises(Exception, match="none of its matrices"):
        matrices(original, embedding=False)
