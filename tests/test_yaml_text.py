"""The one reader of yamls: what lint, the settings and the embedded trainer refuse alike, in one line and soon."""

import json
import re
import sys

import pytest
import yaml

from lint_cases import CLEAN, EXAMPLE, spoilt
from mindspeed_chunk import wording, yaml_text
from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig, ConfigError
from mindspeed_chunk.standalone import __main__ as trainer
from mindspeed_chunk.standalone.config import load_config
from mindspeed_chunk.tools import lint
from soak import yamls

TINY = (EXAMPLE / "tiny.yaml").read_text(encoding="utf-8")


def bomb(levels, wide=10, form="[{}]", first="[x]"):
    """Aliases of aliases, `wide` at a level; the last is the number of chunks."""
    lines = [f"b0: &b0 {first}"]
    for level in range(1, levels):
        lines.append(f"b{level}: &b{level} {form.format(', '.join([f'*b{level - 1}'] * wide))}")
    return "\n".join(lines) + "\n" + spoilt(("moe_num_chunks: 4", f"moe_num_chunks: *b{levels - 1}"))


def seeded(value):
    return TINY.replace("  seed: 42\n", f"  seed: {value}\n").encode()


MANY = "more than 20000 values, with aliases written out, which is not supported; make it smaller"
REFUSED = {
    "timestamp": (seeded("!!timestamp x"),
                  r":\d+: not valid yaml: 'x' is not a valid timestamp; correct the line, or the one"),
    "integer": (seeded('!!int ""'), r":\d+: not valid yaml: '' is not a valid int"),
    "boolean": (seeded("!!bool x"), r":\d+: not valid yaml: 'x' is not a valid bool"),
    "float": (seeded("!!float x"), r":\d+: not valid yaml: 'x' is not a valid float"),
    "month 13": (seeded("2020-13-45"), r":\d+: not valid yaml: '2020-13-45' is not a valid timestamp"),
    "digits": (seeded("9" * 5000), r":\d+: not valid yaml: '9+\.\.\. is not a valid int"),
    "hexadecimal": (seeded("0x" + "f" * 5000), r":\d+: an integer of more than 64 bits, which is not supported"),
    "brackets": (seeded("[" * 3000), r":\d+: more than 50 nested levels, which is not supported"),
    "dashes": (b"a: 1\nb:\n" + b"- " * 3000, r":\d+: more than 50 nested levels"),
    "twice": (spoilt(("    moe_num_chunks: 4", "    moe_num_chunks: 4\n    moe_num_chunks: 2")).encode(),
              r":\d+: moe_num_chunks: given twice, in line \d+ and here, "
              "and the loader would silently take the last one"),
    "six levels": (bomb(6).encode(), rf":\d+: {MANY}"),
    "eight levels": (bomb(8).encode(), rf":\d+: {MANY}"),
    "thirty levels": (bomb(30, 2).encode(), rf":\d+: {MANY}"),
    "merges": (bomb(8, 10, "{{<<: [{}]}}", "{x: 1}").encode(), rf":\d+: {MANY}"),
    "deep aliases": (bomb(60, 1).encode(), r":\d+: more than 50 nested levels, with aliases"),
    "loop": (b"a: &a\n  b: *a\n", r":2: the alias a is inside its own anchor, which is not supported"),
    "large": (CLEAN.encode() + b"#" * 70_000, r": larger than 64 KiB; give a yaml file"),
    "GBK": (CLEAN.encode("gbk"), r":\d+: not UTF-8 text, at byte \d+; save it as UTF-8"),
    "latin-1": ("a: 1\nb: é\n".encode("latin-1"), r":2: not UTF-8 text, at byte 8; save it as UTF-8"),
    "UTF-16": (CLEAN.encode("utf-16"), r": UTF-16 text; save it as UTF-8"),
    "UTF-32": (CLEAN.encode("utf-32"), r": UTF-32 text; save it as UTF-8"),
}  # fmt: skip


@pytest.fixture
def both(monkeypatch, capsys, tmp_path):
    """Calls lint and the trainer on a path; returns the line that each says."""

    def call(path, *overrides):
        monkeypatch.setattr(sys, "argv", ["mindspeed-chunk", str(path)])
        told = []
        for main in (lint.main, lambda: trainer.main([str(path), *overrides])):
            assert main() == 2
            out, err = capsys.readouterr()
            assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1
            told.append(err.removeprefix("error: "))
        return told

    return call


@pytest.mark.parametrize("name", REFUSED)
def test_lint_and_the_trainer_say_the_same_of_what_cannot_be_read(both, tmp_path, name):
    data, told = REFUSED[name]
    path = tmp_path / "x.yaml"
    path.write_bytes(data)
    linted, trained = both(path)
    assert linted == trained and re.match(re.escape(str(path)) + told, linted), linted


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_said_soon_and_within_500_MB(tmp_path, name):
    yamls.warm(tmp_path)
    assert set(yamls.judge(REFUSED[name][0], tmp_path, limit=10).values()) == {"refused"}


def test_no_more_is_built_of_a_value_than_is_shown():
    value = ["x"]
    for _ in range(30):
        value = [value] * 10
    with pytest.raises(ConfigError) as raised:
        ChunkMoEConfig.from_mapping({"moe_num_chunks": value})
    assert len(str(raised.value)) < 250 and "\n" not in str(raised.value)
    looped: dict = {}
    looped["a"] = [looped]
    for wrong in (looped, 16**5000, "x" * 10**6, {"a" * 10**6: 1}, [float("nan"), b"x" * 10**6]):
        with pytest.raises(ConfigError) as raised:
            ChunkMBSConfig.from_mapping({"chunk_mbs": [wrong]})
        assert len(str(raised.value)) < 250


@pytest.mark.parametrize("value", [
    1, -1.5, "a'b", b"x", None, True, [], (), {}, set(), [1, "a", None], (1,), (1, 2), {"a": [1, {}]}, {3}, range(3),
    [[[]], {(): ()}], 2**80,
])  # fmt: skip
def test_what_is_short_is_shown_as_repr_shows_it(value):
    assert wording.shown(value) == repr(value)


def test_a_message_is_one_line_whatever_a_key_has_in_it(both, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(spoilt(("    moe_num_chunks: 4", '    "moe_a\\nb\\u2028\\e[31m\\ud800": 4')), encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_config(str(path), [], 4)
    assert r"parallel.ep_plan.moe_a\nb\u2028\x1b[31m\ud800: 4: unknown key" in str(raised.value)
    path.write_text(TINY + 'training: {}\n"a\\nb": [}', encoding="utf-8")
    both(path)


@pytest.mark.parametrize("path", ["x" * 5000, "a/" * 2500 + "x.yaml", "a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_one_line(both, path):
    for line in both(path):
        assert "cannot be read: " in line and len(line) < 400


def test_a_file_that_has_no_end_is_one_line(both):
    for line in both("/dev/zero"):
        assert line == "/dev/zero: larger than 64 KiB; give a yaml file\n"


def test_a_mark_of_utf_8_at_the_beginning_is_taken(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(CLEAN.encode("utf-8-sig"))
    assert yaml_text.sections(yaml_text.read(path), "x").data == yaml.safe_load(CLEAN)


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        (
            "training.seed=2020-13-45",
            "training.seed=2020-13-45:1: not valid yaml: '2020-13-45' is not a valid timestamp",
        ),
        ("training.seed=!!bool x", "training.seed=!!bool x:1: not valid yaml: 'x' is not a valid bool"),
        ("training.seed=" + "[" * 3000, "more than 50 nested levels"),
        ("training..seed=1", "training..seed=1: must read key.path=value"),
        ("training.lr=" + "9" * 400, "an integer of more than 64 bits"),
        ("training.lr=" + "9" * 5000, "is not a valid int"),
        ("training.lr=1" + "0" * 350 + ".0", "training.lr: inf: must be a number >= 0"),
    ],
)
def test_an_override_that_cannot_be_read_is_one_line(argument, told):
    with pytest.raises(ConfigError) as raised:
        load_config(EXAMPLE / "tiny.yaml", [argument], 2)
    assert told in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_an_override_changes_one_of_two_places_that_share_an_anchor(tmp_path):
    path = tmp_path / "x.yaml"
    shared = "features:\n  recompute: true\n  recompute_plan: &plan\n    apply_modules: [lm_head]\n"
    more = "  enable_activation_offload: true\n  activation_offload_plan: *plan\n"
    path.write_text(TINY.partition("features:")[0] + shared + more + "training: {}\n", encoding="utf-8")
    config, _ = load_config(path, ["features.recompute_plan.apply_modules=[a]"], 2)
    assert config.recompute_modules == ("a",) and config.offload_modules == ("lm_head",)


def test_a_number_beyond_64_bits_is_refused_by_the_settings():
    with pytest.raises(ConfigError, match=r"^moe_num_chunks: \d+(\.\.\.)?: must be below 2\^63; "):
        ChunkMoEConfig(moe_num_chunks=2**63)
    assert ChunkMoEConfig(moe_num_chunks=2**63 - 1)


def test_the_limits_are_far_from_what_is_written():
    for path in EXAMPLE.glob("*.yaml"):
        assert path.stat().st_size * 8 < yaml_text.MAX_BYTES
    assert json.loads((EXAMPLE / "tiny" / "config.json").read_text())["text_config"]["num_hidden_layers"] < 1000
