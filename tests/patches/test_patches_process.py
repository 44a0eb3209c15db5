"""Setting and taking back of the patches, and what a process notices of them; one fresh process a case."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from host_lookalike import FLAVOURS, OWN_CHUNKMOE, PLAIN, ROOT, read_configs, run_code, write_config
from launcher import HANG_S

pytest.importorskip("pydantic")
autoloaded = pytest.mark.skipif(
    not importlib.metadata.entry_points(group="torch.backends", name="mindspeed_chunk"),
    reason="mindspeed_chunk is not installed here, so torch does not load it",
)

BOTH_WAYS = """
import sys
FLAVOUR, OWN_CHUNKMOE = {flavour!r}, {own!r}
from mindspeed_mm.fsdp.distributed import parallel_state, torch_parallelize
from mindspeed_mm.fsdp.distributed.expert_parallel import ep_dispatcher, expert_parallel
from mindspeed_mm.fsdp.params import argument, parallel_args

MODULES = parallel_state, torch_parallelize, ep_dispatcher, expert_parallel, argument, parallel_args
CLASSES = parallel_args.EPPlanConfig, parallel_args.ParallelArguments, argument.Arguments

def picture():
    functions = {{(m.__name__, name): value for m in MODULES for name, value in vars(m).items() if callable(value)}}
    methods = {{(c, name): getattr(c, name, None) for c in CLASSES for name in ("__init__", "model_post_init")}}
    return {{**functions, **methods}}, [type(finder).__module__ for finder in sys.meta_path]

def admits_chunkmoe():
    plan = {{"dispatcher": "chunkmoe", "apply_modules": ["experts"], "moe_num_chunks": 2}}
    try:
        parallel_args.EPPlanConfig(**plan)
        if FLAVOUR != "26.0":
            argument.Arguments(parallel={{"expert_parallel_size": 2, "ep_plan": plan}})
        return True
    except (ValueError, TypeError):
        return False

assert admits_chunkmoe() is OWN_CHUNKMOE
before, finders = picture()
from mindspeed_chunk.patches import PATCHES, install, remove

for _ in range(2):  # and once more after all has been taken back
    install()
    install()
    states = {{patch.name: patch.state for patch in PATCHES if patch.module in sys.modules}}
    assert states.pop("config name") == ("not needed" if OWN_CHUNKMOE else "applied"), states
    assert len(states) >= 4 and set(states.values()) == {{"applied"}}, states
    assert admits_chunkmoe()
    wrapped = expert_parallel.expert_parallelize_modules
    assert torch_parallelize.expert_parallelize_modules is wrapped
    assert not hasattr(wrapped.__wrapped__, "__wrapped__"), "wrapped twice"
    ours = {{key[-1] for key, value in picture()[0].items() if value is not before.get(key)}}
    checked = "parse_args" if FLAVOUR == "26.0" else "model_post_init"
    allowed = {{"expert_parallelize_modules", "init_parallel_state", checked}}
    allowed |= {{"__init__"}} if FLAVOUR == "26.0" else set()
    assert ours == allowed, ours
    import mindspeed_mm.fsdp.distributed.expert_parallel.ep_chunkmoe as published
    assert (getattr(published, "__file__", None) is not None) is OWN_CHUNKMOE
    remove()
    after, finders_after = picture()
    assert after.keys() == before.keys() and all(after[key] is before[key] for key in before)
    assert [name for name in finders_after if name.startswith("mindspeed_chunk")] == []
    assert admits_chunkmoe() is OWN_CHUNKMOE
    assert {{patch.state for patch in PATCHES}} == {{"waiting"}}
remove()
"""


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_host_imported_first_patches_set_twice_and_taken_back(flavour):
    run_code(
        flavour,
        BOTH_WAYS.format(flavour=flavour, own=flavour in OWN_CHUNKMOE),
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_a_plan_of_26_0_that_does_not_ask_keeps_the_hosts_answer_to_unknown_keys():
    run_code(
        "26.0",
        "from mindspeed_chunk.patches import install\n"
        "install()\n"
        "from mindspeed_mm.fsdp.params.parallel_args import EPPlanConfig\n"
        "assert EPPlanConfig(dispatcher='chunkmoe', moe_num_chunks=2).moe_num_chunks == 2\n"
        "for plan in ({'dispatcher': 'fused'}, {}):\n"
        "    try:\n"
        "        EPPlanConfig(moe_num_chunks=2, **plan)\n"
        "    except TypeError as error:\n"
        "        assert 'unexpected keyword argument' in str(error)\n"
        "    else:\n"
        "        raise AssertionError(plan)\n",
    )


@autoloaded
def test_a_process_without_the_host_gets_hooks_and_nothing_else():
    run_code(
        "master",
        "import sys\n"
        "import torch\n"
        "ours = {name for name in sys.modules if name.startswith('mindspeed_chunk')}\n"
        "patches = {f'mindspeed_chunk.patches{name}' for name in ('', '.hooks', '.settings')}\n"
        "assert ours - patches == {'mindspeed_chunk', 'mindspeed_chunk_autoload'}, ours\n"
        "assert not {'mindspeed_mm', 'pydantic', 'yaml', 'transformers'} & set(sys.modules)\n"
        "from mindspeed_chunk.patches import PATCHES, installed\n"
        "assert installed() and {patch.state for patch in PATCHES} == {'waiting'}\n"
        "from torch.utils.data import DataLoader\n"
        "batches = list(DataLoader(range(6), batch_size=3, num_workers=2, multiprocessing_context='fork'))\n"
        "assert [batch.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]\n"
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()\n",
    )


def test_launcher_without_a_script_says_how():
    command = [sys.executable, "-m", "mindspeed_chunk.launch"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for arguments, expected in (([], "usage: "), (["nowhere.py"], "nowhere.py: no such file")):
        answer = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
        assert answer.returncode == 2 and expected in answer.stderr and "Traceback" not in answer.stderr


TELL_PATHS = """
import sys
import mindspeed_chunk.patches
print(mindspeed_chunk.patches.__file__)
print(sys.path[0])
"""


def launch(*options, script, cwd):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, *options, "-m", "mindspeed_chunk.launch", str(script)]
    answer = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=HANG_S)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


def test_launcher_in_the_root_of_the_checkout(tmp_path):
    """There the checkout comes before an installed package, and has all that this has."""
    (tmp_path / "script.py").write_text(TELL_PATHS)
    file, first = launch(script=tmp_path / "script.py", cwd=ROOT)
    assert file == str(ROOT / "mindspeed_chunk" / "patches" / "__init__.py")
    assert first == str(tmp_path)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P is new in Python 3.11")
def test_launcher_keeps_a_safe_path(tmp_path):
    (tmp_path / "script.py").write_text(TELL_PATHS)
    _, first = launch("-P", script=tmp_path / "script.py", cwd=tmp_path)
    assert first == next(filter(None, sys.path))


EXPERTS = {"training": {"lora": {"enable": True, "target_modules": ["layers.{*}.experts.gate_up_proj"]}}}
# name: plan, other settings, environment, what the one line must hold
WRONG = {
    "misspelt": ({"moe_chunksize": 2}, {}, {}, ["ep_plan.moe_chunksize: 2", "moe_chunk_size"]),
    "misspelt recompute": ({"chunk_moe_recomputed": True}, {}, {}, ["chunk_moe_recomputed", "chunk_moe_recompute"]),
    "text": ({"moe_num_chunks": "2"}, {}, {}, ["ep_plan.moe_num_chunks: '2': must be an integer >= 0"]),
    "boolean": ({"moe_num_chunks": True}, {}, {}, ["ep_plan.moe_num_chunks: True: must be an integer >= 0"]),
    "negative": ({"moe_chunk_size": -1}, {}, {}, ["ep_plan.moe_chunk_size: -1: must be an integer >= 0"]),
    "number": ({"chunk_moe_recompute": 1}, {}, {}, ["ep_plan.chunk_moe_recompute: 1: must be a boolean"]),
    "schedule": ({"chunk_moe_schedule": "rollin"}, {}, {}, ["chunk_moe_schedule: 'rollin'", "rolling, pair"]),
    "experts": ({}, {"sizes": {"num_experts": 7}}, {}, ["expert_parallel_size: 2", "number of experts, 7"]),
    "no experts": ({"apply_modules": []}, {}, {}, ["parallel.ep_plan.apply_modules: []"]),
    "LoRA": ({}, EXPERTS, {}, ["training.lora.target_modules: ['layers.{*}.experts.gate_up_proj']"]),
    "strict": (
        {},
        {"expert_parallel_size": 1},
        {"MINDSPEED_CHUNK_STRICT": "1"},
        ["parallel.expert_parallel_size: 1", "parallel.ep_plan.dispatcher"],
    ),
}


def replaying(*names, recompute=True):
    """A recompute with a scope of op replay for each of the names."""
    scopes = [{"apply_modules": [name]} for name in names]
    return {"recompute": recompute, "recompute_plan": {"apply_modules": ["layers.{*}"], "op_replay_scopes": scopes}}


SINCE_26_1 = {
    "balance": ({}, {"features": {"enable_ep_balance": True}}, {}, ["features.enable_ep_balance: True"]),
    "op replay": (
        {},
        {"features": replaying("layers.{*}.gate", "layers.{0-1}")},
        {},
        ["features.recompute_plan.op_replay_scopes: ['layers.{0-1}']: contains chunked layers (layers.{*}.experts)"],
    ),
    "quantised": (
        {},
        {"training": {"quantization_plan": {"recipe_name": "mxfp8"}}},
        {},
        ["training.quantization_plan.recipe_name: 'mxfp8'"],
    ),
}
NO_OWN = {
    "host's": (
        {},
        {},
        {"MINDSPEED_CHUNK_DISPATCHER": "host"},
        ["MINDSPEED_CHUNK_DISPATCHER: 'host'", "does not have its own chunkmoe"],
    )
}
# pydantic of a host with a chunkmoe of its own, which has typed fields for these, answers or converts first
TYPED_BY_HOST = ("text", "boolean", "number")
RIGHT = {
    "right": ({"moe_num_chunks": 2}, {}, {}),
    "LoRA elsewhere": ({}, {"training": {"lora": {"enable": True}}}, {}),
    "LoRA on shared experts": (
        {},
        {"training": {"lora": {"enable": True, "target_modules": ["layers.{*}.shared_experts.down_proj"]}}},
        {},
    ),
    "LoRA off": ({}, {"training": {"lora": {**EXPERTS["training"]["lora"], "enable": False}}}, {}),
    "size 1": ({}, {"expert_parallel_size": 1}, {}),
    "op replay elsewhere": ({}, {"features": replaying("layers.{*}.gate", "embed")}, {}),
    "op replay without a recompute": ({}, {"features": replaying("layers.{*}", recompute=False)}, {}),
}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_wrong_configuration_is_one_line_before_anything_starts(flavour, tmp_path):
    wrong = {
        **WRONG,
        **(SINCE_26_1 if flavour != "26.0" else {}),
        **(NO_OWN if flavour not in OWN_CHUNKMOE else {}),
    }
    if flavour in OWN_CHUNKMOE:
        wrong = {name: case for name, case in wrong.items() if name not in TYPED_BY_HOST}
    cases = {}
    for number, (name, (plan, settings, environment, *_)) in enumerate((wrong | RIGHT).items()):
        for dispatcher in ("chunkmoe", PLAIN[flavour]):
            if dispatcher == PLAIN[flavour] and flavour == "26.0":
                plan = {key: value for key, value in plan.items() if key == "apply_modules"}
            path = write_config(tmp_path / f"{number}-{dispatcher}", {"dispatcher": dispatcher, **plan}, **settings)
            cases[f"{name}, {dispatcher}"] = str(path), environment
    told, errors = read_configs(flavour, cases)
    for name in wrong | RIGHT:
        assert told[f"{name}, {PLAIN[flavour]}"] is None, "a plan that does not ask for it is not ours to check"
    assert [told[f"{name}, chunkmoe"] for name in RIGHT] == [None] * len(RIGHT)
    for name, (*_, expected) in wrong.items():
        message = told[f"{name}, chunkmoe"]
        assert message is not None, name
        assert message.startswith("mindspeed_chunk: ") and "\n" not in message
        assert all(part in message for part in expected), (name, message)
    warnings = [line for line in errors if "expert_parallel_size" in line]
    assert len(warnings) == 1, warnings
