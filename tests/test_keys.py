"""What a misspelt key may have meant is decided in one place, and said by the settings, lint and the trainer alike."""

import functools

import pytest
import yaml

from lint_cases import CLEAN, EXAMPLE, spoilt
from mindspeed_chunk import keys, lint
from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig, ConfigError
from mindspeed_chunk.lint.document import Document
from mindspeed_chunk.standalone.config import load_config

MEANT = {
    "chunk_moe_num": "the nearest one is moe_num_chunks",
    "moe_chunks_num": "the nearest one is moe_num_chunks",
    "moe_num_chunk": "the nearest one is moe_num_chunks",
    "moe_chunks_size": "the nearest one is moe_chunk_size",
    "chunk_moe_look_ahead": "the nearest one is chunk_moe_lookahead",
    "moe_z": "known are moe_num_chunks, ",
}


@pytest.mark.parametrize("key", MEANT)
def test_the_settings_lint_and_the_trainer_say_the_same_of_a_misspelt_key(key):
    with pytest.raises(ConfigError) as settings:
        ChunkMoEConfig.from_mapping({key: 2})
    assert str(settings.value).startswith(f"parallel.ep_plan.{key}: 2: unknown key; {MEANT[key]}")
    with pytest.raises(ConfigError) as trained:
        load_config(EXAMPLE / "tiny.yaml", [f"parallel.ep_plan.{key}=2"], 2)
    found = lint.check(Document(spoilt(("moe_num_chunks: 4", f"moe_num_chunks: 4\n    {key}: 2")), "x.yaml"))
    assert str(settings.value) == str(trained.value) and str(settings.value) in [each.message for each in found]
    # with another dispatcher, nobody but lint has to know it; what it says is the same
    text = spoilt(("moe_num_chunks: 4", f"{key}: 2"), ("dispatcher: chunkmoe", "dispatcher: alltoall"))
    told = [each.message for each in lint.check(Document(text, "x.yaml")) if key in each.message]
    assert told == ([str(settings.value)] if "nearest" in MEANT[key] else [])


@pytest.mark.parametrize(
    ("path", "value", "meant"),
    [
        ("training.micro_batchsize", 4, "micro_batch_size"),
        ("features.enable_chunk_mb", True, "enable_chunk_mbs"),
        ("parallel.ep_plan.dispatchr", "alltoall", "dispatcher"),
        ("standalone.metric_path", "x", "metrics_path"),
    ],
)
def test_lint_and_the_trainer_say_the_same_of_a_key_of_the_host(path, value, meant):
    told = f"{path}: {value!r}: unknown key; the nearest one is {meant}"
    assert told in load_config(EXAMPLE / "tiny.yaml", [f"{path}={value}"], 2)[1]
    section, _, key = path.rpartition(".")
    last = section.rpartition(".")[2]
    text = CLEAN if f"{last}:\n" in CLEAN else CLEAN + f"{last}:\n"
    indent = "    " if "." in section else "  "
    text = text.replace(f"{last}:\n", f"{last}:\n{indent}{key}: {value}\n", 1)
    assert told in [each.message for each in lint.check(Document(text, "x.yaml"))]


@pytest.mark.parametrize("value", ["two", "-2", "1.5", "true"])
@pytest.mark.parametrize(
    "path",
    [
        "parallel.ep_plan.moe_num_chunks",
        "parallel.ep_plan.apply_modules",
        "parallel.expert_parallel_size",
        "parallel.fully_shard_parallel_size",
        "features.chunkmbs_plan.chunk_mbs",
        "features.chunkmbs_plan.chunk_arg_indexs",
        "training.micro_batch_size",
        "training",
    ],
)
def test_lint_the_trainer_and_the_settings_say_the_same_of_a_wrong_value(path, value):
    with pytest.raises(ConfigError) as trained:
        load_config(EXAMPLE / "tiny.yaml", [f"{path}={value}"], 2)
    assert str(trained.value) in said_by_lint(path, value)
    section, _, key = path.rpartition(".")
    made = {"parallel.ep_plan": ChunkMoEConfig, "features.chunkmbs_plan": ChunkMBSConfig}.get(section)
    if made and (section, key) != ("parallel.ep_plan", "apply_modules"):
        with pytest.raises(ConfigError) as settings:
            made.from_mapping({key: yaml.safe_load(value)})
        assert str(settings.value) == str(trained.value)


@pytest.mark.parametrize("path", ["features.recompute", "features.enable_chunk_mbs"])
def test_a_switch_is_told_alike_by_all(path):
    with pytest.raises(ConfigError, match=f"^{path}: 'maybe': must be a boolean; write true or false, ") as trained:
        load_config(EXAMPLE / "tiny.yaml", [f"{path}=maybe"], 2)
    assert said_by_lint(path, "maybe") == [str(trained.value)]


def said_by_lint(path, value):
    """Messages, without file and line, about the clean yaml with another value."""
    data = yaml.safe_load(CLEAN)
    *parents, key = path.split(".")
    functools.reduce(dict.__getitem__, parents, data)[key] = yaml.safe_load(value)
    try:
        return [each.message for each in lint.check(Document(yaml.safe_dump(data), "x.yaml"))]
    except lint.Unreadable as error:
        return [str(error).partition(": ")[2]]


def test_no_key_of_the_table_is_meant_for_another():
    for section in keys.PATHS:
        assert all(keys.nearest(key, section) == [] for key in keys.at(section))


def test_a_key_that_is_near_to_none_and_a_long_one_have_no_nearest():
    assert keys.nearest("zzz", "training") == keys.nearest("micro_batch_size" * 9, "training") == []
    assert keys.nearest("size_batch_micro", "training") == ["micro_batch_size"]


def test_a_section_of_thousands_of_unknown_keys_is_told_soon(tmp_path):
    from soak import yamls

    yamls.warm(tmp_path)
    text = CLEAN + "".join(f"  key_number_{n}: 1\n" for n in range(1500))
    yamls.judge(text.encode(), tmp_path, limit=10)


def test_a_key_of_chunk_mbs_is_told_by_the_same_table():
    with pytest.raises(ConfigError, match="chunkmbs_plan.mbs_chunk: 1: unknown key; the nearest one is chunk_mbs$"):
        ChunkMBSConfig.from_mapping({"mbs_chunk": 1})
