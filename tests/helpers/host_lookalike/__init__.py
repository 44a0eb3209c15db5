"""A small look-alike of MindSpeed-MM, written for these tests from what is known of it.

It stands under the host's own module names, in layers: a flavour is a list of folders for `sys.path`, the special one
first, so that what versions share is written once. There is no `__init__.py` in them: the names are namespace packages,
and come together from all folders.
"""

import faulthandler
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from launcher import DUMP_S, HANG_S, NOT_HANDED_ON, POLL_S, Fresh, first_environment, zygote
from mindspeed_chunk.tools.ranks import reserved_port
from zygote import stop

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

LAYERS = {
    "26.0": ("v26_0", "common"),
    "26.1": ("v26_1", "pydantic", "common"),
    "master": ("master", "pydantic", "common"),
    "newest": ("newest", "master", "pydantic", "common"),
}
FLAVOURS = tuple(LAYERS)
# which models end in the dispatcher, by flavour
KINDS = {
    "26.0": ("qwen3_5_moe", "generic"),
    "26.1": ("qwen3_5_moe", "generic", "mimov2_5", "wan2_2"),
    "master": ("qwen3_5_moe", "generic", "mimov2_5", "wan2_2", "kimi_k3"),
    "newest": ("qwen3_5_moe", "generic", "mimov2_5", "wan2_2", "kimi_k3", "glm5_next"),
}
# which flavours bring a `chunkmoe` of their own, and which know padded tokens
OWN_CHUNKMOE = ("newest",)
PADDING = ("master", "newest")
# what a flavour calls its plain dispatcher
PLAIN = {"26.0": "fused", "26.1": "alltoall", "master": "alltoall", "newest": "alltoall"}
PACKAGE = "mindspeed_mm.fsdp.distributed.expert_parallel"

# what a fork gets in other ways, or reads late
NOT_COMPARED = dict.fromkeys(("PYTHONPATH", "WORLD_SIZE", NOT_HANDED_ON))
# what every trainer imports, beside torch itself
THIRD_PARTY = ("pydantic", "yaml", "torch.distributed.fsdp", "torch.distributed.tensor")

# sizes all differ, so that nothing fits by chance
SIZES = {
    "num_experts": 8,
    "hidden_size": 10,
    "moe_intermediate_size": 6,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "vocab_size": 17,
}


def folders(flavour):
    """The folders of a flavour, the first one wins."""
    return [str(HERE / layer) for layer in LAYERS[flavour]]


def put_on_path(flavour, *before):
    """Let this process find the flavour; folders `before` come first and replace single modules."""
    sys.path[:0] = [*map(str, before), *folders(flavour)]


def find(flavour, module, *before):
    """The file of one of the flavour's modules."""
    relative = Path(*module.split(".")).with_suffix(".py")
    return next(path for folder in (*before, *folders(flavour)) if (path := Path(folder) / relative).exists())


def drift(flavour, folder, module, *replacements):
    """Write a changed copy of one module into `folder`, which then goes in front of the flavour's own."""
    text = find(flavour, module).read_text(encoding="utf-8")
    for old, new in replacements:
        assert old in text, f"{module} has no {old!r}"
        text = text.replace(old, new)
    path = Path(folder) / Path(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_config(folder, plan, *, kind="qwen3_5_moe", expert_parallel_size=2, sizes=(), **sections):
    """Write config.json and config.yaml; `sections` are the yaml's other keys, merged over the defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    model = {"model_type": kind, "text_config": {**SIZES, **dict(sizes)}}
    (folder / "config.json").write_text(json.dumps(model))
    config = {
        "parallel": {
            "expert_parallel_size": expert_parallel_size,
            "ep_plan": {"apply_modules": ["layers.{*}.experts"], **plan},
        },
        "model": {"model_name_or_path": str(folder)},
        "training": {"train_iters": 3, "lr": 0.5, "micro_batch_size": 2, **sections.pop("training", {})},
        **sections,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def environment(flavour, *before, **extra):
    """The environment of a process that finds the flavour; a value of None removes a variable."""
    path = [*map(str, before), *folders(flavour)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_CHUNK", "MM_"))}
    plain.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    plain |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | extra
    return {name: value for name, value in plain.items() if value is not None}


def launch(flavour, config, *arguments, ranks=2, before=(), through=(), grace=None, fork=False, own=(), **extra):
    """Run the trainer's script on each rank as torchrun does; return the finished processes in rank order.

    config: the path of the yaml, or a list of one for each rank.
    through: arguments of the interpreter in front of the script, as `("-m", "mindspeed_chunk.launch")`.
    fork: ranks may be forks of a process that has imported torch, and with it the plugin, but nothing of the host. They
        are, unless the environment has something in it that such a process would have read.
    grace: seconds that ranks have once one of them has ended; then they are stopped, as torchrun does.
    own: additions to the environment of single ranks, {rank: {variable: value}}.
    extra: additions to the environment.
    """
    script = str(find(flavour, "mindspeed_mm.fsdp.train.trainer", *before))
    configs, own = config if isinstance(config, list) else [config] * ranks, dict(own)
    words = [[script, str(each), *arguments] for each in configs]
    fork = fork and not own and environment(flavour, **extra) | NOT_COMPARED == first_environment() | NOT_COMPARED
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, open(os.devnull) as nothing, reserved_port() as port:
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        outputs = [[Path(folder, f"{rank}.{which}") for which in ("stdout", "stderr")] for rank in range(ranks)]
        started = []
        try:
            for rank, (out, err) in enumerate(outputs):
                place = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} | extra | own.get(rank, {})
                with open(out, "wb") as stdout, open(err, "wb") as stderr:
                    streams = {"stdin": nothing, "stdout": stdout, "stderr": stderr}
                    if fork:
                        started.append(_fork(rank, words[rank], [*before, *folders(flavour)], place, streams.values()))
                    else:
                        variables = environment(flavour, *before, **place)
                        command = [sys.executable, *through, *words[rank]]
                        started.append(Fresh(command, env=variables, start_new_session=True, **streams))
            if not _wait(started, grace):
                raise TimeoutError(f"still running after {HANG_S} s:\n{_dump(started, outputs)}")
        finally:
            codes = stop(started)
        texts = [[path.read_text() for path in paths] for paths in outputs]
    return [subprocess.CompletedProcess(*told) for told in zip(words, codes, *zip(*texts), strict=True)]


def _fork(rank, words, path, variables, streams):
    call, descriptors = [__name__, run_script.__name__, [words]], [stream.fileno() for stream in streams]
    return zygote(rank).fork(call, variables, descriptors, THIRD_PARTY, [*map(str, path)])


def _wait(processes, grace):
    """Whether all have ended in time, or one has and the others have had their grace."""
    end, stopped = time.monotonic() + HANG_S, False
    while not all(ended := [process.ended() for process in processes]):
        if any(ended) and grace is not None and not stopped:
            end, stopped = time.monotonic() + grace, True
        if time.monotonic() > end:
            return stopped
        time.sleep(POLL_S)
    return True


def _dump(processes, outputs):
    """What the ranks have written, and where those that run are."""
    for process in processes:
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(DUMP_S)
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for paths in outputs for path in paths)


def run_script(words):
    """What an interpreter does with a script and its arguments."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.argv = words
    sys.path.insert(0, os.path.dirname(words[0]))
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        # An interpreter takes some time to end, too; a rank that is gone at once may be missed by one that still joins.
        if sys.exc_info()[0] and sys.modules["torch"].distributed.is_initialized():
            time.sleep(0.5)


def run_code(flavour, code, *before, **extra):
    """Run Python text in one fresh process that finds the flavour; return what it printed. Fails if it fails."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(flavour, *before, **place | extra),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"
    return answer


READ = """
import json, os, sys
from mindspeed_chunk.patches import install
install()

def read(path, environment):
    sys.argv = ["trainer.py", path]
    os.environ.update(environment)
    try:
        if FLAVOUR == "26.0":
            from mindspeed_mm.fsdp.params import argument
            argument.parse_args(argument.Arguments)
        else:
            from mindspeed_mm.config.config_manager import ConfigManager
            ConfigManager().load_and_parse()
    except SystemExit as end:
        return str(end.code)
    except Exception as error:
        return type(error).__name__
    finally:
        for name in environment:
            del os.environ[name]

told = {name: read(path, environment) for name, (path, environment) in CASES.items()}
import torch
assert not torch.distributed.is_initialized()
print("told", json.dumps(told))
"""


def read_configs(flavour, cases):
    """Read each of `cases` {name: (yaml, additions to the environment)} in one fresh process, as a trainer does first.

    Returns {name: with what it ended, None if it did not} and the lines of stderr.
    """
    answer = run_code(flavour, f"FLAVOUR, CASES = {flavour!r}, {cases!r}\n{READ}")
    (line,) = [line for line in answer.stdout.splitlines() if line.startswith("told ")]
    return json.loads(line.removeprefix("told ")), answer.stderr.splitlines()


def losses(finished):
    """The losses that rank 0 printed, as text, and what the look-alike noted. Fails if a rank failed."""
    for process in finished:
        assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    lines = finished[0].stdout.splitlines()
    told = next(json.loads(line.removeprefix("lookalike ")) for line in lines if line.startswith("lookalike "))
    return [line.split()[-1] for line in lines if line.startswith("step ")], told
