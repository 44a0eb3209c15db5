"""The yaml as the host reads it, lines of keys, wildcards, types, and corrections of the text."""

import pytest
import yaml

from lint_cases import CLEAN, spoilt
from mindspeed_chunk import keys
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.lint import report
from mindspeed_chunk.lint.document import Document, Unreadable
from mindspeed_chunk.lint.edits import Append, Remove, Rename, Set, apply
from mindspeed_chunk.names import Pattern, covered, prefixes, read_patterns, shares

ANCHORS = """\
base: &BASE
  a: 1
  names: [x]
one:
  <<: *BASE
  b: 2
two: {<<: *BASE, a: 3}
three: *BASE
"""


def test_anchors_and_merges_as_the_loader_takes_them():
    document = Document(ANCHORS, "anchors.yaml")
    assert document.data == yaml.safe_load(ANCHORS)
    assert document.data["two"]["a"] == 3
    assert [document.line(path) for path in ("one.b", "one.a", "two.a", "three.a", "one.none", "none")] == [
        6,
        2,
        7,
        2,
        4,
        1,
    ]


@pytest.mark.parametrize("path", ["lonely", "a.b.c"])
def test_the_line_of_what_is_missing_is_that_of_what_is_around_it(path):
    assert Document("x: 1\na: {y: 2}\n", "x.yaml").line(path) == (2 if path[0] == "a" else 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a:\n\tb: 1\n", "x.yaml:2: a tab"),
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3: a: given twice, in line 1"),
        ("a: {b: 1, b: 1}\n", "x.yaml:1: b: given twice"),
        ("a: [1\nb: 2\n", "x.yaml:2: not valid yaml"),
        ("a: !python/object:os.system {}\n", "x.yaml:1: not valid yaml: could not determine a constructor"),
        ("a: *b\n", "x.yaml:1: not valid yaml: found undefined alias"),
        ("a: &x 1\nb: &x 2\n", "x.yaml:2: not valid yaml: line 1 already has an anchor of this name"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2: not valid yaml"),
        ("a: \x01\n", "x.yaml: not valid yaml: unacceptable character"),
        ("a: 2020-99-99\n", "x.yaml:1: not valid yaml: '2020-99-99' is not a valid timestamp"),
        ("- a\n", "x.yaml: must be a mapping"),
        ("", "x.yaml: must be a mapping of sections, not empty"),
        ("? [a]\n: 1\n", "x.yaml:1: not valid yaml"),
    ],
)
def test_what_cannot_be_read_is_one_line(text, told):
    with pytest.raises(Unreadable) as raised:
        Document(text, "x.yaml")
    assert str(raised.value).startswith(told) and "\n" not in str(raised.value)


def test_types_are_as_lenient_as_the_hosts_and_as_strict_as_ours():
    training = keys.read({"training": {"micro_batch_size": "4", "gradient_accumulation_steps": 2.0}})["training"]
    assert training == {"micro_batch_size": 4, "gradient_accumulation_steps": 2}
    assert keys.read({"features": {"recompute": "yes"}})["features"]["recompute"] is True
    for wrong in ({"parallel": {"ep_plan": {"moe_num_chunks": "4"}}}, {"features": {"recompute": "perhaps"}},
                  {"training": {"micro_batch_size": True}}, {"training": {"micro_batch_size": 1.5}},
                  {"parallel": {"fsdp_plan": {"apply_modules": "lm_head"}}}, {"parallel": []}):  # fmt: skip
        with pytest.raises(ConfigError, match="must be"):
            keys.read(wrong)


def test_wildcards():
    layers = Pattern("layers.{2-3}.*", "path")
    assert layers.matches("layers.2.mlp.x") and not layers.matches("layers.4.mlp") and not layers.matches("layers.2")
    assert list(layers.examples([])) == ["layers.2.0", "layers.3.0"]
    assert Pattern("l?", "path").matches("lm") and not Pattern("l?", "path").matches("lmm")
    assert covered(Pattern("a.{0-1}", "p"), read_patterns(["a.{*}"], "p"))
    assert not covered(Pattern("a.{*}", "p"), read_patterns(["a.{1-9}"], "p"))
    assert list(prefixes("a.0.b", read_patterns(["a.{*}", "*.b"], "p"))) == [2, 3]
    for wrong in ("a.{}", "a.{x}", "a.{3-1}", "a.{1}"):
        with pytest.raises(ConfigError, match="is not a wildcard"):
            Pattern(wrong, "path")


L = "model.layers"


@pytest.mark.parametrize(
    ("region", "module", "told"),
    [
        (f"{L}.{{*}}.mlp.experts", f"{L}.{{*}}.mlp.experts", True),
        (f"{L}.{{*}}", f"{L}.{{*}}.mlp.experts", True),
        ("model", f"{L}.{{*}}.mlp.experts", True),
        (f"{L}.{{*}}.mlp", f"{L}.5.mlp.experts", True),
        (f"{L}.5.mlp", f"{L}.{{*}}.mlp.experts", True),
        (f"{L}.{{2-5}}", f"{L}.{{4-9}}.mlp.experts", True),
        (f"{L}.{{*}}.mlp.experts.3", f"{L}.{{*}}.mlp.experts", True),
        ("*mlp", f"{L}.{{*}}.mlp.experts", True),
        (f"{L}.{{*}}.mlp", "*experts", True),
        (f"{L}.7.mlp", "*.mlp.experts", True),
        ("lm_head", "*.mlp.experts", True),  # for all that the names say
        (f"{L}.{{*}}.self_attn", f"{L}.{{*}}.mlp.experts", False),
        (f"{L}.{{*}}.mlp.gate", f"{L}.{{*}}.mlp.experts", False),
        (f"{L}.{{*}}.mlp.expert", f"{L}.{{*}}.mlp.experts", False),
        (f"{L}.{{2-3}}", f"{L}.{{4-9}}.mlp.experts", False),
        ("model.visual.blocks.{*}", f"{L}.{{*}}.mlp.experts", False),
        ("*.self_attn", f"{L}.{{*}}.mlp.experts", False),
        ("lm_head", f"{L}.{{*}}.mlp.experts", False),
    ],
)
def test_whether_a_region_can_have_to_do_with_modules_of_another_name(region, module, told):
    one, other = (Pattern(text, "p") for text in (region, module))
    assert shares(one, other) is told


@pytest.mark.parametrize(
    ("edit", "old", "new"),
    [
        (Rename("a.key", "kez"), "  key: 1  # one\n", "  kez: 1  # one\n"),
        (Set("a.key", 4), "  key: 1  # one\n", "  key: 4  # one\n"),
        (Set("a.flag", True), 'flag: "false"', "flag: true"),
        (Remove("a.key"), "  key: 1  # one\n", ""),
        (Append("a.block", "z.{*}"), "    - y  # why\n", "    - y  # why\n    - z.{*}\n"),
        (Append("a.flow", "z.{*}"), "[x, 'y']", "[x, 'y', 'z.{*}']"),
    ],
)
def test_an_edit_changes_nothing_else(edit, old, new):
    text = (
        "# 注释\na:\n  key: 1  # one\n  flag: \"false\"\n  block:\n    - x\n    - y  # why\n  flow: [x, 'y'] # list\n"
    )
    made = apply(Document(text, "x.yaml"), edit)
    assert old in text and made.text == text.replace(old, new)


def test_line_ends_stay_as_they_are():
    text = "a:\r\n  block:\r\n    - x # why\r\n  key: 1\r\n"
    made = apply(Document(text, "x.yaml"), Append("a.block", "*.y"))
    assert made.text == text.replace("# why\r\n", "# why\r\n    - '*.y'\r\n")
    assert apply(made, Remove("a.key")).text == made.text.replace("  key: 1\r\n", "")
    assert apply(Document("a:\n- x", "x.yaml"), Append("a", "y")).text == "a:\n- x\n- y"


def test_an_edit_that_would_change_more_is_not_made():
    document = Document(ANCHORS, "anchors.yaml")
    for edit in (Set("base.a", 5), Append("three.names", "y"), Remove("one.a"), Rename("none.at.all", "x"),
                 Remove("base"), Set("one.b.c", 1)):  # fmt: skip
        assert apply(document, edit) is None, edit
    assert apply(document, Set("two.a", 5)).data["two"]["a"] == 5
    assert apply(Document("a: {b: 1, c: 2}\n", "flow.yaml"), Remove("a.b")) is None


def test_a_corrected_file_keeps_all_other_characters():
    from mindspeed_chunk import lint

    text = spoilt(
        ("dispatcher: chunkmoe", "dispatchr: chunkmoe"),
        ("moe_num_chunks: 4", "moe_num_chunks: 4\n    moe_chunk_size: 9"),
        ("chunk_mbs: 2", "chunk_mb: 2"),
        (', "model.language_model.layers.{*}"', ""), ("drop_last: true", "drop_last: false"),
    )  # fmt: skip
    document = Document(text, "x.yaml")
    made = report.fixed(document, lint.check(document))
    # the list of a flow style gets its item in the writer's own quotes
    assert made.text.replace("'", '"') == CLEAN.replace("'", '"')
    assert report.fixed(made, lint.check(made)).text == made.text
