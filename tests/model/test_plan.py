"""Plans: times by hand, what fits, the turning batch, and knobs that do what they say; the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.cache_plan import CacheGroup, Sizing
from quire.cli.main import main
from quire.config import EngineConfig
from quire.goals import Goal
from quire.roofline import planning
from quire.roofline.knobs import knobs
from quire.roofline.machines import catalogue, find
from quire.roofline.plan import Fit, MachinePlan
from quire.roofline.planning import make_plan, with_options
from quire.roofline.probe import Ceilings
from quire.roofline.serving import Workload, serving
from quire.roofline.shares import SPREAD, TYPICAL, Span

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
READ_8B = 8_030_261_248 - 128256 * 4096  # weights that each step reads: all but the embedding
KV_TOKEN_8B = 131_072
LOAD = Workload(1024, 256)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with a config.json and no weights."""
    made = {}
    for name, raw in {"8b": LLAMA_8B, "70b": LLAMA_70B}.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(raw))
        made[name] = str(folder)
    return made


@pytest.fixture(scope="session")
def on_h100(folders: dict[str, str]) -> MachinePlan:
    return make_plan(EngineConfig(model=folders["8b"], max_num_batched_tokens=2048), find("H100 SXM"))


def call(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    assert int(ended.value.code or 0) == status
    out, err = capsys.readouterr()
    return err if status else out


def test_decoding_at_the_roof_reads_weights_and_cache_once(on_h100: MachinePlan) -> None:
    for batch, context in ((1, 1024), (16, 2048)):
        read = READ_8B * 2 + batch * (context + 1) * KV_TOKEN_8B
        phase = on_h100.decode(batch, context)
        assert phase.seconds.roof == pytest.approx(read / 3350e9, rel=1e-3)
        assert (phase.bound, phase.tokens) == ("memory", batch)
    assert on_h100.decode(256, 16).bound == "overhead"  # of each sequence


def test_a_prompt_at_the_roof_is_its_arithmetic(on_h100: MachinePlan) -> None:
    phase = on_h100.prefill(2048)
    products, pairs = 2 * 2048 * (READ_8B - 128256 * 4096), 2 * 2048**2 / 2 * 2 * 4096 * 32
    assert phase.seconds.roof == pytest.approx((products + pairs) / 989.4e12, rel=0.02)
    assert phase.bound == "arithmetic"
    assert on_h100.prefill(16).bound == "memory"
    chunked = on_h100.prefill(2048, 64).seconds.roof
    assert chunked > 32 * READ_8B * 2 / 3350e9  # 32 steps, each of which reads the weights


def test_a_prompt_after_cached_tokens_reads_them(on_h100: MachinePlan) -> None:
    alone, after = (on_h100.prefill(16, cached=cached).seconds.roof for cached in (0, 65536))
    assert after - alone == pytest.approx(65536 * KV_TOKEN_8B / 3350e9, rel=0.01)


def test_the_turning_batch_is_the_ridge_in_weights(on_h100: MachinePlan) -> None:
    assert on_h100.turning_batch() == pytest.approx(989.4e12 / 3350e9, abs=2)  # 2 B / b = F / BW, b = 2
    int4 = with_options(on_h100, quantization="int4")
    assert int4.turning_batch() == pytest.approx(989.4e12 / 3350e9 * 4.25 / 16, abs=3)
    int8 = with_options(on_h100, quantization="int8")
    assert int8.turning_batch() == pytest.approx(1978.9e12 / 3350e9 / 2, rel=0.1)


def test_verifying_drafts_is_free_while_weights_are_read(on_h100: MachinePlan) -> None:
    """Below the turning batch a step reads the same weights; above it, it computes as many times more."""
    assert on_h100.verifying(1, 1024, 0) == 1
    assert 1 < on_h100.verifying(1, 1024, 3) < 1.02
    assert on_h100.verifying(16, 1024, 3) < 1.1
    assert on_h100.verifying(512, 16, 3) > 2


def test_the_typical_time_is_slower_by_the_shares(on_h100: MachinePlan) -> None:
    shares, phase = TYPICAL["gpu"], on_h100.decode(1, 1024)
    overhead = 32 * shares.layer_s + shares.row_s
    assert phase.seconds.typical == pytest.approx(phase.seconds.roof / shares.memory + overhead, rel=1e-3)
    cards = make_plan(on_h100.config, on_h100.machine, 4).decode(1, 1024).seconds
    overhead = 32 * (shares.cards_s + 2 * shares.doubling_s) + shares.row_s
    assert cards.roof == pytest.approx(phase.seconds.roof / 4)
    assert cards.typical == pytest.approx(phase.seconds.roof / 4 / shares.memory + overhead, rel=1e-3)


def test_a_range_begins_at_the_roof_or_later() -> None:
    assert Span(1.0, 1.1).low == 1.0
    wide = Span(1.0, 4.0)
    assert wide.low > 1
    assert wide.high / wide.low == pytest.approx(SPREAD)
    assert [wide.holds(time) for time in (1.0, 4.0, 7.0)] == [False, True, False]
    rate = wide.rate(8)
    assert rate.low < rate.typical == 2 < rate.high < rate.roof == 8


def test_what_fits_is_what_the_memory_holds(on_h100: MachinePlan) -> None:
    fit = on_h100.fit
    assert fit.available_bytes == 72e9
    assert fit.weight_bytes == 8_030_261_248 * 2
    assert fit.activation_bytes > 2048 * 4096 * 2
    assert fit.free_bytes == fit.available_bytes - fit.weight_bytes - fit.activation_bytes
    for tokens in (1280, 16384):
        count = fit.batch(tokens)
        assert count * tokens * KV_TOKEN_8B <= fit.free_bytes < (count + 1) * tokens * KV_TOKEN_8B
    assert fit.tokens // 16 * 16 * KV_TOKEN_8B <= fit.free_bytes < (fit.tokens + 16) * KV_TOKEN_8B


def test_states_take_memory_for_each_sequence() -> None:
    sizing = Sizing((CacheGroup(0, slot_bytes=10),), 16, 16)
    assert Fit(105.0, 3, 2, sizing, 64).batch(5) == 10


def test_what_does_not_fit_says_how_many_cards_would(folders: dict[str, str]) -> None:
    config = EngineConfig(model=folders["70b"])
    plan = make_plan(config, find("H100 SXM"))
    assert not plan.fit.fits
    assert serving(plan, LOAD) is None
    needed = plan.fit.cards(plan.machine)
    assert needed == 3  # 141 GB, and a cache for 131,072 tokens of 327,680 bytes, in 72 GB each
    assert make_plan(config, plan.machine, needed).fit.batch(131072) == 1
    assert not make_plan(config, plan.machine, needed - 1).fit.batch(131072)


def test_under_load_prompts_slow_the_tokens_of_others(on_h100: MachinePlan) -> None:
    found = serving(on_h100, LOAD)
    assert found is not None
    assert found.batch == 64
    step = on_h100.decode(64, 1024 + 128).seconds
    others = on_h100.prefill(1024).seconds.times(63 / 255)
    assert found.times["tpot", "mean"] == pytest.approx(step.plus(others))
    assert found.times["itl", "p50"] == step  # of 255 gaps, 63 hold a prompt
    assert found.times["itl", "p99"].typical > 2 * step.typical
    assert found.wave == on_h100.prefill(1024).seconds.times(64)
    total = found.times["ttft", "mean"].plus(found.times["tpot", "mean"], 255)
    assert found.tokens_per_s.typical == pytest.approx(64 * 256 / total.typical)
    small = serving(replace_tokens(on_h100, 128), LOAD)
    assert small is not None
    assert small.times["itl", "p99"].typical < found.times["itl", "p99"].typical
    assert small.times["ttft", "p50"].typical > found.times["ttft", "p50"].typical


def replace_tokens(plan: MachinePlan, tokens: int, sequences: int | None = None) -> MachinePlan:
    config = replace(plan.config, max_num_batched_tokens=tokens)
    config = replace(config, max_num_seqs=sequences or config.max_num_seqs)
    return replace(plan, description=replace(plan.description, config=config))


def test_knobs_keep_the_goal_and_are_the_largest_that_do(on_h100: MachinePlan) -> None:
    goal = Goal.parse("ttft_p90<120ms,itl_p99<15ms")
    now = serving(on_h100, LOAD)
    assert now is not None
    assert not now.keeps(goal)
    found = {str(knob): knob for knob in knobs(on_h100, LOAD, goal)}
    fewer = next(knob for told, knob in found.items() if told.startswith("max_num_seqs at most"))
    kept = fewer.settings["max_num_seqs"]
    for sequences, keeps in ((kept, True), (kept + 1, False)):
        one = serving(replace_tokens(on_h100, 2048, sequences), LOAD)
        assert one is not None
        assert one.keeps(goal) is keeps
    assert any("max_num_batched_tokens" in told for told in found)
    assert any("num_devices 8" in told for told in found)
    for knob in found.values():
        assert knob.serving.keeps(goal)
        assert knob.surely is knob.serving.keeps(goal, "high")


def test_one_sequence_fewer_is_found_where_it_is_enough(on_h100: MachinePlan) -> None:
    full, fewer = (serving(replace_tokens(on_h100, 2048, count), LOAD) for count in (64, 63))
    assert full is not None
    assert fewer is not None
    limit_ms = 500 * (full.times["tpot", "mean"].typical + fewer.times["tpot", "mean"].typical)
    found = knobs(on_h100, LOAD, Goal.parse(f"tpot<{limit_ms:.6f}ms"))
    assert {"max_num_seqs": 63} in [knob.settings for knob in found]


def test_quantization_is_a_knob_where_weights_bind(on_h100: MachinePlan) -> None:
    alone = replace_tokens(on_h100, 2048, 1)
    goal = Goal.parse("tpot<4ms")
    told = [str(knob) for knob in knobs(alone, LOAD, goal)]
    assert "quantization int4" in told
    assert not any("max_num_seqs" in one for one in told)  # one sequence is too slow already


def test_two_knobs_are_tried_where_one_is_not_enough(on_h100: MachinePlan) -> None:
    goal = Goal.parse("itl_p99<4ms,ttft_p50<400ms")
    pairs = [knob for knob in knobs(on_h100, LOAD, goal) if len(knob.settings) == 2]
    assert pairs
    assert not any(
        len(knob.settings) == 1 and "num_devices" not in knob.settings for knob in knobs(on_h100, LOAD, goal)
    )


def test_another_machine_is_named_where_no_setting_helps(folders: dict[str, str]) -> None:
    plan = make_plan(EngineConfig(model=folders["70b"], max_num_seqs=1, quantization="int4"), find("T4"))
    found = knobs(plan, LOAD, Goal.parse("ttft<1s,tpot<20ms"))
    assert {"machine"} == {name for knob in found for name in knob.settings}
    assert "H200 SXM" in {knob.settings["machine"] for knob in found}
    assert knobs(plan, LOAD, Goal.parse("tpot<1ms")) == ()


def test_this_machine_is_planned_at_its_ceilings(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"int8": 1e12, "bf16": 4e11, "f32": 2e11}
    found = Ceilings("a CPU", "avx2", 2, rates, {2: {"memory": 4e10}}, 0.0)
    monkeypatch.setattr(planning, "ceilings", lambda loops: found)
    plan = make_plan(EngineConfig(model=folders["8b"], quantization="int4"))
    weights = plan.fit.weight_bytes - 128256 * 4096 * 2  # without the embedding, of which one row is read
    assert plan.machine.kind == "cpu"
    assert plan.decode(1, 1).seconds.roof == pytest.approx(weights / 4e10, rel=0.01)
    assert plan.turning_batch() == pytest.approx(1e12 / 4e10 * 4.25 / 16, abs=1)
    assert not any("num_devices" in knob.settings for knob in knobs(plan, LOAD, Goal.parse("itl<100s")))


def test_the_command_prints_tables_a_plot_and_knobs(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    svg = tmp_path / "plan.svg"
    machine = ("--machine", "h100 sxm")
    told = call(capsys, folders["8b"], *machine, "--goal", "itl_p99<15ms", "--svg", str(svg))
    for part in (
        "H100 SXM",
        "B* = 296",
        "3 drafted tokens a sequence is longer by a factor of 1.00 at batch 1, 1.00 at batch 16, 1.05",
        "fits",
        "decode: batch",
        "●",
        "prefill: prompt",
        "reached with --max-num-seqs",
    ):
        assert part in told
    assert svg.read_text().startswith("<svg")
    assert "-" in next(line for line in told.splitlines() if line.startswith("64 ")).split()
    assert "does not fit: 3 x H100 SXM would hold it" in call(capsys, folders["70b"], *machine)


def test_the_command_prints_json(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--machine", "L40S", "--goal", "tpot<1ms", "--json", "--num-devices", "2")
    shown: dict[str, Any] = json.loads(call(capsys, folders["8b"], *words))
    assert shown["num_devices"] == 2
    assert shown["memory"]["fits"] is True
    for entry in (*shown["decode"], *shown["prefill"]):
        assert entry["roof_s"] <= entry["low_s"] <= entry["typical_s"] <= entry["high_s"]
    assert shown["goal"]["verdict"] == "not reached"
    assert shown["goal"]["reached_with"] == []
    kept = json.loads(call(capsys, folders["8b"], "--machine", "L40S", "--goal", "tpot<9s", "--json"))["goal"]
    assert (kept["verdict"], kept["reached_with"]) == ("kept", [])
    assert set(shown["serving"]["typical"]) >= {"p90_ttft_ms", "mean_e2el_ms"}


def test_the_lists(capsys: pytest.CaptureFixture[str]) -> None:
    told = call(capsys, "--machines")
    assert all(machine.name.split()[0] in told for machine in catalogue())
    assert len(json.loads(call(capsys, "--machines", "--json"))["machines"]) == len(catalogue())
    assert len(json.loads(call(capsys, "--worked-numbers", "--json"))) == 40
    assert "851.3" in call(capsys, "--worked-numbers")


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ((), 2, "MODEL is missing"),
        (("demo", "--machine", "abacus"), 1, "not in the catalogue"),
        (("demo", "--machine", "T4", "--goal", "soon"), 1, "is not a goal"),
        (("demo", "--machine", "T4", "--prompt-tokens", "9999"), 1, "exceed the context"),
        (("demo", "--machine", "T4", "--prompt-tokens", "0"), 2, "at least 1"),
        (("demo", "--num-devices", "2"), 2, "needs --machine"),
        (("demo", "again"), 2, "unknown argument"),
    ],
)
def test_errors_say_what_to_do(
    words: tuple[str, ...], status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in call(capsys, *words, status=status)
