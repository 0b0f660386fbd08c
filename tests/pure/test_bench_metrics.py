"""The load generator: figures of hand-made timelines, replies in pieces of any size, workloads, verdicts."""

from __future__ import annotations

import json
from itertools import islice, pairwise

import pytest
from endurance.trends import drift, fifths, slope
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.http_reply import BadReply, EventSplitter, ReplyParser
from quire.bench.metrics import (
    Spread,
    Timeline,
    bins,
    gaps_within,
    max_concurrency,
    percentile,
    summarize,
)
from quire.bench.report import spark
from quire.bench.workload import (
    Lengths,
    PromptVocabulary,
    Request,
    poisson,
    random_requests,
    read_trace,
    trace_requests,
)
from quire.goals import MEASURES, STATISTICS, Goal

NO_GOAL = Goal()


def goal(**limits_ms: float) -> Goal:
    return Goal.parse_pairs(f"{name}:{limit}" for name, limit in limits_ms.items())


def timeline(sent: float, *chunks: float, tokens: int | None = None, **rest) -> Timeline:
    """A request that ended with its last chunk; a token each, unless it says otherwise."""
    rest.setdefault("end_s", chunks[-1] if chunks else sent)
    return Timeline(sent, chunk_s=list(chunks), num_output_tokens=tokens or len(chunks), **rest)


def test_latencies_of_one_request():
    one = timeline(10.0, 10.5, 10.6, 10.9, 11.5)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.e2el_s == pytest.approx(1.5)
    assert one.tpot_s == pytest.approx(1.0 / 3)
    assert [end - begin for begin, end in one.gaps()] == pytest.approx([0.1, 0.3, 0.6])


def test_chunks_of_several_tokens_make_longer_gaps_but_the_same_time_per_token():
    one = timeline(0.0, 1.0, 1.2, 1.4, tokens=9)
    assert [end - begin for begin, end in one.gaps()] == pytest.approx([0.2, 0.2])
    assert one.tpot_s == pytest.approx(0.4 / 8)


def test_one_token_has_no_time_per_token_and_no_gap():
    one = timeline(0.0, 2.0)
    assert (one.ttft_s, one.e2el_s, one.tpot_s, list(one.gaps())) == (2.0, 2.0, None, [])


def test_one_chunk_has_no_time_per_token_either():
    assert timeline(0.0, 2.0, tokens=50).tpot_s is None


def test_nothing_came():
    none = timeline(0.0, error="timed out", end_s=600.0)
    assert (none.ttft_s, none.e2el_s, none.tpot_s) == (None, None, None)


def test_percentiles_lie_between_values():
    assert percentile([1.0], 99) == 1.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([0.0, 10.0], 90) == pytest.approx(9.0)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(0, 100))
def test_percentiles_are_those_of_numpy(values, share):
    numpy = pytest.importorskip("numpy")
    found = percentile(sorted(values), share)
    assert found == pytest.approx(float(numpy.percentile(values, share)), rel=1e-9, abs=1e-9)


def test_a_summary_counts_what_did_not_fail():
    runs = [
        timeline(0.0, 1.0, 1.5, 2.0, num_prompt_tokens=7, num_cached_tokens=4),
        timeline(1.0, 2.0, num_prompt_tokens=5),
        timeline(2.0, 2.5, 2.6, error="connection lost", num_prompt_tokens=99),
        timeline(3.0, error="HTTP 503 full", end_s=3.01, is_rejected=True),
        timeline(3.0, error="HTTP 503 full", end_s=3.03, is_rejected=True, planned_s=2.9),
    ]
    found = summarize(runs, 4.0, NO_GOAL)
    assert (found.completed, found.failed) == (2, 3)
    assert found.errors == {"HTTP 503 full": 2, "connection lost": 1}
    assert (found.num_output_tokens, found.num_prompt_tokens, found.num_cached_tokens) == (4, 12, 4)
    assert found.per_s(found.num_output_tokens) == 1.0
    assert found.ttft == Spread(2, 1000.0, 1000.0, 1000.0, 1000.0, 1000.0, 1000.0)
    assert found.itl is not None
    assert (found.itl.count, found.itl.p50) == (2, 500.0)
    assert found.tpot is not None
    assert found.tpot.count == 1
    assert found.rejection is not None
    assert found.rejection.largest == pytest.approx(30.0)
    assert found.lateness is not None
    assert found.lateness.p50 == pytest.approx(100.0)


def test_a_summary_of_nothing():
    found = summarize([], 0.0, NO_GOAL)
    assert (found.completed, found.ttft, found.itl, found.per_s(0)) == (0, None, None, 0.0)


@pytest.mark.parametrize(
    ("wanted", "good"),
    [
        (Goal(), True),
        (goal(ttft=500), True),  # exactly
        (goal(ttft=499), False),
        (goal(tpot=250), True),
        (goal(ttft=500, tpot=249), False),
        (goal(e2el=1000), True),
        (goal(ttft=500, tpot=250, e2el=999), False),
    ],
)
def test_a_request_keeps_a_goal_in_all_its_parts(wanted, good):
    assert timeline(0.0, 0.5, 0.75, 1.0).keeps(wanted) is good


def test_one_token_meets_any_time_per_token_and_a_failure_meets_nothing():
    assert timeline(0.0, 0.5).keeps(goal(tpot=1, itl=1))
    assert not timeline(0.0, 0.5, error="timed out").keeps(NO_GOAL)
    assert not timeline(0.0).keeps(NO_GOAL)


def test_a_request_is_judged_by_the_statistic_of_its_own_gaps():
    one = timeline(
        0.0, 1.0, *(1.0 + 0.01 * index for index in range(1, 20)), 2.19
    )  # 19 gaps of 10 ms, 1 of 1 s
    assert one.keeps(Goal.parse("itl_p50<10.1ms,itl_p90<10.1ms"))
    assert not one.keeps(Goal.parse("itl_mean<59ms"))
    assert one.keeps(Goal.parse("itl_mean<60ms"))
    assert not one.keeps(Goal.parse("itl_p99<500ms"))


def test_figures_have_the_names_that_goals_refer_to():
    runs = [timeline(0.0, 0.1 * index, 0.1 * index + 0.05) for index in range(1, 102)]
    found = summarize(runs, 10.0, NO_GOAL).figures()
    assert (found["median_ttft_ms"], found["p90_ttft_ms"]) == (pytest.approx(5100), pytest.approx(9100))
    assert (found["p95_e2el_ms"], found["mean_itl_ms"]) == (pytest.approx(9650), pytest.approx(50))
    for measure in MEASURES:
        for statistic in STATISTICS:
            assert Goal.parse(f"{measure}_{statistic}<20s").met(found)
            assert not Goal.parse(f"{measure}_{statistic}<1ms").met(found)


def test_concurrency():
    assert max_concurrency([]) == 0
    assert max_concurrency([timeline(0.0, 1.0), timeline(1.0, 2.0)]) == 1  # one ends as the other begins
    assert max_concurrency([timeline(0.0, 3.0), timeline(1.0, 2.0), timeline(1.5, 4.0)]) == 3


def test_gaps_that_overlap_a_part_of_a_run():
    one = timeline(0.0, 1.0, 2.0, 3.5, 4.0, 4.1)
    assert gaps_within([one], 2.5, 3.0) == pytest.approx([1.5])  # began before, ended after
    assert gaps_within([one], 2.0, 3.6) == pytest.approx([1.5, 0.5])
    assert gaps_within([one], 5.0, 6.0) == []


def test_bins_hold_all_tokens():
    runs = [timeline(0.0, 0.5, 1.5, 3.999, tokens=6), timeline(2.5, 3.0, 4.0)]
    pieces = bins(runs, 0.0, 4.0, 4)
    assert [piece.tokens for piece in pieces] == pytest.approx([2, 2, 0, 4])
    assert [piece.open for piece in pieces] == [1, 1, 1, 2]
    assert [piece.gap_s for piece in pieces] == pytest.approx([0.0, 1.0, 0.0, 2.499])


def test_small_values_show_in_a_line_of_bars():
    assert spark([0, 0.001, 4, 8]) == " ▁▄█"
    assert spark([]) == ""
    assert spark([0, 0]) == "  "


BODY = b'data: {"a":1}\n\n: keep-alive\n\nevent: x\ndata: two\ndata: lines\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b"two\nlines", b"[DONE]"]
CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: "
    b"chunked\r\n\r\n" + b"%x;a=b\r\n%s\r\n" % (len(BODY), BODY) + b"0\r\n\r\n"
)


@given(st.lists(st.integers(0, len(CHUNKED)), max_size=8))
def test_a_reply_may_come_in_any_pieces(cuts):
    places = [0, *sorted(cuts), len(CHUNKED)]
    parser, splitter, events = ReplyParser(), EventSplitter(), []
    for begin, end in pairwise(places):
        events += splitter.feed(parser.feed(CHUNKED[begin:end]))
    assert events == EVENTS
    assert (parser.status, parser.is_done, parser.keeps_alive) == (200, True, True)


def test_events_may_end_their_lines_in_either_way():
    assert EventSplitter().feed(BODY.replace(b"\n", b"\r\n")) == EVENTS


def test_a_body_of_known_length_and_one_until_the_end():
    parser = ReplyParser()
    assert parser.feed(b"HTTP/1.1 400 Bad\r\nContent-Length: 4\r\n\r\nab") == b"ab"
    assert not parser.is_done
    assert parser.feed(b"cdef") == b"cd"
    assert parser.is_done
    parser = ReplyParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\nabc") == b"abc"
    assert not parser.is_done
    assert parser.end()
    assert not parser.keeps_alive


def test_a_cut_reply_is_not_whole():
    parser = ReplyParser()
    parser.feed(CHUNKED[:-5])
    assert not parser.end()


@pytest.mark.parametrize(
    "wrong",
    [b"SSH-2.0-x\r\n\r\n", b"x" * 70_000, b"HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
)
def test_what_is_not_http_is_refused(wrong):
    with pytest.raises(BadReply):
        ReplyParser().feed(wrong)


def test_random_requests_repeat_and_share_their_beginning():
    shape = Lengths(20, 8, range_ratio=0.5, num_prefix_tokens=5)
    words = PromptVocabulary(range(100, 200))
    found = list(islice(random_requests(shape, words, 1), 50))
    assert found == list(islice(random_requests(shape, words, 1), 50))
    assert found != list(islice(random_requests(shape, words, 2), 50))
    prompts = [request.content for request in found]
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 1
    assert len({tuple(prompt[5:10]) for prompt in prompts}) == 50
    assert {len(prompt) for prompt in prompts} <= set(range(15, 36))
    assert {request.num_output_tokens for request in found} <= set(range(4, 13))


def test_texts_are_made_of_as_many_words_as_give_the_tokens():
    words = PromptVocabulary((), tokens_per_word=2.0, base_tokens=10.0)
    text = words.draw([(50, "a"), (60, "b")])
    assert isinstance(text, str)
    assert len(text.split()) == 50  # (110 - 10) / 2


def test_arrivals_have_the_rate():
    found = list(islice(poisson([Request("", 1)] * 4000, 8.0, 0), 4000))
    assert found[0].at_s == 0
    assert found[-1].at_s == pytest.approx(4000 / 8, rel=0.05)
    gaps = sorted(b.at_s - a.at_s for a, b in pairwise(found))
    assert percentile(gaps, 50) == pytest.approx(0.693 / 8, rel=0.1)  # of an exponential distribution: ln 2


def test_traces_in_three_formats(tmp_path):
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    plain, mooncake = tmp_path / "p.jsonl", tmp_path / "m.jsonl"
    lines = [{"prompt_len": 9, "output_len": 2, "arrival_ms": at} for at in (1500, 500)]
    plain.write_text("\n".join(map(json.dumps, lines)))
    line = {"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}
    mooncake.write_text(json.dumps(line) + "\n")
    first, second = read_trace(azure)
    assert (first.at_s, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579)
    assert [arrival.at_s for arrival in read_trace(plain)] == [0.0, 1.0]
    (block,) = read_trace(mooncake)
    assert block.parts("x", 0) == [(512, "block x 7"), (488, "block x 8")]


def test_a_trace_is_shortened_to_what_the_server_has_room_for(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"prompt_len": 5000, "output_len": 900, "arrival_ms": 0}))
    found = trace_requests(read_trace(path), PromptVocabulary(range(9)), "", speed=2.0, longest=1024)
    (request,) = found
    assert (len(request.content), request.num_output_tokens) == (512, 512)


def test_a_slope_is_not_moved_by_outliers():
    points = [(float(x), 10.0 + 0.5 * x) for x in range(2000)]
    points[::50] = [(x, 1e6) for x, _ in points[::50]]
    assert slope(points) == pytest.approx(0.5, rel=0.01)
    assert slope([(1.0, 2.0)]) is None


def test_drift_is_the_last_fifth_against_the_first():
    points = [(float(x), 1.0 + (x >= 80)) for x in range(100)]
    parts = fifths(points, 0.0, 100.0)
    assert parts == [1.0, 1.0, 1.0, 1.0, 2.0]
    assert drift(parts) == pytest.approx(1.0)
    assert drift(fifths([], 0.0, 1.0)) is None
