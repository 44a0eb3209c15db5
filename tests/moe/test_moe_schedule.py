"""Schedules as data: goldens, rules, simulation."""

import itertools

import pytest

from mindspeed_chunk.config import SCHEDULES
from mindspeed_chunk.moe.schedule import (
    Action,
    after_first_dispatch,
    before_last_unpermutes,
    build,
    collectives,
    parse,
    render,
    residency,
    simulate,
    validate,
)

GOLDEN = {
    ("rolling", 1, False): "P0 D0 E0 C0 U0",
    ("rolling", 3, False): "P0 D0 P1 D1 E0 C0 P2 D2 E1 C1 U0 E2 C2 U1 U2",
    ("rolling", 3, True): "P0 D0 P1 D1 E0 C0 W0 P2 D2 E1 U0 C1 W1 E2 U1 C2 W2 U2",
    ("pair", 1, True): "P0 D0 E0 C0 W0 U0",
    ("pair", 3, False): "P0 P1 D0 D1 E0 C0 E1 C1 U0 U1 P2 D2 E2 C2 U2",
    ("pair", 2, True): "P0 P1 D0 D1 E0 C0 E1 C1 W0 W1 U0 U1",
}
AHEAD = {
    (0, False): "P0 D0 E0 C0 P1 D1 E1 C1 U0 P2 D2 E2 C2 U1 U2",
    (2, False): "P0 D0 P1 D1 P2 D2 E0 C0 E1 C1 U0 E2 C2 U1 U2",
    (2, True): "P0 D0 P1 D1 P2 D2 E0 C0 W0 E1 U0 C1 W1 E2 U1 C2 W2 U2",
    (5, False): "P0 D0 P1 D1 P2 D2 E0 C0 E1 C1 U0 E2 C2 U1 U2",
}
ALL = list(itertools.product(SCHEDULES, range(1, 12), (False, True)))


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_schedules_read_as_printed(key):
    name, chunks, backward = key
    schedule = build(name, chunks, backward=backward)
    assert render(schedule) == GOLDEN[key]
    assert parse(GOLDEN[key]) == schedule


def test_every_schedule_has_a_golden_in_both_directions():
    assert {(name, backward) for name, _, backward in GOLDEN} == set(itertools.product(SCHEDULES, (False, True)))


@pytest.mark.parametrize("key", AHEAD, ids=str)
def test_lookahead_is_how_many_dispatches_come_before_the_experts_of_a_chunk(key):
    lookahead, backward = key
    assert render(build("rolling", 3, lookahead=lookahead, backward=backward)) == AHEAD[key]
    for chunks in range(1, 9):
        schedule = build("rolling", chunks, lookahead=lookahead, backward=backward)
        validate(schedule, max_in_flight=lookahead + 1, max_owners=lookahead + 2)


def test_a_call_opens_with_the_first_dispatch_and_closes_with_the_last_unpermutes():
    forward, backward = build("rolling", 3), build("rolling", 3, backward=True)
    assert render(forward[: after_first_dispatch(forward)]) == "P0 D0"
    assert render(backward[before_last_unpermutes(backward) :]) == "U2"
    pair = build("pair", 4, backward=True)
    assert render(pair[before_last_unpermutes(pair) :]) == "U2 U3"
    nothing_back = build("rolling", 2, backward=True, drop="CU")
    assert before_last_unpermutes(nothing_back) == len(nothing_back)
    nothing_sent = build("rolling", 2, drop="DECU")
    assert after_first_dispatch(nothing_sent) == len(nothing_sent) == 2


@pytest.mark.parametrize("name, chunks, backward", ALL)
def test_every_schedule_is_valid_within_two_in_flight_and_three_owners(name, chunks, backward):
    for drop in ("", "CU", "W", "CUW"):
        schedule = build(name, chunks, backward=backward, drop=drop if backward else "")
        validate(schedule, max_in_flight=2, max_owners=3)
        assert parse(render(schedule)) == schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_order_of_exchanges_depends_on_the_number_of_chunks_alone(name):
    forward, backward = build(name, 5), build(name, 5, backward=True)
    assert collectives(forward) == collectives(backward)
    assert collectives(build(name, 5, backward=True, drop="W")) == collectives(backward)


@pytest.mark.parametrize(
    "text, message",
    [
        ("P0 D0 D0 E0 C0 U0", "D0 occurs twice"),
        ("P1 D1 E1 C1 U1", "numbered from 0"),
        ("P0 D0 E0 C0 U0 P1 D1 E1 C1", "U1 is missing"),
        ("P0 E0 D0 C0 U0", "E0 is before D0"),
        ("P0 D0 E0 U0 C0", "U0 is before C0"),
        ("P0 D0 W0 E0 C0 U0", "W0 is before E0"),
        ("P0 P1 D1 D0 E0 C0 E1 C1 U0 U1", "not in chunk order"),
        ("P0 D0 P1 D1 P2 D2 E0 C0 E1 C1 E2 C2 U0 U1 U2", "3 chunks are between D and C"),
        ("P0 D0 E0 C0 P1 D1 E1 C1 P2 D2 E2 C2 P3 D3 E3 C3 U0 U1 U2 U3", "4 chunks own buffers"),
        ("", "numbered from 0"),
    ],
)
def test_validator_names_the_broken_rule(text, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(text))


@pytest.mark.parametrize("word", ["X0", "D", "D-1", "0D", "D0.5", "d0"])
def test_parse_names_the_word(word):
    with pytest.raises(ValueError, match=f"'{word}' is not an action"):
        parse(f"P0 {word}")


def test_build_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="must be one of rolling, pair"):
        build("rollin", 2)
    with pytest.raises(ValueError, match="at least one chunk"):
        build("rolling", 0)


def test_residency_of_one_chunk_without_a_combine():
    assert residency(parse("P0 D0 E0 W0")) == [(0, 1), (1, 1), (0, 1), (0, 0)]


def cost_of_experts_equal_to_their_communication(action: Action) -> float:
    return {"D": 3.0, "C": 2.0, "E": 5.0}.get(action.kind, 0.0)


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_pair_hides_half_and_rolling_all_but_one_chunk(chunks):
    for name, share in (("pair", 0.5), ("rolling", 1 - 1 / chunks)):
        timeline = simulate(build(name, chunks), cost_of_experts_equal_to_their_communication)
        assert timeline.communication == 5.0 * chunks
        # the first dispatch and the last combine of each pair, or of all, is what remains
        assert timeline.hidden_share == pytest.approx(share, abs=1e-12)


def test_weight_gradients_hide_the_last_combine():
    cost = {"D": 1.0, "C": 1.0, "E": 2.0, "W": 1.0}
    timeline = simulate(build("rolling", 4, backward=True), lambda action: cost.get(action.kind, 0.0))
    assert timeline.exposed == pytest.approx(1.0)  # the first dispatch alone


def test_simulated_timeline_by_hand():
    timeline = simulate(parse("P0 D0 E0 C0 U0"), lambda action: "PDECU".index(action.kind) + 1.0)
    spans = {str(span.action): (span.start, span.end) for span in timeline.spans}
    assert spans == {"P0": (0, 1), "D0": (1, 3), "E0": (3, 6), "C0": (6, 10), "U0": (10, 15)}
    assert timeline.total == 15 and timeline.exposed == 6 and timeline.hidden_share == 0
