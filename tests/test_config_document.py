"""docs/config.md has every key with its rule, and every environment variable that the code reads."""

import dataclasses
import re
from pathlib import Path

import pytest

import mindspeed_chunk
import setting_tables
from lint_cases import EXAMPLE
from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig, ConfigError
from mindspeed_chunk.patches import settings
from mindspeed_chunk.standalone.config import load_config

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
# Ours by their beginning; those of others as they are asked for.
OURS = re.compile(r"\bMINDSPEED_[A-Z_]+\b")
ASKED = re.compile(r"""environ(?:\.get\(|\.pop\(|\[)"([A-Z_]+)\"""")


@pytest.mark.parametrize("config", [ChunkMoEConfig, ChunkMBSConfig])
def test_each_key_has_a_rule_that_its_default_keeps_and_a_meaning(config):
    said = setting_tables.meanings(config)
    for field in dataclasses.fields(config):
        rule = field.metadata["rule"]
        assert rule.holds(field.default) and not rule.holds(object())
        assert said[field.name], f"{config.__name__}'s docstring says nothing of {field.name}"
        with pytest.raises(ConfigError, match=re.escape(f"{field.name}: None: {rule.words}; {rule.way_out}")):
            config(**{field.name: None})
    assert set(said) == {field.name for field in dataclasses.fields(config)}


def test_every_key_that_the_trainer_reads_is_told_once():
    rows = setting_tables.trainer_keys()
    assert {path for path, *_ in rows} == set(load_config(EXAMPLE / "tiny.yaml", [], 2)[0].values)
    assert all(meaning and DOCUMENT.count(f"| `{path}` |") == 1 for path, _, _, meaning in rows)


def test_every_environment_variable_is_told():
    folders = [Path(mindspeed_chunk.__file__).parent, Path(settings.__file__).parent]
    package = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "ascend").rglob("*.py"))
    read = {*OURS.findall(package + tests), *ASKED.findall(package)}
    assert {"RANK", "MINDSPEED_HOME", *settings.VARIABLES} <= read
    untold = [name for name in sorted(read) if f"`{name}" not in DOCUMENT]
    assert not untold, "not in docs/config.md"
    # a switch without a row would be missing in doctor, too
    assert set(settings.VARIABLES) == {
        value for name, value in vars(settings).items() if str(value).startswith("MINDSPEED_")
    }
