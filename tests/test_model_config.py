"""A model's config.json: what cannot be used, or would take all memory, is one line in lint, trainer and planner."""

import json
import time
from pathlib import Path

import pytest

from lint_cases import EXAMPLE, spoilt
from mindspeed_chunk import lint, model_config
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.lint.document import Document
from mindspeed_chunk.planner.model import load_model
from mindspeed_chunk.standalone.model import build_model, read_model_config
from standalone_ranks import read

TINY = json.loads((EXAMPLE / "tiny" / "config.json").read_text(encoding="utf-8"))


def folder(path, change):
    """The example's config with `change` put into it; text is the whole file."""
    content = {key: dict(value) if isinstance(value, dict) else value for key, value in TINY.items()}
    if isinstance(change, str):
        text = change
    else:
        for place, value in change.items():
            section, _, key = place.rpartition(".")
            (content[section] if section else content)[key] = value
        text = json.dumps(content)
    (path / "config.json").write_text(text, encoding="utf-8")
    return path


# What lint, and what the trainer, says of it; None: it can be used.
BAD = {
    "layers": ({"text_config.num_hidden_layers": 100_000}, "its num_hidden_layers is 100000, but must be at most 1000"),
    "more layers": (
        {"text_config.num_hidden_layers": 10**12},
        "its num_hidden_layers is 1000000000000, but must be at most",
    ),
    "list of layers": (
        {"text_config.layer_types": ["full_attention"] * 5000},
        "its layer_types is 5000, but must be at most",
    ),
    "depth": ({"vision_config.depth": 10**9}, "its depth is 1000000000, but must be at most 1000"),
    "brackets": ("[" * 3000, "its config.json is not valid: "),
    "many brackets": ("[" * 200_000, "its config.json is not valid: "),
    "list": ("[]", "its config.json is not valid: it must be a mapping"),
    "digits": ('{"a": ' + "9" * 5000 + "}", "its config.json is not valid: "),
    "large": (" " * 2_000_000, "its config.json is larger than 1024 KiB"),
    "interval": ({"text_config.layer_types": None, "text_config.full_attention_interval": 0}, ""),
    "no list": ({"text_config.layer_types": 5}, ""),
}


@pytest.mark.parametrize("name", BAD)
def test_lint_and_the_trainer_say_it_in_one_line(tmp_path, name):
    change, told = BAD[name]
    folder(tmp_path, change)
    began = time.process_time()
    text = spoilt((f"{EXAMPLE / 'tiny'}", str(tmp_path)))
    found = [each.message for each in lint.check(Document(text, "x.yaml")) if each.rule == "model-not-checked"]
    with pytest.raises(ConfigError) as raised:
        read_model_config(read(f"model.model_name_or_path={tmp_path}"), 256)
    assert time.process_time() - began < 20  # an attempt to build the model takes minutes
    assert len(found) == 1 and told in found[0] and told in str(raised.value)
    assert all(len(line.splitlines()) == 1 for line in (*found, str(raised.value)))


def test_a_folder_that_may_not_be_looked_into_is_one_line(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)  # as Python up to 3.13 does for everybody but root
    monkeypatch.setattr(Path, "open", lambda path, mode: refuse(path))
    text = spoilt((f"{EXAMPLE / 'tiny'}", str(tmp_path)))
    (found,) = [each for each in lint.check(Document(text, "x.yaml")) if each.rule == "model-not-checked"]
    assert "its config.json cannot be read: Permission denied" in found.message
    with pytest.raises(model_config.BadConfig, match="^its config.json cannot be read: Permission denied$"):
        model_config.read(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 2500])
def test_a_name_of_5000_characters_is_one_line(name):
    text = spoilt((f"{EXAMPLE / 'tiny'}", name))
    (found,) = [each for each in lint.check(Document(text, "x.yaml")) if each.rule == "model-not-checked"]
    assert "no config.json here or next to the yaml" in found.message
    with pytest.raises(ConfigError, match="has no config.json"):
        read_model_config(read(f"model.model_name_or_path={name}"), 256)
    with pytest.raises(ConfigError, match="no folder with a config.json, and no built-in model"):
        load_model(name)


def test_a_model_of_more_modules_than_a_second_builds_is_not_built(tmp_path, monkeypatch):
    from mindspeed_chunk.lint import model

    monkeypatch.setattr(model, "MAX_MODULES", 50)
    with pytest.raises(model.CannotBuild, match="^the model has more than 50 modules$"):
        model.module_names(folder(tmp_path, {}))


def test_a_model_that_this_machine_cannot_hold_is_one_line(tmp_path):
    config = read(f"model.model_name_or_path={folder(tmp_path, {'text_config.vocab_size': 10**11})}")
    with pytest.raises(ConfigError, match=r"its weights are [\d.e+]+ GiB in fp32, but this machine has [\d.e+]+ GiB"):
        build_model(config, read_model_config(config, 256))


PLANNED = {
    "interval": ({"text_config.layer_types": None, "text_config.full_attention_interval": 0},
                 "text_config.full_attention_interval: 0: must be an integer of at least 1 and at most 1000;"),
    "no list": ({"text_config.layer_types": 5}, "layer_types: 5: must be a list of 4 (num_hidden_layers), each"),
    "odd list": ({"text_config.layer_types": [[], {}, 1, None]}, "must be a list of 4 (num_hidden_layers), each"),
    "text": ({"text_config": 5}, "text_config: 5: must be a mapping"),
    "vision": ({"vision_config": [1]}, "vision_config: [1]: must be a mapping"),
    "layers": ({"text_config.num_hidden_layers": 10**9}, "is 1000000000, but must be at most 1000"),
    "size": ({"text_config.hidden_size": 10**30}, "must be an integer of at least 1 and at most 1000000000;"),
    "brackets": ("[" * 3000, "its config.json is not valid: it has too many nested brackets"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANNED)
def test_the_planner_says_it_in_one_line(tmp_path, name):
    change, told = PLANNED[name]
    with pytest.raises(ConfigError) as raised:
        load_model(str(folder(tmp_path, change)))
    assert told in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_a_section_that_is_null_is_one_that_is_missing(tmp_path):
    vision = load_model(str(folder(tmp_path, {"vision_config": None}))).vision
    assert vision.depth == 27
    text = load_model(str(folder(tmp_path, {"text_config": None})))
    assert (text.num_hidden_layers, text.hidden_size) == (40, 2048)
