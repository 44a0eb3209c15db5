"""ChunkMBS in the look-alike's trainer: on, off, the host's own, wrong settings, a drifted host."""

import functools
import importlib.metadata
import math

import pytest
import yaml

from host_lookalike import FLAVOURS, PLAIN, drift, launch, losses, read_configs, run_code, write_config

pytest.importorskip("pydantic")
if not importlib.metadata.entry_points(group="torch.backends", name="mindspeed_chunk"):
    pytest.skip("mindspeed_chunk is not installed here, so torch does not load it", allow_module_level=True)

BLOCKS = ["layers.{*}"]
HOOKED = {"hook_modules": BLOCKS}
TRAINING = {"micro_batch_size": 3}
CHUNKED = {"dispatcher": "chunkmoe", "moe_num_chunks": 2}
MODULE = "mindspeed_mm.fsdp.features.communication.chunk_mbs"
APPLIER = "mindspeed_mm.fsdp.features.apply_features"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mbs")


def configured(path, flavour, plan=None, *, inner=BLOCKS, fsdp=HOOKED, features=(), **mbs):
    """A yaml with ChunkMBS, its last micro-chunk short; recompute and offload of `inner` where a flavour has them."""
    mbs = {"apply_modules": BLOCKS, "chunk_mbs": 2, **mbs}
    features = {"enable_chunk_mbs": True, "chunkmbs_plan": mbs, **dict(features)}
    apply, plan = {"apply_modules": inner}, plan or {"dispatcher": PLAIN[flavour]}
    path = write_config(path, plan, training=TRAINING, features=features)
    config = yaml.safe_load(path.read_text())
    config["parallel"]["fsdp_plan"] = fsdp
    if inner:
        config["parallel" if flavour == "26.0" else "features"] |= {"recompute": True, "recompute_plan": apply}
        config["model" if flavour == "26.0" else "features"]["activation_offload_plan"] = apply
        config["features"]["enable_activation_offload"] = True
    path.write_text(yaml.safe_dump(config))
    return path


def start(folder, flavour, plan=None, *, before=(), env=(), **settings):
    """The finished ranks of a run with ChunkMBS."""
    config = configured(folder / "run", flavour, plan, **settings)
    return launch(flavour, config, before=before, fork=True, **dict(env))


@functools.cache
def whole(folder, coefficient=0.0, skip=False):
    """Losses without ChunkMBS; the look-alikes' flavours compute alike."""
    features = {"loss_cfg": {"router_aux_loss_coef": coefficient}, "skip_moe_pad_tokens": skip}
    config = write_config(folder / "run", {"dispatcher": "alltoall"}, training=TRAINING, features=features)
    return losses(launch("master", config, fork=True))[0]


def same(ours, theirs):
    return all(math.isclose(float(a), float(b), rel_tol=1e-6) for a, b in zip(ours, theirs, strict=True))


def lines(finished, text="mindspeed_chunk: "):
    return [line for process in finished for line in (process.stdout + process.stderr).splitlines() if text in line]


@pytest.mark.parametrize("dispatcher", ["plain", "chunkmoe"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_trains_to_the_same_losses_with_recompute_and_offload_inside(folder, flavour, dispatcher):
    """Of blocks that two names match, too; and with a last micro-chunk that is smaller."""
    finished = start(
        folder, flavour, CHUNKED if dispatcher == "chunkmoe" else None, apply_modules=[*BLOCKS, "layers.0"]
    )
    trained, told = losses(finished)
    assert same(trained, whole(folder)) and len(set(trained)) == 3
    assert told["ran"] == ([] if dispatcher == "chunkmoe" else ["alltoall"])
    assert told["offloaded"] == [1, 2], "the offload has seen the batch, not its micro-chunks"
    (line,) = lines(finished, "ChunkMBS is on")
    assert "for 2 modules" in line and "chunk_mbs=2" in line
    (line,) = lines(finished, "ChunkMBS cuts")
    assert line.endswith("ChunkMBS cuts hidden_states, seq_mask; passed whole: none")


@pytest.mark.parametrize("mbs", [True, False], ids=["ChunkMBS", "whole batches"])
@pytest.mark.parametrize("dispatcher", ["plain", "chunkmoe"])
def test_op_replay_and_stashed_activations_of_the_newest_host(folder, dispatcher, mbs):
    """They act in the same checkpoints, on the router; flat arguments too."""
    scopes = [{"name": "router", "apply_modules": ["layers.{*}.gate"], "cache_ops": ["aten.mm.default"]}]
    inner = {"apply_modules": BLOCKS}
    features = {
        "enable_chunk_mbs": mbs,
        "recompute": True,
        "recompute_plan": {**inner, "flatten_inputs": True, "op_replay_scopes": scopes},
        "enable_activation_offload": True,
        "activation_offload_plan": {**inner, "impl": "stash"},
    }
    plan = CHUNKED if dispatcher == "chunkmoe" else None
    finished = start(folder, "newest", plan, inner=[], features=features)
    trained, told = losses(finished)
    assert same(trained, whole(folder)) and len(set(trained)) == 3
    assert told["ran"] == ["actstash", *(["alltoall"] if dispatcher == "plain" else []), "op_replay", "replayed"]
    assert len(lines(finished, "ChunkMBS is on")) == mbs


def test_allgather_of_a_host_that_counts_rows_itself(folder):
    trained, told = losses(start(folder, "master", {"dispatcher": "allgather"}))
    assert same(trained, whole(folder)) and told["ran"] == ["allgather"]


def test_padding_is_left_out_where_the_yaml_says_so(folder):
    skip = {"skip_moe_pad_tokens": True}
    expected = whole(folder, skip=True)
    assert not same(expected, whole(folder)), "the padding changes nothing here, so nothing is tested"
    assert same(losses(start(folder, "master", features=skip))[0], expected)
    theirs = start(folder, "master", features=skip, env={"MINDSPEED_CHUNK_MBS": "host"})
    assert all(process.returncode for process in theirs), "the host's own fault is gone; so may be the patch"


def test_auxiliary_loss_of_router_logits_is_the_batchs(folder):
    pytest.importorskip("transformers.utils.output_capturing")
    features = {"loss_cfg": {"router_aux_loss_coef": 0.3}}
    expected = whole(folder, coefficient=0.3)
    assert not same(expected, whole(folder))
    assert same(losses(start(folder, "master", features=features))[0], expected)


def test_the_hosts_own_runs_if_it_is_chosen(folder):
    finished = start(folder, "26.1", env={"MINDSPEED_CHUNK_MBS": "host"})
    trained, told = losses(finished)
    assert told == {"ran": ["alltoall", "host's ChunkMBS"], "stack": [], "offloaded": [1, 2]}
    assert same(trained, whole(folder))
    (line,) = lines(finished)
    assert line.endswith("mindspeed_chunk: MINDSPEED_CHUNK_MBS=host: the host's own ChunkMBS runs")


def test_a_wrong_batch_dim_ends_both_ranks_before_they_train(folder):
    for process in start(folder, "master", batch_dim=1):
        assert process.returncode and "step 0" not in process.stdout
        *_, last = process.stderr.strip().splitlines()
        assert last.endswith(
            "ChunkMBS, layers.0: features.chunkmbs_plan.batch_dim: 1: hidden_states is [3, 7, 10], and a batch has 3 "
            "samples; set it to 0"
        )


def test_a_wrong_setting_ends_both_ranks_with_one_line(folder):
    for process in start(folder, "master", chunk_mbs=0):
        assert process.returncode and "Traceback" not in process.stdout + process.stderr
        assert process.stderr == (
            "mindspeed_chunk: features.chunkmbs_plan.chunk_mbs: 0: must be an integer >= 1; give the samples of one "
            "micro-chunk\n"
        )


def test_blocks_that_are_wrapped_too_late_are_an_error(folder, tmp_path):
    """A host that applies ChunkMBS first would recompute and offload whole batches."""
    last = "        self.apply_chunk_mbs(model=model)\n"
    first = "        self.apply_recompute_models(model=model)\n"
    drift("master", tmp_path, APPLIER, (last, ""), (first, f"{last}{first}"))
    for process in start(folder, "master", before=(tmp_path,)):
        assert process.returncode
        *_, error = process.stderr.strip().splitlines()
        assert "apply_modules: ['layers.0', 'layers.1']: wrapped by ChunkMBS before" in error
        assert "features.recompute and features.enable_activation_offload" in error


@pytest.mark.parametrize(
    ("flavour", "module", "changes", "expected"),
    [
        (
            "master",
            MODULE,
            [("chunk_mbs_modules, chunkmbs_cfg", "modules, chunkmbs_cfg"), ("in chunk_mbs_modules:", "in modules:")],
            "expected apply_chunkmbs_module(chunk_mbs_modules, chunkmbs_cfg), called after recompute and activation "
            "offload, found apply_chunkmbs_module(modules, chunkmbs_cfg); MINDSPEED_CHUNK_MBS=host runs the host's own",
        ),
        (
            "26.1",
            APPLIER,
            [
                ("import apply_chunkmbs_module,", "import apply_chunkmbs_module as apply,"),
                ("apply_chunkmbs_module(c", "apply(c"),
            ],
            f"expected {APPLIER} to call it by this name, found another call; MINDSPEED_CHUNK_MBS=host runs the host's",
        ),
        (
            "26.0",
            APPLIER,
            [("def __call__(self, model)", "def __call__(self, model, state=None)")],
            "found FeaturesApplier.__call__(self, model, state); set it to false",
        ),
    ],
    ids=["apply_chunkmbs_module", "its importer", "26.0"],
)
def test_a_drifted_host_is_one_error_that_names_the_seam(folder, tmp_path, flavour, module, changes, expected):
    drift(flavour, tmp_path, module, *changes)
    config = configured(folder / "run", flavour)
    (process,) = launch(flavour, config, before=(tmp_path,), ranks=1, fork=True, WORLD_SIZE="2")
    assert process.returncode and "Traceback" not in process.stderr
    (line,) = [
        line for line in process.stderr.splitlines() if line.startswith("mindspeed_chunk: features.enable_chunk_mbs: ")
    ]
    assert expected in line


ON_AND_OFF = """
import sys
from mindspeed_mm.fsdp.features import apply_features
from mindspeed_mm.fsdp.params import argument
if FLAVOUR != "26.0":
    from mindspeed_mm.config.config_manager import ConfigManager
    from mindspeed_mm.fsdp.features.communication import chunk_mbs

def read(path):
    sys.argv = ["trainer.py", path]
    return argument.parse_args(argument.Arguments) if FLAVOUR == "26.0" else ConfigManager().load_and_parse()

def picture():
    if FLAVOUR == "26.0":
        return [apply_features.FeaturesApplier.__call__]
    return [chunk_mbs.apply_chunkmbs_module, apply_features.apply_chunkmbs_module]

before = picture()
from mindspeed_chunk.patches import PATCHES, install, remove
(patch,) = [p for p in PATCHES if p.name == ("features" if FLAVOUR == "26.0" else "ChunkMBS")]
for _ in range(2):
    install()
    install()
    assert patch.state == "applied", str(patch)
    read(OFF)
    assert picture() == before, "a run that does not ask for it sees the host's own"
    for _ in range(2):
        read(ON)
        assert not set(picture()) & set(before) and len(set(picture())) == 1
        assert picture()[0].__wrapped__ is before[0], "wrapped twice"
    remove()
    assert picture() == before and patch.state == "waiting"

install()
arguments = read(ON)
import torch
from mindspeed_chunk.observe import observe
class Block(torch.nn.Module):
    def forward(self, hidden_states, seq_mask=None):
        self.calls = getattr(self, "calls", 0) + 1
        return hidden_states
model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Block(), Block()])})
def apply():
    if FLAVOUR == "26.0":
        apply_features.FeaturesApplier(arguments.model)(model)
    else:
        apply_features.FeaturesApplier(arguments.features).pre_fully_shard_apply(model)
if FLAVOUR == "26.0":
    arguments.parallel.recompute = False
apply()
with observe() as events:
    model["layers"][0](torch.ones(5, 7, 10))
assert [event.kind for event in events] == ["micro_chunk"] * 3 and model["layers"][0].calls == 3
chunked = [block.forward for block in model["layers"]]
named = [(name, block) for block in model["layers"] for name in ("one name", "another")]
if FLAVOUR != "26.0":
    apply_features.apply_chunkmbs_module(named, arguments.features.chunkmbs_plan)
    assert [block.forward for block in model["layers"]] == chunked, "a block is wrapped once"
    class Outer(Block):
        pass
    outer = Outer()
    outer.inner = Block()
    named = [("outer", outer), ("outer.inner", outer.inner)]
    try:
        apply_features.apply_chunkmbs_module(named, arguments.features.chunkmbs_plan)
    except ValueError as error:
        assert "features.chunkmbs_plan.apply_modules: outer.inner: inside" in str(error)
    else:
        raise AssertionError("a block inside of a block")
"""


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_replaced_when_asked_for_taken_back_and_applied_twice(tmp_path, flavour):
    on = configured(tmp_path / "on", flavour)
    off = write_config(tmp_path / "off", {"dispatcher": PLAIN[flavour]}, features={"enable_chunk_mbs": False})
    text = f"FLAVOUR, ON, OFF = {flavour!r}, {str(on)!r}, {str(off)!r}\n{ON_AND_OFF}"
    run_code(flavour, text, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


PLAN = "features.chunkmbs_plan"
STRICT = {"MINDSPEED_CHUNK_STRICT": "1"}
NESTED = ["embed", "layers.{*}", "layers.{*}.experts"]
# name: ChunkMBS's settings, FSDP2's plan, environment, what the one line must begin with and hold; None: no error
READING = {
    "right": ({}, {}, {}, None),
    "a range of the same blocks": ({"apply_modules": ["layers.{0-1}"]}, {}, {}, None),
    "an index": ({"apply_modules": ["layers.1"]}, {}, {}, None),
    "no positions": ({"chunk_arg_indexs": []}, {}, {}, None),
    "nested, hooked": ({}, {"apply_modules": NESTED, "hook_modules": ["layers.{*}"]}, {}, None),
    "nested, hooked further out": ({}, {"apply_modules": NESTED, "hook_modules": ["layers"]}, {}, None),
    "chunk_mbs": ({"chunk_mbs": 0}, {}, {}, [f"{PLAN}.chunk_mbs: 0: must be an integer >= 1"]),
    "batch_dim": ({"batch_dim": 2}, {}, {}, [f"{PLAN}.batch_dim: 2: must be 0 or 1"]),
    "misspelt": ({"chunk_kwargs_names": []}, {}, {}, [f"{PLAN}.chunk_kwargs_names: []: unknown", "chunk_kwarg_names"]),
    "no blocks": ({"apply_modules": []}, {}, {}, [f"{PLAN}.apply_modules: []: ", "needs the names of the blocks"]),
    "nothing cut": (
        {"chunk_infer": False, "chunk_arg_indexs": []},
        {},
        {},
        [f"{PLAN}.chunk_infer: False: no argument would be cut"],
    ),
    "not recomputed": (
        {"apply_modules": ["layers.{*}", "head"]},
        {},
        {},
        [f"{PLAN}.apply_modules: ['head']: must be in ", "recompute_plan.apply_modules"],
    ),
    "strict": ({"inner": []}, {}, STRICT, ["recompute and ", ": 'off': ", "saves little memory"]),
    "experts are units": (
        {},
        {"hook_modules": ["embed"]},
        {},
        ["parallel.fsdp_plan.hook_modules: ['embed']: layers.{*}"],
    ),
    "nested": (
        {},
        {"apply_modules": NESTED},
        {},
        ["parallel.fsdp_plan.hook_modules: []: layers.{*}.experts are FSDP units inside", "list layers.{*}"],
    ),
    "nested, hooked further in": (
        {},
        {"apply_modules": NESTED, "hook_modules": ["layers.{*}", "layers.{*}.experts"]},
        {},
        ["parallel.fsdp_plan.hook_modules: ['layers.{*}', 'layers.{*}.experts']: ", "no modules inside them"],
    ),
}
OFFLOADED_TOO = {"loss_cfg": {"router_aux_loss_offload": True}}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_wrong_configuration_is_one_line_before_anything_starts(flavour, tmp_path):
    expected, cases = {}, {}
    for number, (name, (settings, fsdp, environment, wanted)) in enumerate(READING.items()):
        # with expert parallelism the experts are units, too; hooked here where the case is about something else
        path = configured(tmp_path / str(number), flavour, fsdp=fsdp or {"hook_modules": [*BLOCKS, "head"]}, **settings)
        cases[name], expected[name] = (str(path), environment), wanted
    if flavour == "26.0":
        cases["host's"] = str(configured(tmp_path / "host's", flavour)), {"MINDSPEED_CHUNK_MBS": "host"}
        expected["host's"] = ["MINDSPEED_CHUNK_MBS: 'host': this host does not have its own ChunkMBS"]
        cases["text"] = str(configured(tmp_path / "text", flavour, features={"enable_chunk_mbs": "yes"})), {}
        expected["text"] = ["features.enable_chunk_mbs: 'yes': must be a boolean"]
    else:
        cases["offload"] = str(configured(tmp_path / "offload", flavour, features=OFFLOADED_TOO)), {}
        expected["offload"] = ["features.loss_cfg.router_aux_loss_offload: True: "]
        cases["layer"] = str(configured(tmp_path / "layer", flavour, features={"enable_chunk_layer": True})), {}
        expected["layer"] = ["features.enable_chunk_layer: True: cuts a layer along", "MINDSPEED_CHUNK_MBS=host"]
    for name, message in read_configs(flavour, cases)[0].items():
        if expected[name] is None:
            assert message is None, (name, message)
        else:
            assert message and message.startswith("mindspeed_chunk: ") and "\n" not in message, (name, message)
            assert all(part in message for part in expected[name]), (name, message)


def test_without_recompute_and_offload_there_is_one_warning(folder):
    finished = start(folder, "master", inner=[])
    assert same(losses(finished)[0], whole(folder))
    (line,) = lines(finished, "saves little memory")
    assert "features.recompute and features.enable_activation_offload: 'off'" in line
