"""MindSpeed-MM's own trainer.py from a checkout, on CPU ranks, for tests.

Its imports cost many seconds a rank, so one process (this file as a script) imports the host once and forks the ranks
of every run; a rank then executes the unchanged trainer.py as `__main__`. Plugin and CPU patches are in place as a user
has them: by torch's entry point, before the host is imported.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from mindspeed_chunk.tools.ranks import end_with, reserved_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "qwen3_5_35b"
HOMES = ("MINDSPEED_HOME", "MINDSPEED_MM_HOME")
REQUIREMENTS = EXAMPLE / "requirements-host.txt"
RECORD = "REAL_HOST_RECORD"
POLL_S = 0.02
GRACE_S = 5.0


@functools.cache
def why_not():
    """Why there is no real host to test with, in one line, or ""."""
    unset = [name for name in HOMES if not os.environ.get(name)]
    if unset:
        return f"{' and '.join(unset)} not set: no real host to test with"
    lacking = list(filter(None, map(_lack, REQUIREMENTS.read_text(encoding="utf-8").splitlines())))
    # what works all the same is tested; what fails although nothing lacks is a failure, for a test to report
    command = [sys.executable, "-c", "import real_host; real_host.import_host()"]
    if lacking and subprocess.run(command, env=environment(), capture_output=True).returncode:
        where = REQUIREMENTS.relative_to(ROOT)
        return f"{' and '.join(HOMES)} are set, but not all of {where} is installed: {', '.join(lacking)}"
    return ""


def need():
    """Skip the test, or the module of tests, that calls this where there is no real host."""
    import pytest

    if why_not():
        pytest.skip(why_not(), allow_module_level=True)


def _lack(line):
    """What is wrong with the environment by one line of requirements, or ""."""
    from packaging.requirements import Requirement

    text = line.partition("#")[0].strip()
    if not text:
        return ""
    requirement = Requirement(text)
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"no {text}"
    return "" if requirement.specifier.contains(found, prereleases=True) else f"{requirement.name} {found}, not {text}"


def trainer_file():
    return Path(os.environ["MINDSPEED_MM_HOME"]) / "mindspeed_mm" / "fsdp" / "train" / "trainer.py"


def environment(**extra):
    """What README.md of the example sets, and the folders of the data sets."""
    path = [os.environ[name] for name in HOMES] + [str(EXAMPLE), str(ROOT / "tests" / "helpers")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "NON_MEGATRON": "true",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MINDSPEED_CHUNK_DEVICE": "cpu",
        **extra,
    }


def write_config(path, overrides):
    """The example's tiny yaml with `{"dotted.key": value}` put in; short samples, and what the tests record."""
    import yaml

    config = yaml.safe_load((EXAMPLE / "stock_tiny.yaml").read_text(encoding="utf-8"))
    model = str(EXAMPLE / "tiny")
    ours = {
        "model.model_name_or_path": model,
        "data.dataset_param.preprocess_parameters.model_name_or_path": model,
        "data.dataset_param.basic_parameters.cutoff_len": 64,
        **overrides,
    }
    for key, value in ours.items():
        *parents, last = key.split(".")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    config["training"]["plugin"].append("real_host_plugin")
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@dataclasses.dataclass
class Run:
    """losses, norms: of every step, as the trainer computed them. log: what rank 0 wrote.

    frames: of ours, at the first all-to-all. collectives: gathers of parameters and scatters of gradients so far, at
    each step.
    """

    losses: list
    norms: list
    validation: list
    frames: list
    collectives: list
    log: str


class RealHost:
    """The process that has the host imported. `plain`: without the plugin, but for what the CPU needs."""

    def __init__(self, folder, plain=False):
        self._folder = folder
        self._numbers = itertools.count()
        self._cache = {}
        extra = {"MINDSPEED_CHUNK_DISABLE": "1"} if plain else {}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder / "server.log")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(**extra),
        )
        if self._process.stdout.readline() != "ready\n":
            raise AssertionError(f"the host cannot be imported:\n{(folder / 'server.log').read_text()[-4000:]}")

    def close(self):
        self._process.stdin.close()
        self._process.wait()

    def train(self, overrides, *, ranks=2, steps=20, timeout=600, again=False, environ=()):
        """A Run; the same question is answered from memory unless `again`. `environ`: variables of the ranks."""
        overrides, environ = {"training.train_iters": steps, **overrides}, dict(environ)
        key = json.dumps([overrides, ranks, environ], sort_keys=True)
        if again or key not in self._cache:
            self._cache[key] = self._train(overrides, ranks, timeout, environ)
        return self._cache[key]

    def start(self, overrides, timeout=600, environ=()):
        """Run ranks, each with its own of `overrides`; returns their folder, exit codes and logs."""
        folder = self._folder / f"run{next(self._numbers)}"
        folder.mkdir()
        configs = [str(write_config(folder / f"{rank}.yaml", each)) for rank, each in enumerate(overrides)]
        request = {"folder": str(folder), "configs": configs, "timeout": timeout, "environ": dict(environ)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        return folder, codes, [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(len(configs))]

    def _train(self, overrides, ranks, timeout, environ):
        folder, codes, logs = self.start([overrides] * ranks, timeout, environ)
        if any(codes):
            tails = "\n".join(
                f"--- rank {rank}: {code}\n{log[-3000:]}" for rank, (code, log) in enumerate(zip(codes, logs))
            )
            raise AssertionError(f"{overrides}\n{tails}")
        rows = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
        return Run(
            losses=[row["loss"] for row in rows if "loss" in row],
            norms=[row["norm"] for row in rows if "loss" in row],
            validation=[row["validation"] for row in rows if "validation" in row],
            frames=next((row["frames"] for row in rows if "frames" in row), []),
            collectives=[row["collectives"] for row in rows if "collectives" in row],
            log=logs[0],
        )


def serve(log):
    """Answer requests from standard input, one line each, with the ranks' exit codes."""
    end_with(os.getppid())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    import_host()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=answers, flush=True)


def import_host():
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    if os.environ.get("MINDSPEED_CHUNK_DISABLE") == "1":
        hook_cpu_patches()
    import mindspeed_mm.fsdp.models.qwen3_5_moe.modeling_qwen3_5_moe
    import mindspeed_mm.fsdp.train.trainer  # noqa: F401


def hook_cpu_patches():
    from mindspeed_chunk.patches.hooks import PostImport
    from mindspeed_chunk.patches.on_cpu import device

    patches = {patch.module: patch for patch in device.PATCHES}
    sys.meta_path.insert(0, PostImport(patches, lambda name, module: patches[name].on_import(module)))


def run(folder, configs, timeout, environ):
    with reserved_port() as port:
        return wait(fork_ranks(folder, configs, environ, port), timeout)


def fork_ranks(folder, configs, environ, port):
    children = {}
    for rank, config in enumerate(configs):
        pid = os.fork()
        if pid == 0:
            os.environ.update(environ)
            be_rank(folder, config, rank, len(configs), port)
        children[pid] = rank
    return children


def wait(children, timeout):
    """The exit codes of {pid: rank}, by rank."""
    codes, deadline = [None] * len(children), time.monotonic() + timeout
    while children:
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
                if code:
                    deadline = min(deadline, time.monotonic() + GRACE_S * max(1.0, os.getloadavg()[0]))
        if time.monotonic() > deadline:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(POLL_S)
    return codes


def be_rank(folder, config, rank, ranks, port):
    end_with(os.getppid())
    code = 1
    try:
        log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ[RECORD] = f"{folder}/record.jsonl"
        sys.argv = [str(trainer_file()), config]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
