"""Rank groups: every rank in exactly one of each kind, and Megatron-LM's numbering."""

from collections import Counter

import pytest

from mindspeed_chunk.hardware import GroupShape
from mindspeed_chunk.planner.layout import KINDS, Layout, layouts


def test_every_rank_is_in_one_group_of_each_kind_in_all_layouts_up_to_256_ranks():
    checked = set()
    for world in range(1, 257):
        for layout in layouts(world):
            for kind in KINDS:
                # groups of everything but the experts are the same whatever EP is, and the other way round
                dense = (layout.tp, layout.cp, layout.dp, layout.pp)
                expert = (layout.tp, layout.ep, layout.edp, layout.pp)
                key = (kind, expert if kind in ("ep", "edp") else dense)
                if key in checked:
                    continue
                checked.add(key)
                groups = layout.groups(kind)
                assert {len(group) for group in groups} == {layout.size(kind)}
                assert sorted(rank for group in groups for rank in group) == list(range(world)), (layout, kind)
    assert len(checked) > 10_000


def megatron_groups(order, sizes, wanted):
    """The definition: rank = sum of coordinate x stride, the first name of the order fastest; ranks of a group differ
    in the wanted coordinates alone."""
    places = [{}]
    for name in reversed(order.split("-")):
        places = [{**place, name: n} for place in places for n in range(sizes[name])]
    groups = {}
    for rank, place in enumerate(places):
        groups.setdefault(tuple(n for name, n in place.items() if name not in wanted), []).append(rank)
    return sorted(map(tuple, groups.values()))


@pytest.mark.parametrize(
    "layout", [Layout(8, 1, 1, 2, 4), Layout(4, 1, 1, 2, 8), Layout(2, 2, 4, 4, 2), Layout(1, 1, 8, 64, 1)]
)
def test_groups_are_megatrons(layout):
    dense = {"tp": layout.tp, "cp": layout.cp, "ep": 1, "dp": layout.dp, "pp": layout.pp}
    expert = {"tp": layout.tp, "cp": 1, "ep": layout.ep, "dp": layout.edp, "pp": layout.pp}
    for kind in KINDS:
        sizes = expert if kind in ("ep", "edp") else dense
        wanted = {"edp": ("dp",), "dp_cp": ("dp", "cp")}.get(kind, (kind,))
        assert sorted(layout.groups(kind)) == megatron_groups("tp-cp-ep-dp-pp", sizes, wanted), kind


def test_the_two_layouts_of_64_ranks_on_8_nodes():
    wide, narrow = Layout(tp=8, dp=2, pp=4), Layout(tp=4, dp=2, pp=8)
    assert wide.world == narrow.world == 64
    assert wide.groups("tp")[:2] == (tuple(range(8)), tuple(range(8, 16)))
    assert wide.groups("dp")[0] == (0, 8) and wide.groups("pp")[0] == (0, 16, 32, 48)
    assert narrow.groups("tp")[:2] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert narrow.groups("dp")[0] == (0, 4) and narrow.groups("pp")[0] == tuple(range(0, 64, 8))
    # with TP over the whole node data-parallel groups cross nodes; with half of it they stay inside
    assert wide.inside_node("tp", 8) and not wide.inside_node("dp", 8)
    assert narrow.inside_node("tp", 8) and narrow.inside_node("dp", 8)
    assert not wide.inside_node("pp", 8) and not narrow.inside_node("pp", 8)


def test_the_example_in_megatrons_documentation():
    """16 ranks, TP 2, PP 4, as `initialize_model_parallel` tells it."""
    layout = Layout(tp=2, dp=2, pp=4)
    assert layout.groups("dp")[:4] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("pp") == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))


def test_layouts_keep_to_the_model():
    found = list(layouts(64, heads=16, layers=40, experts=256))
    assert len(found) == len(set(found)) and all(layout.world == 64 for layout in found)
    assert {layout.tp for layout in found} == {1, 2, 4, 8, 16}
    assert {layout.pp for layout in found} == {1, 2, 4, 8}
    assert all((layout.cp * layout.dp) % layout.ep == 0 for layout in found)
    with pytest.raises(ValueError, match="EP=3 does not divide"):
        Layout(ep=3, dp=4).groups("ep")


def test_spans():
    assert GroupShape.of(Layout(dp=64).groups("dp_cp"), 8) == GroupShape(64, 8)
    assert GroupShape.of(Layout(ep=8, dp=64).groups("ep"), 8) == GroupShape(8, 8)
    assert GroupShape.of(Layout(ep=8, dp=64).groups("edp"), 8) == GroupShape(8, 1)
    assert GroupShape.of(Layout(tp=8, dp=2, pp=4).groups("pp"), 8) == GroupShape(4, 1)


def test_spans_are_those_of_the_groups():
    """Found from strides alone, whatever the nodes are: also where groups begin and end inside of them."""
    checked = 0
    for world in (1, 2, 12, 16, 24, 36, 48):
        for layout in layouts(world):
            for kind in KINDS:
                groups = layout.groups(kind)
                for devices in (1, 2, 3, 5, 8, 16, 64):
                    assert layout.span(kind, devices) == GroupShape.of(groups, devices), (layout, kind, devices)
                    checked += 1
    assert checked > 10_000


def test_divisors_are_all_and_in_order():
    for number in range(1, 200):
        assert [layout.dp for layout in layouts(number, heads=1, layers=1, experts=1)] == [
            number // cp for cp in range(1, number + 1) if number % cp == 0
        ]


def test_the_grid_is_the_embedded_trainers():
    layout, world, ep = Layout(ep=2, dp=8), 8, 2
    assert layout.groups("ep") == tuple((first, first + 1) for first in range(0, world, ep))
    assert Counter(len(group) for group in layout.groups("edp")) == {4: 2} and layout.groups("edp")[0] == (0, 2, 4, 6)
