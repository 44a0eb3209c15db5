"""ChunkMoEConfig and ChunkMBSConfig: the published rules, and one readable line for every wrong value."""

import dataclasses
import warnings

import pytest

from mindspeed_chunk import ChunkMoEConfig, ConfigError, config
from mindspeed_chunk.config import ChunkMBSConfig


@pytest.fixture(autouse=True)
def no_warning_given_yet():
    config._warn.cache_clear()


HOST_KEYS = {
    "apply_modules": ["model.language_model.layers.{*}.mlp.experts"],
    "apply_efsdp_modules": [],
    "use_npu_fused_ops": True,
    "dispatcher": "chunkmoe",
    "ep_balance_strategy": None,
    3: "three",
}


def test_defaults_mean_one_chunk_rolling():
    made = ChunkMoEConfig()
    assert dataclasses.asdict(made) == {
        "moe_num_chunks": 0,
        "moe_chunk_size": 0,
        "chunk_moe_auto": False,
        "chunk_moe_max_rows": 0,
        "chunk_moe_recompute": False,
        "chunk_moe_keep": "",
        "chunk_moe_skip_unread": False,
        "chunk_moe_dispatch": "auto",
        "chunk_moe_schedule": "rolling",
        "chunk_moe_lookahead": 1,
        "chunk_moe_overlap_shared_expert": False,
        "chunk_moe_backend": "auto",
    }


def test_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ChunkMoEConfig().moe_num_chunks = 2
    with pytest.raises(TypeError):
        ChunkMoEConfig(2)


def test_keys_are_taken_and_host_keys_left_alone():
    mapping = {
        **HOST_KEYS,
        "moe_num_chunks": 4,
        "chunk_moe_recompute": True,
        "chunk_moe_schedule": "pair",
        "chunk_moe_backend": "cpu",
    }
    before = dict(mapping)
    made = ChunkMoEConfig.from_mapping(mapping)
    assert mapping == before
    assert made == ChunkMoEConfig(
        moe_num_chunks=4, chunk_moe_recompute=True, chunk_moe_schedule="pair", chunk_moe_backend="cpu"
    )
    assert ChunkMoEConfig.from_mapping(HOST_KEYS) == ChunkMoEConfig()
    assert ChunkMoEConfig.from_mapping({"moe_chunk_size": 512}).moe_chunk_size == 512


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("moe_num_chunks", -1, "must be an integer >= 0"),
        ("moe_num_chunks", 2.0, "must be an integer >= 0"),
        ("moe_num_chunks", "2", "must be an integer >= 0"),
        ("moe_num_chunks", True, "must be an integer >= 0"),
        ("moe_num_chunks", None, "must be an integer >= 0"),
        ("moe_num_chunks", [2], "must be an integer >= 0"),
        ("moe_chunk_size", -512, "must be an integer >= 0"),
        ("moe_chunk_size", False, "must be an integer >= 0"),
        ("chunk_moe_recompute", 1, "must be a boolean"),
        ("chunk_moe_recompute", "true", "must be a boolean"),
        ("chunk_moe_recompute", None, "must be a boolean"),
        ("chunk_moe_auto", 1, "must be a boolean"),
        ("chunk_moe_max_rows", -1, "must be an integer >= 0"),
        ("chunk_moe_lookahead", -1, "must be an integer >= 0"),
        ("chunk_moe_lookahead", "1", "must be an integer >= 0"),
        ("chunk_moe_overlap_shared_expert", "yes", "must be a boolean"),
        ("chunk_moe_schedule", "Rolling", f"must be one of {', '.join(config.SCHEDULES)}"),
        ("chunk_moe_schedule", ["pair"], f"must be one of {', '.join(config.SCHEDULES)}"),
        ("chunk_moe_backend", "tpu", f"must be one of {', '.join(config.BACKENDS)}"),
        ("chunk_moe_backend", None, f"must be one of {', '.join(config.BACKENDS)}"),
    ],
)
def test_wrong_value_is_one_line_with_path_value_and_rule(key, value, rule):
    with pytest.raises(ConfigError) as error:
        ChunkMoEConfig.from_mapping({**HOST_KEYS, key: value})
    text = str(error.value)
    assert text.startswith(f"parallel.ep_plan.{key}: {value!r}: {rule}; ")
    assert "\n" not in text
    with pytest.raises(ConfigError) as error:
        ChunkMoEConfig(**{key: value})
    assert str(error.value).startswith(f"{key}: {value!r}: {rule}; ")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("moe_num_chunk", "moe_num_chunks"),
        ("moe_chunks_size", "moe_chunk_size"),
        ("chunk_moe_recomputation", "chunk_moe_recompute"),
        ("moe_schedule", "chunk_moe_schedule"),
        ("chunk_moe_back_end", "chunk_moe_backend"),
    ],
)
def test_unknown_key_names_the_nearest(key, nearest):
    with pytest.raises(ConfigError) as error:
        ChunkMoEConfig.from_mapping({key: 2}, path="plan")
    assert str(error.value) == f"plan.{key}: 2: unknown key; the nearest one is {nearest}"


def test_an_unknown_key_that_is_near_to_none_is_told_all():
    with pytest.raises(ConfigError) as error:
        ChunkMoEConfig.from_mapping({"moe_z": 2}, path="plan")
    names = ", ".join(field.name for field in dataclasses.fields(ChunkMoEConfig))
    assert str(error.value) == f"plan.moe_z: 2: unknown key; known are {names}"


@pytest.mark.parametrize("mapping", [None, [], "moe_num_chunks", 4])
def test_what_is_not_a_mapping(mapping):
    with pytest.raises(ConfigError, match=r"^parallel\.ep_plan: .*: must be a mapping; "):
        ChunkMoEConfig.from_mapping(mapping)


def test_long_values_are_cut():
    with pytest.raises(ConfigError) as error:
        ChunkMoEConfig.from_mapping({"moe_num_chunks": ["line\n"] * 1000})
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


def test_both_set_is_one_warning():
    with pytest.warns(UserWarning, match="moe_num_chunks is used") as caught:
        made = ChunkMoEConfig.from_mapping({"moe_num_chunks": 2, "moe_chunk_size": 512})
        ChunkMoEConfig.from_mapping({"moe_num_chunks": 2, "moe_chunk_size": 512})
        dataclasses.replace(made, chunk_moe_recompute=True)
    assert len(caught) == 1
    assert (made.moe_num_chunks, made.moe_chunk_size) == (2, 512)


def test_one_set_is_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChunkMoEConfig(moe_num_chunks=2)
        ChunkMoEConfig(moe_chunk_size=2)
        ChunkMoEConfig(moe_num_chunks=2, moe_chunk_size=0)


def test_micro_chunks_defaults_and_lists_of_a_yaml():
    assert dataclasses.asdict(ChunkMBSConfig()) == {
        "apply_modules": (),
        "chunk_mbs": 1,
        "batch_dim": 0,
        "chunk_arg_indexs": (0,),
        "chunk_kwarg_names": (),
        "chunk_whole_names": (),
        "chunk_infer": True,
    }
    plan = {
        "apply_modules": ["model.layers.{*}"],
        "chunk_mbs": 3,
        "batch_dim": 1,
        "chunk_arg_indexs": [],
        "chunk_kwarg_names": ["mask"],
        "chunk_whole_names": ["bias"],
        "chunk_infer": False,
    }
    made = ChunkMBSConfig.from_mapping(plan)
    expected = {key: tuple(value) if isinstance(value, list) else value for key, value in plan.items()}
    assert dataclasses.asdict(made) == expected and made == ChunkMBSConfig(**plan)
    hash(made)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("chunk_mbs", 0, "must be an integer >= 1"),
        ("chunk_mbs", -2, "must be an integer >= 1"),
        ("chunk_mbs", True, "must be an integer >= 1"),
        ("chunk_mbs", None, "must be an integer >= 1"),
        ("chunk_mbs", "2", "must be an integer >= 1"),
        ("chunk_mbs", 2.0, "must be an integer >= 1"),
        ("batch_dim", -1, "must be 0 or 1"),
        ("batch_dim", 2, "must be 0 or 1"),
        ("batch_dim", False, "must be 0 or 1"),
        ("chunk_infer", 1, "must be a boolean"),
        ("chunk_infer", "false", "must be a boolean"),
        ("chunk_arg_indexs", None, "must be a list of integers >= 0"),
        ("chunk_arg_indexs", 0, "must be a list of integers >= 0"),
        ("chunk_arg_indexs", [-1], "must be a list of integers >= 0"),
        ("chunk_arg_indexs", [True], "must be a list of integers >= 0"),
        ("chunk_kwarg_names", None, "must be a list of names"),
        ("chunk_kwarg_names", "attention_mask", "must be a list of names"),
        ("chunk_kwarg_names", [""], "must be a list of names"),
        ("chunk_whole_names", [3], "must be a list of names"),
        ("apply_modules", "model.layers.{*}", "must be a list of names"),
    ],
)
def test_wrong_value_of_the_micro_chunks_is_one_line(key, value, rule):
    with pytest.raises(ConfigError) as error:
        ChunkMBSConfig.from_mapping({key: value})
    assert str(error.value).startswith(f"features.chunkmbs_plan.{key}: {value!r}: {rule}; ")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError) as error:
        ChunkMBSConfig(**{key: value})
    assert str(error.value).startswith(f"{key}: {value!r}: {rule}; ")


def test_micro_chunks_know_every_key_of_their_plan():
    with pytest.raises(ConfigError) as error:
        ChunkMBSConfig.from_mapping({"chunk_mbs": 2, "chunk_arg_indices": [0]})
    assert str(error.value) == (
        "features.chunkmbs_plan.chunk_arg_indices: [0]: unknown key; the nearest one is chunk_arg_indexs"
    )
    with pytest.raises(ConfigError, match=r"^features\.chunkmbs_plan: None: must be a mapping; "):
        ChunkMBSConfig.from_mapping(None)


def test_what_is_kept():
    assert ChunkMoEConfig().keep == "activations"
    assert ChunkMoEConfig(chunk_moe_recompute=True).keep == "rows"
    assert ChunkMoEConfig(chunk_moe_recompute=True, chunk_moe_keep="rows").keep == "rows"
    assert ChunkMoEConfig(chunk_moe_keep="input").keep == "input"
    with pytest.raises(ConfigError, match="chunk_moe_lookahead: 2: has no meaning with chunk_moe_schedule: pair"):
        ChunkMoEConfig(chunk_moe_schedule="pair", chunk_moe_lookahead=2)
    for key in ("moe_num_chunks", "moe_chunk_size"):
        with pytest.raises(ConfigError, match=f"{key}: 2: contradicts chunk_moe_auto: true"):
            ChunkMoEConfig(chunk_moe_auto=True, **{key: 2})
    with pytest.raises(ConfigError, match="chunk_moe_max_rows: 9: has no meaning with moe_chunk_size"):
        ChunkMoEConfig(moe_chunk_size=2, chunk_moe_max_rows=9)
    with pytest.raises(ConfigError, match="chunk_moe_keep: 'input': contradicts chunk_moe_recompute: true"):
        ChunkMoEConfig(chunk_moe_recompute=True, chunk_moe_keep="input")
    with pytest.raises(ConfigError, match="parallel.ep_plan.chunk_moe_keep: 'row': must be one of activations, rows"):
        ChunkMoEConfig.from_mapping({"chunk_moe_keep": "row"})


def test_a_plan_that_cuts_nothing_is_refused():
    plan = {"chunk_arg_indexs": [], "chunk_infer": False}
    with pytest.raises(ConfigError, match="features.chunkmbs_plan.chunk_infer: False: no argument would be cut"):
        ChunkMBSConfig.from_mapping(plan)
    assert ChunkMBSConfig.from_mapping({**plan, "chunk_kwarg_names": ["x"]}).chunk_kwarg_names == ("x",)
