"""Ranks of the look-alike's trainer that were started with different yamls, or one of them without the plugin.

As it was, each of these runs hung: in the first layer, in the first backward, or before the first iteration.
"""

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import yaml

from host_lookalike import FLAVOURS, PLAIN, launch, losses, write_config
from launcher import HANG_S
from mindspeed_chunk import consistency
from mindspeed_chunk.patches import parallel_state

pytest.importorskip("pydantic")
if not importlib.metadata.entry_points(group="torch.backends", name="mindspeed_chunk"):
    pytest.skip("mindspeed_chunk is not installed here, so torch does not load it", allow_module_level=True)

BLOCKS = ["layers.{*}"]
SAME = "mindspeed_chunk: every rank must run the same configuration, but "
CURE = "; start all ranks with the same yaml, arguments, environment and version of the plugin"


def yamls(folder, flavour, *changes):
    """A yaml for each of `changes` {dotted key: value} of one with both features of ours."""
    memory = "parallel" if flavour == "26.0" else "features"
    paths = []
    for number, change in enumerate(changes):
        path = write_config(folder / f"{number}", {"dispatcher": "chunkmoe", "moe_num_chunks": 2})
        config = yaml.safe_load(path.read_text())
        config["parallel"]["fsdp_plan"] = {"hook_modules": BLOCKS}
        config["features"] = {"enable_chunk_mbs": True, "chunkmbs_plan": {"apply_modules": BLOCKS}}
        config[memory] |= {"recompute": True, "recompute_plan": {"apply_modules": BLOCKS}}
        for key, value in change.items():
            *parents, last = key.split(".")
            section = config
            for parent in parents:
                section = section[parent]
            section[last] = value
        path.write_text(yaml.safe_dump(config))
        paths.append(path)
    return paths


def started(paths, flavour="master", grace=10, **options):
    """The finished ranks. One that has not compared goes on, and is stopped when another has ended."""
    return launch(flavour, paths, ranks=len(paths), grace=grace, fork=True, **options)


def told(finished, ranks):
    """The one line that all `ranks` ended with; the others ended, too."""
    assert all(process.returncode for process in finished)
    lines = []
    for rank in ranks:
        assert "Traceback" not in finished[rank].stderr, finished[rank].stderr
        lines += [line for line in finished[rank].stderr.splitlines() if line.startswith(SAME)]
    assert len(lines) == len(ranks) and len(set(lines)) == 1, [process.stderr for process in finished]
    return lines[0].removeprefix(SAME)


CASES = {
    "recompute": ({"features.recompute": False}, "features.recompute: True on rank 0, False on rank 1"),
    "dispatcher": (
        {"parallel.ep_plan.dispatcher": "alltoall"},
        "parallel.ep_plan.dispatcher: 'chunkmoe' on rank 0, 'alltoall' on rank 1",
    ),
    "ChunkMBS": ({"features.enable_chunk_mbs": False}, "features.enable_chunk_mbs: True on rank 0, False on rank 1"),
    "accumulation": (
        {"training.gradient_accumulation_steps": 2},
        "training.gradient_accumulation_steps: None on rank 0, 2 on rank 1",
    ),
    "batch size": ({"training.micro_batch_size": 3}, "training.micro_batch_size: 2 on rank 0, 3 on rank 1"),
    "chunks": ({"parallel.ep_plan.moe_num_chunks": 3}, "parallel.ep_plan.moe_num_chunks: 2 on rank 0, 3 on rank 1"),
    "keep": (
        {"parallel.ep_plan.chunk_moe_keep": "input"},
        "parallel.ep_plan.chunk_moe_keep: not set on rank 0, 'input' on rank 1",
    ),
    "a default that is on": (
        {"features.chunkmbs_plan.chunk_infer": False},
        "features.chunkmbs_plan.chunk_infer: True on rank 0, False on rank 1",
    ),
    "a default that is a number": (
        {"parallel.ep_plan.chunk_moe_lookahead": 0},
        "parallel.ep_plan.chunk_moe_lookahead: 1 on rank 0, 0 on rank 1",
    ),
    "EP size": ({"parallel.expert_parallel_size": 1}, "parallel.expert_fully_shard_parallel_size: 1 on rank 0, 2 on"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_with_another_yaml_ends_both_with_one_line(tmp_path, case):
    change, expected = CASES[case]
    line = told(started(yamls(tmp_path, "master", {}, change)), (0, 1))
    assert line.startswith(expected) and line.endswith(CURE)
    assert line.count(" on rank 0") == (2 if case == "EP size" else 1)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_rank_that_asks_for_nothing_tells_what_it_has_and_waits_for_nobody(tmp_path, flavour):
    """Rank 0, which holds the store."""
    off = {"parallel.ep_plan.dispatcher": PLAIN[flavour], "features.enable_chunk_mbs": False}
    recompute = f"{'parallel' if flavour == '26.0' else 'features'}.recompute"
    paths = yamls(tmp_path, flavour, off | {recompute: False}, {})
    if flavour == "26.0":  # which refuses keys of ours beside another dispatcher
        config = yaml.safe_load(paths[0].read_text())
        del config["parallel"]["ep_plan"]["moe_num_chunks"]
        paths[0].write_text(yaml.safe_dump(config))
    finished = started(paths, flavour)
    line = told(finished, (1,))
    assert SAME not in finished[0].stderr
    assert f"parallel.ep_plan.dispatcher: {PLAIN[flavour]!r} on rank 0, 'chunkmoe' on rank 1" in line
    assert "features.enable_chunk_mbs: False on rank 0, True on rank 1" in line
    assert f"{recompute}: False on rank 0, True on rank 1" in line


def test_one_of_four_ranks(tmp_path):
    paths = yamls(tmp_path, "master", {}, {}, {"features.recompute": False}, {})
    line = told(started(paths), range(4))
    assert line == f"features.recompute: True on ranks 0-1, 3, False on rank 2{CURE}"


def test_a_rank_without_the_plugin_is_named_when_the_time_is_over(tmp_path):
    """It runs the host's own ChunkMBS, which cuts the batch in another way."""
    (tmp_path / "little_patience.py").write_text(
        "from mindspeed_chunk import consistency\nconsistency.PATIENCE_S = 4.0\n"
    )
    plain = {"parallel.ep_plan.dispatcher": "alltoall", "training.plugin": ["little_patience"]}
    (path,) = yamls(tmp_path, "master", plain)
    own = {1: {"MINDSPEED_CHUNK_DISABLE": "1"}}
    finished = started([path] * 2, before=(tmp_path,), own=own)
    line = told(finished, (0,))
    assert line.startswith("rank 1: no answer within 4 s: start all ranks at the same time, install the plugin there, ")
    assert SAME not in finished[1].stderr


def test_equal_yamls_train(tmp_path):
    finished = started(yamls(tmp_path, "master", {}, {}), grace=HANG_S)
    assert len(losses(finished)[0]) == 3


class Broken:
    """A store that cannot be reached."""

    def __getattr__(self, name):
        raise RuntimeError("no store\nhere")


@pytest.mark.parametrize("asks", [False, True])
def test_a_store_that_fails_ends_no_run(monkeypatch, caplog, asks):
    """One that asks for a feature of ours says that nothing was compared; any other runs as without the plugin."""
    called = prepare(monkeypatch, asks, Broken())
    assert parallel_state._after_comparison(called.append)("state") is None and called == ["state"]
    assert len(caplog.records) == asks
    assert not asks or "configurations were not compared: RuntimeError: no store" in caplog.text


def test_one_group_is_compared_once(monkeypatch):
    """The host keeps one state, and may be asked for it again on some ranks alone."""
    called = prepare(monkeypatch, False, store := Counted(dist.HashStore()))
    for _ in range(2):
        parallel_state._after_comparison(called.append)("state")
        assert called.pop() == "state" and store.calls == 5
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", Group())
    parallel_state._after_comparison(called.append)("state")
    assert store.calls == 10, "another group"


class Counted:
    def __init__(self, store):
        self.store, self.calls = store, 0

    def __getattr__(self, name):
        self.calls += 1
        return getattr(self.store, name)


class Group:
    """A process group."""


def prepare(monkeypatch, asks, store):
    """Rank 0 of 2, with a plan; returns a list for calls of the host's function."""
    plan = SimpleNamespace(dispatcher="chunkmoe" if asks else "alltoall")
    parallel, training = SimpleNamespace(ep_plan=plan), SimpleNamespace(micro_batch_size=2)
    monkeypatch.setattr(parallel_state, "_arguments", SimpleNamespace(parallel=parallel, training=training, model=None))
    monkeypatch.setattr(parallel_state, "_group", None)
    for name, value in {"is_initialized": True, "get_rank": 0, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", Group())
    monkeypatch.setattr(consistency, "default_store", lambda: store)
    return []
