"""`mindspeed-chunk`: the command line, and `doctor` against small packages, the look-alikes and the real host."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import host_lookalike
import mindspeed_chunk
import real_host
from json_records import assert_record
from launcher import HANG_S
from mindspeed_chunk import copies
from mindspeed_chunk.patches import config_name, start_checks
from mindspeed_chunk.patches.record import APPLIED, NOT_NEEDED
from mindspeed_chunk.tools import doctor, environment, host_probe

ROOT = Path(__file__).resolve().parents[2]
OURS = ("MINDSPEED_CHUNK_", "MINDSPEED_HOME", "MINDSPEED_MM_HOME", "TORCH_DEVICE", "NON_MEGATRON", "ASCEND_")
EP = "mindspeed_mm/fsdp/distributed/expert_parallel"
CHUNKMOE_PATCHES = ("config name", "start checks", "expert-parallel plan", "dispatcher", "published module")

# The newest master's shapes, with no more in them than the patches look at.
HOST = {
    "mindspeed/fsdp/__init__.py": "",
    "mindspeed_mm/__init__.py": "import os, sys\nassert os.environ['NON_MEGATRON'] == 'true'\nprint('noise')\n",
    "mindspeed_mm/fsdp/params/parallel_args.py": (
        "from typing import Literal\n"
        "class EPPlanConfig:\n    dispatcher: Literal['alltoall', 'allgather', 'mc2', 'chunkmoe'] = 'alltoall'\n"
        "class ParallelArguments:\n    pass\n"
    ),
    "mindspeed_mm/fsdp/params/argument.py": "class Arguments:\n    def model_post_init(self, context):\n        pass\n",
    f"{EP}/expert_parallel.py": "def expert_parallelize_modules(modules, ep_mesh, plan):\n    pass\n",
    f"{EP}/ep_dispatcher.py": (
        "def ep_forward(num_experts, routing_weights, selected_experts, hidden_states, fc1_weight, fc2_weight,\n"
        "               ep_group=None, fused=True, swiglu_limit=0.0, swiglu_alpha=None, ep_balance_strategy=None,\n"
        "               skip_moe_pad_tokens=False, seq_mask=None, activation=None):\n    pass\n"
    ),
    f"{EP}/expert_fully_shard_parallel.py": "def hccl_premul_sum_wrapper(op, output_name):\n    return op\n",
}
DRIFTED = {
    f"{EP}/ep_dispatcher.py": HOST[f"{EP}/ep_dispatcher.py"].replace("hidden_states", "tokens"),
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def host(tmp_path):
    return write(tmp_path / "host", HOST)


def run(*arguments, cwd=None, path=(), **variables):
    """`mindspeed-chunk ARGUMENTS` in a process that has none of the variables that doctor looks at but those given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    packages = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "mindspeed_chunk.tools", *arguments]
    variables = {"PYTHONPATH": os.pathsep.join(packages), **{name: str(value) for name, value in variables.items()}}
    return subprocess.run(command, env={**kept, **variables}, cwd=cwd, capture_output=True, text=True, timeout=HANG_S)


def diagnose(**keywords):
    answer = run("doctor", "--json", **keywords)
    assert answer.returncode in (0, 1), answer.stderr
    report = json.loads(answer.stdout)
    assert_record("doctor", report)
    assert report["ok"] == (answer.returncode == 0) == (not report["reasons"])
    return report


def states(report):
    return {patch["name"]: patch["state"] for patch in report["patches"]}


def test_version_and_help_import_no_torch():
    assert run("--version").stdout.strip() == f"mindspeed_chunk {mindspeed_chunk.__version__}"
    answer = run("--help")
    assert answer.returncode == 0
    assert "doctor" in answer.stdout and "bench" in answer.stdout
    code = (
        "import sys\n"
        "from mindspeed_chunk.tools.__main__ import main\n"
        "sys.argv[1:] = [{!r}]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
    )
    for option in ("--version", "--help"):
        subprocess.run([sys.executable, "-c", code.format(option)], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "words, told", [(["docter"], "'docter'"), (["--foo"], "--foo"), ([], "give a command: doctor, ")]
)
def test_wrong_command(words, told):
    answer = run(*words)
    assert answer.returncode == 2
    assert told in answer.stderr and answer.stderr.startswith("error: ") and answer.stderr.count("\n") == 1


def test_a_reader_that_has_seen_enough_is_no_error():
    words = f"{sys.executable} -m mindspeed_chunk.tools lint --markdown | head -n 1"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_bench_is_a_command():
    answer = run("bench", "--help")
    assert answer.returncode == 0
    assert "--link" in answer.stdout


def test_table_of_patches_is_current():
    text = (ROOT / "patches" / "README.md").read_text(encoding="utf-8")
    assert doctor.markdown() in text, "put the output of `mindspeed-chunk doctor --markdown` into patches/README.md"
    assert run("doctor", "--markdown").stdout.strip() == doctor.markdown()


def test_no_host(tmp_path):
    answer = run("doctor", cwd=tmp_path)
    assert answer.returncode == 1
    assert "only the embedded trainer" in answer.stdout
    assert mindspeed_chunk.__version__ in answer.stdout
    assert answer.stdout.count("\n") < 40
    assert not answer.stderr


def test_checkout_in_the_current_folder_is_pointed_at(host):
    answer = run("doctor", cwd=host, MINDSPEED_CHUNK_DEVICE="cpu")
    assert answer.returncode == 1
    assert "checkout in this folder" in " ".join(answer.stdout.split())


def test_host_with_a_chunkmoe_of_its_own(host):
    variables = {"MINDSPEED_HOME": host, "MINDSPEED_MM_HOME": host}
    report = diagnose(**variables)
    found = states(report)
    assert found["config name"] == "not needed"
    assert {found[name] for name in ("start checks", "expert-parallel plan", "published module")} == {"applied"}
    assert found["dispatcher"] == "ready"
    assert report["chunkmoe"] == {"runs": "ours", "host_has_one": True}
    assert report["host"]["generation"] == "newest master"
    assert report["host"]["all_reduce_wrapper"] == "in its source"
    assert report["autoload"]["on"]
    if report["device"] == "cpu":
        assert any("MINDSPEED_CHUNK_DEVICE=cpu" in reason for reason in report["reasons"])
    assert "mindspeed_mm is found by MINDSPEED_MM_HOME only: " in "\n".join(report["reasons"]), (
        "a run would not find it"
    )
    assert "only: " not in "\n".join(diagnose(**variables, path=[host])["reasons"])

    report = diagnose(**variables, MINDSPEED_CHUNK_DISPATCHER="host")
    assert report["chunkmoe"]["runs"] == "the host's"


def test_choice_of_a_chunkmoe_that_the_host_has_not(host, monkeypatch):
    names = host / "mindspeed_mm/fsdp/params/parallel_args.py"
    names.write_text(names.read_text().replace(", 'chunkmoe'", ""))
    report = diagnose(path=[host], MINDSPEED_CHUNK_DISPATCHER="host")
    assert report["chunkmoe"] == {"runs": None, "host_has_one": False}
    wanted = "host, but this host does not have its own chunkmoe"
    assert any(wanted in reason for reason in report["reasons"])

    monkeypatch.setenv("MINDSPEED_CHUNK_DISPATCHER", "host")
    monkeypatch.setattr(config_name.PATCH, "state", APPLIED)
    plan = types.SimpleNamespace(dispatcher="chunkmoe")
    arguments = types.SimpleNamespace(parallel=types.SimpleNamespace(ep_plan=plan))
    with pytest.raises(
        mindspeed_chunk.ConfigError,
        match="MINDSPEED_CHUNK_DISPATCHER: 'host': this host does not have its own chunkmoe",
    ):
        start_checks.check(arguments)
    monkeypatch.setattr(config_name.PATCH, "state", NOT_NEEDED)
    start_checks.check(arguments)


def test_plugin_turned_off(host):
    report = diagnose(path=[host], MINDSPEED_CHUNK_DISABLE=1)
    assert not report["autoload"]["on"]
    # the host's own chunkmoe runs then; what ours would be is told all the same
    assert report["chunkmoe"]["runs"] == "the host's"
    assert {states(report)[name] for name in CHUNKMOE_PATCHES} == {"not needed", "ready"}
    report = diagnose(MINDSPEED_CHUNK_DISABLE=1)
    assert "MINDSPEED_CHUNK_DISABLE=1 turns the plugin off" in report["reasons"]


def test_autoload_off_names_the_launcher(host):
    report = diagnose(path=[host], TORCH_DEVICE_BACKEND_AUTOLOAD=0)
    assert not report["autoload"]["on"] and report["autoload"]["entry_point"]
    (note,) = [note for note in report["notes"] if "mindspeed_chunk.launch" in note]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in note
    assert "applied" not in states(report).values()
    assert report["chunkmoe"]["runs"] == "ours"
    variables = {"MINDSPEED_CHUNK_DEVICE": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": 0}
    *_, last = run("doctor", path=[host], **variables).stdout.strip().splitlines()
    assert last == "chunkmoe can run here, by mindspeed_chunk.launch only"


def test_package_without_patches_names_what_it_hides(tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "__file__", str(tmp_path / "checkout" / "mindspeed_chunk" / "copies.py"))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])  # an editable install has a finder there
    here = tmp_path / "checkout" / "mindspeed_chunk"
    assert doctor._without_patches().endswith(f"({here}) but not installed: pip install it")

    files = {"mindspeed_chunk/__init__.py": "", "mindspeed_chunk/patches/__init__.py": ""}
    monkeypatch.setattr(sys, "path", [str(write(tmp_path / "site", files))])
    told = doctor._without_patches()
    assert told.startswith(f"{here} has no patches and hides {tmp_path / 'site' / 'mindspeed_chunk'}, which has: ")
    assert f"take {here.parent} out of PYTHONPATH" in told


def test_missing_device_comes_before_its_consequences(host):
    """Unless the CPU is asked for, there are no CPU patches, and a module of theirs may fail."""
    fault = "raise TypeError('no such device')\n"
    write(host, {"mindspeed_mm/fsdp/features/memory/grad_offload.py": fault})
    report = diagnose(path=[host])
    if report["device"] != "cpu":
        pytest.skip("there is an accelerator here")
    assert not [name for name in states(report) if name.startswith("CPU")]
    (reason,) = report["reasons"]
    assert "MINDSPEED_CHUNK_DEVICE=cpu" in reason

    report = diagnose(path=[host], MINDSPEED_CHUNK_DEVICE="cpu")
    (reason,) = [reason for reason in report["reasons"] if "no such device" in reason]
    assert reason.startswith("CPU gradient offload: unknown: ")


def test_drifted_seam(host):
    write(host, DRIFTED)
    report = diagnose(path=[host], MINDSPEED_CHUNK_DEVICE="cpu")
    assert states(report)["dispatcher"] == "drifted"
    (reason,) = [reason for reason in report["reasons"] if reason.startswith("dispatcher: ")]
    assert "expected ep_forward(num_experts" in reason
    assert "found ep_forward(num_experts, routing_weights, selected_experts, tokens" in reason


def test_host_module_gone(host):
    (host / EP / "expert_parallel.py").unlink()
    report = diagnose(path=[host])
    assert states(report)["expert-parallel plan"] == "drifted"
    assert any(f"no module {EP.replace('/', '.')}.expert_parallel" in reason for reason in report["reasons"])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["import no_such_dependency", "raise SystemExit('sorry')"])
def test_host_that_cannot_be_imported_is_unknown(host, fault):
    write(host, {"mindspeed_mm/fsdp/__init__.py": fault})
    report = diagnose(path=[host])
    assert set(states(report).values()) == {"unknown"}
    wanted = "No module named 'no_such_dependency'" if "import" in fault else "SystemExit: sorry"
    (reason,) = [reason for reason in report["reasons"] if wanted in reason]
    assert "mindspeed_mm.fsdp.params.parallel_args cannot be imported" in reason
    assert report["host"]["generation"] == "newest master"


def test_host_that_ends_the_process(host):
    write(host, {"mindspeed_mm/fsdp/__init__.py": "import os, sys\nprint('no card', file=sys.stderr)\nos._exit(3)\n"})
    answer = run("doctor", path=[host])
    assert answer.returncode == 1
    assert "ended the process with 3: no card" in answer.stdout


def test_torch_that_cannot_be_imported(tmp_path, host):
    fault = "raise RuntimeError('Failed to load the backend extension: torch_npu.')\n"
    write(tmp_path, {"torch/__init__.py": fault})
    report = diagnose(path=[tmp_path, host])
    assert any("torch cannot be imported" in reason and "torch_npu" in reason for reason in report["reasons"])


@pytest.mark.parametrize("package", ["mindspeed", "mindspeed_mm"])
def test_placeholder(tmp_path, host, package):
    name = package.replace("_", "-")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1.dev1\n"
    write(tmp_path, {f"{package}/__init__.py": "", f"{package}-0.0.1.dev1.dist-info/METADATA": metadata})
    report = diagnose(path=[tmp_path, host])
    assert not report["ok"]
    assert report["versions"][package] == "0.0.1.dev1"
    assert any(f"no {package}.fsdp in it: a placeholder" in reason for reason in report["reasons"])


def test_placeholder_without_any_package(tmp_path):
    metadata = "Metadata-Version: 2.1\nName: mindspeed-mm\nVersion: 0.0.1\n"
    write(tmp_path, {"mindspeed_mm-0.0.1.dist-info/METADATA": metadata})
    report = diagnose(path=[tmp_path])
    assert any("the installed mindspeed-mm is a placeholder" in reason for reason in report["reasons"])


def test_wrapper_of_all_reduce_is_seen(host):
    wrapped = (
        "import torch.distributed\n"
        "def hccl_premul_sum_wrapper(op, output_name):\n"
        "    def wrapper(*args, **kwargs):\n        return op(*args, **kwargs)\n"
        "    return wrapper\n"
        "torch.distributed.all_reduce = hccl_premul_sum_wrapper(torch.distributed.all_reduce, 'tensor')\n"
    )
    write(host, {"mindspeed_mm/fsdp/__init__.py": wrapped})
    assert diagnose(path=[host])["host"]["all_reduce_wrapper"] == "applied"


def test_home_without_the_package(tmp_path):
    report = diagnose(MINDSPEED_MM_HOME=tmp_path)
    assert f"MINDSPEED_MM_HOME: {tmp_path}: has no folder mindspeed_mm" in report["notes"]


@pytest.mark.slow
@pytest.mark.parametrize("flavour", host_lookalike.FLAVOURS)
def test_lookalikes(flavour):
    pytest.importorskip("pydantic")
    folders = host_lookalike.folders(flavour)
    report = diagnose(path=folders)
    found = states(report)
    assert report["host"] is None or report["host"]["generation"].startswith(flavour)
    assert {found[name] for name in CHUNKMOE_PATCHES} <= {"applied", "ready", "not needed"}
    assert (found["config name"] == "not needed") == (flavour in host_lookalike.OWN_CHUNKMOE)


@pytest.mark.parametrize(
    ("dispatchers", "parameter", "generation"),
    [
        ("'eager', 'fused', 'mc2'", "fused", "26.0"),
        ("'alltoall', 'allgather', 'mc2'", "ep_balance_strategy", "26.1"),
        ("'alltoall', 'allgather', 'mc2'", "skip_moe_pad_tokens", "master of 2026-08"),
        ("'alltoall', 'chunkmoe'", "skip_moe_pad_tokens", "newest master"),
        ("'other'", "fused", "unknown"),
    ],
)
def test_generation_by_signatures(tmp_path, dispatchers, parameter, generation):
    write(
        tmp_path,
        {
            "fsdp/params/parallel_args.py": f"class EPPlanConfig:\n    dispatcher: Literal[{dispatchers}] = 'x'\n",
            "fsdp/distributed/expert_parallel/ep_dispatcher.py": f"def ep_forward(num_experts, *, {parameter}): ...\n",
        },
    )
    told = host_probe.read_host([str(tmp_path)])
    assert told["generation"] == generation
    assert told["all_reduce_wrapper"] == "none"


@pytest.mark.parametrize("variable", environment.CANN_HOMES)
def test_cann_version(tmp_path, monkeypatch, variable):
    for name in environment.CANN_HOMES:
        monkeypatch.delenv(name, raising=False)
    assert environment.cann_version() is None
    monkeypatch.setenv(variable, str(tmp_path))
    assert environment.cann_version() is None
    write(tmp_path, {"compiler/version.info": "Version=7.7.0.1.238\nversion_dir=8.1.RC1\n"})
    assert environment.cann_version() == "7.7.0.1.238"
    info = "package_name=Ascend-cann-toolkit\nversion=8.1.RC1\ninnerversion=V100R001C21\n"
    write(tmp_path, {"aarch64-linux/ascend_toolkit_install.info": info})
    assert environment.cann_version() == "8.1.RC1"


def test_requirements_not_met(monkeypatch):
    monkeypatch.setattr(environment.importlib.metadata, "requires", lambda name: ["torch>=99", 'x; extra == "tools"'])
    monkeypatch.setattr(environment, "version_of", {"torch": "2.7.1+cpu", environment.PLUGIN: "0"}.get)
    assert environment.broken_requirements() == ["torch: 2.7.1+cpu: must be >=99"]
    monkeypatch.setattr(environment.importlib.metadata, "requires", lambda name: ["torch>=2.7.1,<2.14", "nothing"])
    assert environment.broken_requirements() == ["nothing: not installed: must be there"]


def test_real_host():
    real_host.need()
    homes = {name: os.environ[name] for name in host_probe.HOMES.values()}
    report = diagnose(path=homes.values(), **homes, MINDSPEED_CHUNK_DEVICE="cpu")
    assert report["ok"], report["reasons"]
    assert report["host"]["generation"] != "unknown"
    assert report["host"]["all_reduce_wrapper"] == "in its source"
    assert report["chunkmoe"]["runs"] == "ours"
    assert {states(report)[name] for name in CHUNKMOE_PATCHES} <= {"applied", "ready", "not needed"}
