"""`quire simulate`: laws from every source, the report, saturation and what it refuses."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from quire.bench import report
from quire.bench.driver import LoadRun
from quire.bench.metrics import Timeline
from quire.bench.workload import Lengths, poisson, random_requests
from quire.cli import simulate_law
from quire.cli.main import main
from quire.config import EngineConfig
from quire.engine.step_law import Stage, StepLaw
from quire.goals import Goal
from quire.program.features import LEADING, Feature
from quire.roofline.probe import Ceilings
from quire.simulation import model as model_module
from quire.simulation.clients import Delays
from quire.simulation.law_file import KnownLaw, read_law, write_law
from quire.simulation.prompts import BlockVocabulary
from quire.simulation.shares import RoofShares, at_shares
from quire.simulation.simulate import simulate

FEATURES = (*LEADING, Feature("positions"))
STAGE = Stage((0.010, 0.0, 0.0, 0.0, 1e-6), (0.0, 0.0, 1e-4, 0.0, 0.0), "products")
LAW = StepLaw(FEATURES, (STAGE,), (0.001, 0.0005, 0.0, 0.0, 0.0), (STAGE,), host_s=0.0002)
KNOWN = KnownLaw(LAW, Delays(0.004, 0.0001), "made up")
CEILINGS = Ceilings("a CPU", "avx2", 2, {"int8": 1e12, "bf16": 5e11, "f32": 2e11}, {2: {"memory": 3e10}}, 0.0)
SHORT = ("--random-input-len", "40", "--random-output-len", "8", "--random-range-ratio", "0.5")


@pytest.fixture
def law_file(tmp_path):
    write_law(tmp_path / "law.json", KNOWN)
    return str(tmp_path / "law.json")


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch, tmp_path):
    """No probe of the machine, and a cache of its own."""
    monkeypatch.setattr(model_module, "ceilings", lambda loops: CEILINGS)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))


def quire(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *argv])
    return int(ended.value.code or 0)


def test_a_law_of_a_file_gives_the_report_of_bench(law_file, tmp_path, capsys):
    out = tmp_path / "run.json"
    assert quire("demo", "--law", law_file, "--request-rate", "5", *SHORT, "--json", str(out)) == 0
    text = capsys.readouterr().out
    assert "law of steps: made up" in text
    assert "TTFT  time to first token" in text
    assert "of saturation" in text
    assert "if steps are" not in text
    figures = json.loads(out.read_text())
    assert figures["completed"] == 100
    assert figures["simulation"]["law"] == "made up"
    assert figures["simulation"]["utilisation"] < 0.9
    assert figures["simulation"]["sensitivity"] == []
    mean_tpot_ms = figures["mean_tpot_ms"]
    assert 10 < mean_tpot_ms < 30, "about a step of the law"


def test_near_saturation_it_says_how_sensitive_latencies_are(law_file, tmp_path, capsys):
    out = tmp_path / "run.json"
    flags = ("--max-num-seqs", "4", "--num-prompts", "200", "--request-rate")
    assert quire("demo", "--law", law_file, *SHORT, *flags, "40", "--json", str(out)) == 0
    simulation = json.loads(out.read_text())["simulation"]
    faster, slower = simulation["sensitivity"]
    assert simulation["utilisation"] > 0.9
    assert faster["ttft"] < 1 < slower["ttft"]
    assert slower["tpot"] == pytest.approx(1.02, abs=0.02)
    assert "if steps are 2% slower: TTFT +" in capsys.readouterr().out


def test_answers_of_one_token_have_no_time_per_token(law_file, tmp_path, capsys):
    flags = ("--max-num-seqs", "4", "--random-input-len", "40", "--random-output-len", "1")
    assert quire("demo", "--law", law_file, *flags, "--request-rate", "400") == 0
    text = capsys.readouterr().out
    assert "if steps are 2% slower: TTFT +" in text
    assert "TPOT" not in text[text.index("if steps are") :]


@pytest.mark.parametrize(("num_prompt_tokens", "status"), [(0, 1), (40, 0)])
def test_the_saturation_of_a_single_request_is_not_known(
    num_prompt_tokens, status, law_file, tmp_path, capsys
):
    trace = {"arrival_ms": 0, "prompt_len": num_prompt_tokens, "output_len": 1}
    (tmp_path / "trace.jsonl").write_text(json.dumps(trace))
    assert quire("demo", "--law", law_file, "--arrivals", str(tmp_path / "trace.jsonl")) == status
    text = capsys.readouterr().out
    assert "saturation is not known" in text
    assert "closed loop" not in text


def test_settings_of_the_engine_count(law_file, tmp_path):
    found = []
    for seqs in ("1", "16"):
        out = tmp_path / f"{seqs}.json"
        flags = ("--max-concurrency", "16", "--max-num-seqs", seqs, "--json", str(out))
        assert quire("demo", "--law", law_file, *SHORT, *flags) == 0
        found.append(json.loads(out.read_text())["duration"])
    assert found[0] > 4 * found[1]


def test_a_machine_of_the_catalogue(capsys):
    assert quire("demo", "--machine", "L40S", "--request-rate", "50", *SHORT) == 0
    text = capsys.readouterr().out
    assert "demo on L40S, simulated" in text
    assert "typical shares of the peaks of L40S, not measured" in text


def test_a_model_too_large_for_a_machine_is_refused(shared_data, capsys):
    model = shared_data / "configs" / "meta-llama--Meta-Llama-3.1-405B"
    assert quire(str(model), "--machine", "L40S", "--request-rate", "1") == 1
    assert "does not fit L40S" in capsys.readouterr().err


def test_a_law_is_fitted_to_a_run_of_bench(tmp_path, capsys):
    """The run is itself simulated, by shares that are not those where the fit begins."""
    setting = model_module.SimulatedModel.of(EngineConfig(model="demo", max_num_prefill_tokens=48), None)
    roof = simulate_law.known_law(setting, _write_roof(tmp_path, setting), None, calibrate=False).law
    law = at_shares(roof, RoofShares(0.5, 0.5, 0.004, 1e-4))
    drawn = random_requests(Lengths(40, 8, 0.5), BlockVocabulary(), 3)
    requests = list(islice(poisson(drawn, 40, 3), 60))
    done = simulate(setting.scheduler(law), law, requests, delays=Delays(0.002, 1e-4))
    run = LoadRun(0.0, done.end_s, 0.0, done.timelines)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(report.as_json(run, Goal(), {}, detailed=True)))
    saved = tmp_path / "law.json"
    assert quire("demo", "--fit", str(path), "--request-rate", "40", *SHORT, "--save-law", str(saved)) == 0
    assert "fitted to the first 30 requests of run.json" in capsys.readouterr().out
    found = read_law(saved)
    again = simulate(setting.scheduler(found.law), found.law, requests, delays=found.delays)
    for kind in ("ttft_s", "tpot_s"):
        means = [
            sum(getattr(one, kind) or 0.0 for one in timelines)
            for timelines in (again.timelines, done.timelines)
        ]
        assert means[0] == pytest.approx(means[1], rel=0.05)


def write_run(path, num_prompt_tokens: int, chunk_s: float) -> str:
    """A run of 20 requests of two tokens each, which come `chunk_s` one after the other."""
    times = [Timeline(float(sent_s), None, [sent_s + 0.5, sent_s + 0.5 + chunk_s]) for sent_s in range(20)]
    for one in times:
        one.end_s, one.num_prompt_tokens, one.num_output_tokens = one.chunk_s[-1], num_prompt_tokens, 2
    run = LoadRun(0.0, 20.0, 0.0, times)
    path.write_text(json.dumps(report.as_json(run, Goal(), {}, detailed=True)))
    return str(path)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "chunk_s", "message"),
    [
        (40, 0.0, "the tokens of each answer came at one moment"),
        (400, 0.1, "a request of 400 prompt tokens cannot be simulated"),
    ],
)
def test_a_run_that_says_too_little_is_not_fitted(num_prompt_tokens, chunk_s, message, tmp_path, capsys):
    path = write_run(tmp_path / "run.json", num_prompt_tokens, chunk_s)
    flags = ("--max-model-len", "100", "--request-rate", "40", *SHORT)
    assert quire("demo", "--fit", path, *flags) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--law", "--fit"])
def test_a_file_that_nests_too_deep_is_refused(flag, tmp_path, capsys):
    (tmp_path / "deep.json").write_text("[" * 200_000)
    assert quire("demo", flag, str(tmp_path / "deep.json")) == 1
    assert "RecursionError" in capsys.readouterr().err


def _write_roof(folder, setting):
    from quire.roofline.law import fold_costs, law_at_the_roof

    law = law_at_the_roof(fold_costs(setting.description), CEILINGS, {})
    write_law(folder / "roof.json", KnownLaw(law))
    return folder / "roof.json"


def test_this_machine_is_calibrated_once(monkeypatch, capsys):
    monkeypatch.setattr(simulate_law, "CALIBRATION_S", 0.0)
    monkeypatch.setattr(simulate_law, "BATCHES", (1, 3))
    assert quire("demo", "--request-rate", "20", *SHORT) == 0
    assert "calibrated on a CPU, without clients" in capsys.readouterr().out

    def fail(setting):
        raise AssertionError("calibrated again")

    monkeypatch.setattr(simulate_law, "_calibrated", fail)
    assert quire("demo", "--request-rate", "20", *SHORT) == 0
    with pytest.raises(AssertionError, match="calibrated again"):
        main(["simulate", "demo", "--calibrate", "--request-rate", "20", *SHORT])


def test_a_kept_law_that_is_damaged_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setattr(simulate_law, "_calibrated", lambda setting: LAW)
    assert quire("demo", "--request-rate", "20", *SHORT) == 0
    (kept,) = (tmp_path / "cache" / "laws").iterdir()
    whole = kept.read_text()
    kept.write_text(whole[:100])
    assert quire("demo", "--request-rate", "20", *SHORT) == 0
    assert kept.read_text() == whole


def test_a_law_is_kept_for_a_model_and_not_for_its_path(monkeypatch, demo_folder, tmp_path, capsys):
    monkeypatch.setattr(simulate_law, "_calibrated", lambda setting: calibrated.append(setting) or LAW)
    calibrated, config = [], json.loads((demo_folder / "config.json").read_text())
    for folder, layers in (("a", 2), ("b", 3), ("a", 2)):
        (tmp_path / folder / "model").mkdir(parents=True, exist_ok=True)
        content = json.dumps(config | {"num_hidden_layers": layers})
        (tmp_path / folder / "model" / "config.json").write_text(content)
        monkeypatch.chdir(tmp_path / folder)
        assert quire("./model", "--request-rate", "20", *SHORT) == 0, capsys.readouterr().err
    assert len(calibrated) == 2


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (("--law", "a", "--fit", "b"), 2, "--law and --fit exclude each other"),
        (("--machine", "L40S", "--calibrate"), 2, "--machine and --calibrate exclude each other"),
        (("--law", "nowhere.json"), 1, "nowhere.json: not a law of steps"),
        (("--fit", "nowhere.json"), 1, "nowhere.json: not a detailed run"),
        (("more",), 2, "unknown argument 'more'"),
    ],
)
def test_what_is_refused(flags, status, message, capsys):
    assert quire("demo", *flags) == status
    assert message in capsys.readouterr().err


def test_duration_alone_is_refused(law_file, capsys):
    assert quire("demo", "--law", law_file, "--duration", "3") == 1
    assert "--duration alone sends requests without end" in capsys.readouterr().err


def test_a_law_survives_its_file(law_file, tmp_path):
    assert read_law(tmp_path / "law.json") == KNOWN
    content = json.loads((tmp_path / "law.json").read_text())
    content["law"]["overhead"].pop()
    (tmp_path / "law.json").write_text(json.dumps(content))
    with pytest.raises(Exception, match="4 coefficients for 5 features"):
        read_law(tmp_path / "law.json")
