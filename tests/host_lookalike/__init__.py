"""A small look-alike of MindSpeed-MM, written for these tests from what is known of it.

It stands under the host's own module names, in layers: a flavour is a list of folders for `sys.path`, the special one
first, so that what versions share is written once. There is no `__init__.py` in them: the names are namespace packages,
and come together from all folders.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

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
    "newest": ("qwen3_5_moe", "generic", "mimov2_5", "wan2_2", "kimi_k3"),
}
# which flavours bring a `chunkmoe` of their own, and which know padded tokens
OWN_CHUNKMOE = ("newest",)
PADDING = ("master", "newest")
# what a flavour calls its plain dispatcher
PLAIN = {"26.0": "fused", "26.1": "alltoall", "master": "alltoall", "newest": "alltoall"}
PACKAGE = "mindspeed_mm.fsdp.distributed.expert_parallel"

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


def launch(flavour, config, *arguments, ranks=2, before=(), through=(), timeout=60, **extra):
    """Run the trainer's script on each rank as torchrun does; return the finished processes in rank order.

    through: arguments of the interpreter in front of the script, as `("-m", "mindspeed_chunk.launch")`.
    extra: additions to the environment.
    """
    script = find(flavour, "mindspeed_mm.fsdp.train.trainer", *before)
    command = [sys.executable, *through, str(script), str(config), *arguments]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    try:
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            process = subprocess.Popen(
                command,
                env=environment(flavour, *before, **place | extra),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(process)
        outputs = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [
        subprocess.CompletedProcess(command, process.returncode, *output) for process, output in zip(started, outputs)
    ]


def run_code(flavour, code, *before, timeout=60, **extra):
    """Run Python text in one fresh process that finds the flavour; return what it printed. Fails if it fails."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(flavour, *before, **place | extra),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"
    return answer


def losses(finished):
    """The losses that rank 0 printed, as text, and what the look-alike noted. Fails if a rank failed."""
    for process in finished:
        assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    lines = finished[0].stdout.splitlines()
    told = next(json.loads(line.removeprefix("lookalike ")) for line in lines if line.startswith("lookalike "))
    return [line.split()[-1] for line in lines if line.startswith("step ")], told
