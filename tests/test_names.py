"""Names with wildcards: what matches, what is covered, and that no text of one takes long."""

import itertools
import random
import re
import time

import pytest

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.mbs import checks
from mindspeed_chunk.names import MAX_NAMES, Pattern, covered, read_patterns


def numbers(text):
    """All names of a pattern whose wildcards are short ranges."""
    parts = re.split(r"\{(\d+)-(\d+)\}", text)
    ranges = [range(int(a), int(b) + 1) for a, b in zip(parts[1::3], parts[2::3])]
    for chosen in itertools.product(*ranges):
        yield "".join(itertools.chain(*itertools.zip_longest(parts[::3], map(str, chosen), fillvalue="")))


def matches(text, name):
    """By a regular expression for each range's numbers, written out."""
    regex = ""
    for part in re.split(r"(\{[^}]*\}|\*|\?)", text):
        if part.startswith("{"):
            low, high = map(int, part[1:-1].split("-"))
            regex += f"(?:{'|'.join(map(str, range(low, high + 1)))})"
        else:
            regex += {"*": ".*", "?": "."}.get(part, re.escape(part))
    return re.fullmatch(regex, name) is not None


def test_what_is_covered_is_what_matching_every_name_tells():
    draw, told = random.Random(0), []

    def one(depth=2):
        low = draw.randrange(14)
        kinds = (f"{{{low}-{low + draw.randrange(6)}}}", f"{{{low}-{low + draw.randrange(6)}}}", "*", str(low), "?")
        return ".".join(["a", *(draw.choice(kinds) for _ in range(depth))])

    for _ in range(400):
        low = draw.randrange(12)
        text = f"a.{{{low}-{low + draw.randrange(7)}}}.{{0-{draw.randrange(12)}}}"
        others = [one() for _ in range(draw.randrange(1, 7))]
        right = all(any(matches(other, name) for other in others) for name in numbers(text))
        assert covered(Pattern(text, "p"), read_patterns(others, "p")) == right, (text, others)
        told.append(right)
    assert 20 < sum(told) < 380


def test_names_match_as_a_regular_expression_of_their_numbers_does():
    draw, told = random.Random(1), []
    for _ in range(3000):
        text = "".join(draw.choice(("a", ".", "1", "*", "?", "{0-12}", "{3-5}")) for _ in range(draw.randrange(1, 6)))
        name = "".join(draw.choice("a.1345") for _ in range(draw.randrange(6)))
        told.append(matches(text, name))
        assert Pattern(text, "p").matches(name) == told[-1], (text, name)
    assert sum(told) > 100


@pytest.mark.parametrize(
    "text", ["{0-9999999}", "{0-999}.{0-999}.{0-999}", "{0-9999999}.{0-9999999}.{0-9999999}", "l.{*}"]
)
def test_large_ranges_are_compared_by_their_ends(text):
    began = time.process_time()
    for others in ([text], ["*"], ["{*}", f"{text}.x"], ["x"], [f"x.{n}" for n in range(90)]):
        found = covered(Pattern(text, "p"), read_patterns(others, "p"))
        assert found == (others[0] in (text, "*") or others[0] == "{*}" and text == "{0-9999999}")
        units = {"units": [text, f"{text}.mlp"]}
        list(checks.not_covered("features.recompute", others, [text]))
        if others != ["*"]:
            checks.check_hooks(units, ["y"], ["z"])
    assert time.process_time() - began < 20  # number by number it takes hours


def test_a_hole_at_either_end_or_inside_of_a_large_range_is_seen():
    whole = Pattern("l.{0-9999999}", "p")
    assert covered(whole, read_patterns(["l.{0-41}", "l.42", "l.{43-9999999}"], "p"))
    for hole in (["l.{1-9999999}"], ["l.{0-9999998}"], ["l.{0-41}", "l.{43-9999999}"], ["l.?", "l.{11-9999999}"]):
        assert not covered(whole, read_patterns(hole, "p")), hole
    assert covered(whole, read_patterns(["l.?", "l.{10-9999999}"], "p"))


@pytest.mark.parametrize("text", ["*a" * 60 + "b", "*" * 150, "*{0-9}" * 20 + "x", "?*" * 70 + "b"])
def test_many_wildcards_take_no_time(text):
    began = time.process_time()
    assert not Pattern(text, "p").matches("a1" * 100 + "c") or text == "*" * 150
    assert time.process_time() - began < 20  # by backtracking it takes years


def test_limits_say_what_they_are():
    with pytest.raises(ConfigError, match=r"^p: 'x+\.\.\.: must have at most 200 characters; "):
        Pattern("x" * 201, "p")
    with pytest.raises(ConfigError, match=rf"more than {MAX_NAMES} names; write wildcards"):
        read_patterns(["x"] * (MAX_NAMES + 1), "p")
    with pytest.raises(ConfigError, match=r"matches more than 10000 names to compare; write"):
        covered(Pattern("{0-999}.{0-999}", "p"), read_patterns(["{*}.{*}", *(f"{n}.x" for n in range(500))], "p"))
