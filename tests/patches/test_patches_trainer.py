"""The look-alike's trainer as a user starts it: a script on two ranks, nothing imported by hand."""

import functools
import importlib.metadata
import math

import pytest

from host_lookalike import FLAVOURS, drift, launch, losses, write_config

pytest.importorskip("pydantic")
if not importlib.metadata.entry_points(group="torch.backends", name="mindspeed_chunk"):
    pytest.skip("mindspeed_chunk is not installed here, so torch does not load it", allow_module_level=True)

CHUNKED = {"dispatcher": "chunkmoe", "moe_num_chunks": 2}
OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
THROUGH = ("-m", "mindspeed_chunk.launch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def plain(folder):
    """Losses of the master's alltoall, the plugin installed; the look-alikes' flavours compute alike."""
    return start(folder, "master", {"dispatcher": "alltoall"})


def start(folder, flavour, plan, **keys):
    options = {name: keys.pop(name) for name in list(keys) if name in ("through", "before", "fork") or name.isupper()}
    config = write_config(folder / "run", plan, **keys)
    return losses(launch(flavour, config, **options))


def refused(folder, flavour, plan, **keys):
    """stdout and stderr of one rank of a run that must end with an error, before it joins the others."""
    options = {name: keys.pop(name) for name in list(keys) if name in ("through", "before", "fork") or name.isupper()}
    config = write_config(folder / "run", plan, **keys)
    (process,) = launch(flavour, config, ranks=1, WORLD_SIZE="2", **options)
    assert process.returncode != 0, process.stdout
    return process.stdout, process.stderr


@functools.cache
def chunked_run(folder, flavour):
    """The finished ranks of a plain run with chunkmoe; shared by the tests."""
    return launch(flavour, write_config(folder / "run", CHUNKED))


@functools.cache
def hide(folder):
    """A folder that makes an interpreter believe that the plugin was never installed."""
    (folder / "hidden").mkdir()
    (folder / "hidden" / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata, sys\n"
        "found = metadata.entry_points\n"
        "def entry_points(**which):\n"
        "    return [point for point in found(**which) if point.name != 'mindspeed_chunk']\n"
        "metadata.entry_points = entry_points\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'mindspeed_chunk':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    return folder / "hidden"


@pytest.mark.parametrize(
    "flavour", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("26") else name for name in FLAVOURS]
)
def test_chunkmoe_in_the_yaml_trains_to_the_same_losses(folder, plain, flavour):
    chunked, told = losses(chunked_run(folder, flavour))
    assert told["ran"] == [], "the host's own dispatcher was not to run"
    assert len(chunked) == len(plain[0]) == 3
    for ours, theirs in zip(chunked, plain[0]):
        assert math.isclose(float(ours), float(theirs), rel_tol=1e-6)
    assert len(set(chunked)) == 3


def test_alltoall_in_the_yaml_runs_nothing_of_ours(plain):
    assert plain[1] == {"ran": ["alltoall"], "stack": [], "offloaded": []}


@pytest.mark.slow
@pytest.mark.parametrize("without", ["uninstalled", "disabled"])
def test_alltoall_is_bit_equal_without_the_plugin(folder, plain, without):
    if without == "uninstalled":
        assert start(folder, "master", {"dispatcher": "alltoall"}, before=(hide(folder),)) == plain
    else:
        assert start(folder, "master", {"dispatcher": "alltoall"}, MINDSPEED_CHUNK_DISABLE="1") == plain


@pytest.mark.slow
@pytest.mark.parametrize("without", ["uninstalled", "disabled", "no autoload", "disabled, launched"])
def test_chunkmoe_without_the_plugin_is_the_hosts_own_error(folder, without):
    options = {
        "uninstalled": {"before": (hide(folder),)},
        "disabled": {"MINDSPEED_CHUNK_DISABLE": "1"},
        "no autoload": OFF,
        "disabled, launched": {"MINDSPEED_CHUNK_DISABLE": "1", "through": THROUGH, **OFF},
    }[without]
    stdout, stderr = refused(folder, "master", CHUNKED, **options)
    assert "Input should be 'alltoall', 'allgather' or 'mc2'" in stdout
    assert "ConfigValidationError" in stderr and "mindspeed_chunk:" not in stderr


def test_launcher_where_torch_loads_no_backends(folder, plain):
    chunked, told = start(folder, "master", CHUNKED, through=THROUGH, **OFF)
    assert told["ran"] == []
    assert all(math.isclose(float(a), float(b), rel_tol=1e-6) for a, b in zip(chunked, plain[0], strict=True))


def test_a_misspelt_key_ends_both_ranks_with_one_line(folder):
    config = write_config(folder / "run", {"dispatcher": "chunkmoe", "moe_num_chunk": 2})
    for process in launch("master", config, fork=True):
        assert process.returncode != 0
        assert process.stderr == (
            "mindspeed_chunk: parallel.ep_plan.moe_num_chunk: 2: unknown key; the nearest one is moe_num_chunks\n"
        )


def test_more_expert_parallel_ranks_than_ranks_end_the_run_at_its_start(folder):
    _, stderr = refused(folder, "master", CHUNKED, fork=True, expert_parallel_size=4)
    assert stderr == (
        "mindspeed_chunk: parallel.expert_parallel_size: 4: must divide the number of ranks, 2; change one of the two\n"
    )


def test_a_device_without_a_back_end_ends_the_run_at_its_start(folder, tmp_path):
    drift("master", tmp_path, "mindspeed_mm.fsdp.utils.device", ('"cpu"', '"xpu"'))
    _, stderr = refused(folder, "master", CHUNKED, fork=True, before=(tmp_path,))
    (line,) = stderr.splitlines()
    assert line.startswith("mindspeed_chunk: parallel.ep_plan.chunk_moe_backend: 'auto': ") and "xpu" in line


def test_expert_parallel_size_1_is_one_warning_and_trains(folder, plain):
    config = write_config(folder / "run", CHUNKED, expert_parallel_size=1)
    finished = launch("master", config, fork=True)
    trained, told = losses(finished)
    assert told["ran"] == [] and len(trained) == 3
    (warning,) = [line for process in finished for line in process.stderr.splitlines() if "mindspeed_chunk" in line]
    assert "parallel.expert_parallel_size: 1" in warning and "parallel.ep_plan.dispatcher" in warning


@pytest.mark.parametrize(
    ("flavour", "module", "change", "expected"),
    [
        (
            "master",
            "mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher",
            ("routing_weights", "router_weights"),
            "dispatcher (mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher.ep_forward): drifted: expected "
            "ep_forward(num_experts, routing_weights, ",
        ),
        (
            "26.1",
            "mindspeed_mm.fsdp.distributed.expert_parallel.expert_parallel",
            ("plan: EPPlanConfig)", "plan: EPPlanConfig, state)"),
            "expected expert_parallelize_modules(modules, ep_mesh, plan), found "
            "expert_parallelize_modules(modules, ep_mesh, plan, state)",
        ),
    ],
    ids=["ep_forward", "expert_parallelize_modules"],
)
def test_a_drifted_host_is_one_error_that_names_the_seam(folder, tmp_path, flavour, module, change, expected):
    drift(flavour, tmp_path, module, change)
    _, stderr = refused(folder, flavour, CHUNKED, fork=True, before=(tmp_path,))
    lines = [line for line in stderr.splitlines() if line.startswith("mindspeed_chunk: parallel.ep_plan.dispatcher")]
    assert len(lines) == 1 and expected in lines[0] and "use dispatcher: alltoall" in lines[0]
    assert "found" in lines[0] and "Traceback" not in stderr


def test_a_host_whose_names_of_dispatchers_have_drifted_says_so(folder, tmp_path):
    names = '"alltoall", "allgather", "mc2"'
    change = (f"Literal[{names}]", 'Literal["a2a", "mc2"]'), ('= "alltoall"', '= "a2a"')
    drift("master", tmp_path, "mindspeed_mm.fsdp.params.parallel_args", *change)
    stdout, stderr = refused(folder, "master", CHUNKED, fork=True, before=(tmp_path,))
    (line,) = [line for line in stderr.splitlines() if line.startswith("mindspeed_chunk:")]
    assert "config name (mindspeed_mm.fsdp.params.parallel_args.EPPlanConfig.dispatcher): drifted" in line
    assert "expected a Literal with alltoall" in line and "found EPPlanConfig.dispatcher of ('a2a', 'mc2')" in line
    assert "Input should be 'a2a' or 'mc2'" in stdout, "and then the host refuses the name"


def test_a_drifted_host_runs_alltoall_as_before(folder, tmp_path, plain):
    module = "mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher"
    drift("master", tmp_path, module, ("ep_balance_strategy", "balance_strategy"))
    model = "mindspeed_mm.fsdp.models.qwen3_5_moe.modeling_qwen3_5_moe"
    drift("master", tmp_path, model, ("ep_balance_strategy", "balance_strategy"))
    assert start(folder, "master", {"dispatcher": "alltoall"}, fork=True, before=(tmp_path,)) == plain


def test_padding_is_left_out_where_the_yaml_says_so(folder):
    features = {"skip_moe_pad_tokens": True}
    expected, _ = start(folder, "master", {"dispatcher": "alltoall"}, fork=True, features=features)
    chunked, told = start(folder, "master", CHUNKED, fork=True, features=features)
    assert told["ran"] == []
    assert all(math.isclose(float(a), float(b), rel_tol=1e-6) for a, b in zip(chunked, expected, strict=True))


def test_newest_host_log_says_whose_chunkmoe_runs(folder):
    ours = chunked_run(folder, "newest")
    assert losses(ours)[1]["ran"] == []
    assert "the host's own chunkmoe is not used (MINDSPEED_CHUNK_DISPATCHER=host chooses it)" in ours[0].stdout
    config = write_config(folder / "run", CHUNKED)
    theirs = launch("newest", config, MINDSPEED_CHUNK_DISPATCHER="host")
    assert losses(theirs)[1] == {"ran": ["native chunkmoe"], "stack": [], "offloaded": []}
    assert "MINDSPEED_CHUNK_DISPATCHER=host: the host's own chunkmoe runs" in theirs[0].stdout
