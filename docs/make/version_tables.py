"""Versions: what the package requires, what its patches were made for, what CI runs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

import mindspeed_chunk
from markdown_table import table
from mindspeed_chunk.ops.npu_ops import OPS
from mindspeed_chunk.patches import PATCHES
from mindspeed_chunk.patches.record import Patch

ROOT = Path(__file__).resolve().parents[2]
HOST_REQUIREMENTS = ROOT / "examples" / "qwen3_5_35b" / "requirements-host.txt"
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"

_LOOK_ALIKE = "not its own code: the tests against a look-alike of its modules"
_RUN = "on CPU ranks, its stock trainer: the tests in `tests/host`"
# What was done with each version that the patches' records name, oldest first.
HOSTS = {"26.0.0": _LOOK_ALIKE, "26.1.0": _RUN, "master of 2026-08": _RUN, "newest master": _LOOK_ALIKE}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def metadata() -> dict:
    """The keywords of `setup()` in setup.py that are literals, as values."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (call,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    literal = {}
    for keyword in call.keywords:
        try:
            literal[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:  # computed, as the version and the packages are
            continue
    return literal


def requirement(text: str) -> tuple[str, str]:
    """Name and range."""
    ((name, versions),) = re.findall(r"^([\w.-]+)(.*)$", text)
    return name, versions


def requirements() -> str:
    meta = metadata()
    rows = [("Python", f"`{meta['python_requires']}`", "")]
    needed = [(text, "") for text in meta["install_requires"]]
    needed += [(text, extra) for extra in ("npu", "standalone", "tools") for text in meta["extras_require"][extra]]
    for text, extra in needed:
        name, versions = requirement(text)
        rows.append((name, f"`{versions}`" if versions else "any", f"extra `{extra}`" if extra else ""))
    return table(("what", "versions", "for"), rows)


def hosts_of(patch: Patch) -> dict[str, str]:
    """The versions of a record, and the text in brackets after each."""
    return dict(pair for version in patch.hosts.split(", ") for pair in re.findall(r"^(.+?)(?: \((.+)\))?$", version))


def hosts() -> str:
    unknown = {version for patch in PATCHES for version in hosts_of(patch)} - set(HOSTS)
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: named by a patch: say in HOSTS of {__file__} what was run")
    pinned = dict(line.split("==") for line in HOST_REQUIREMENTS.read_text().splitlines() if "==" in line)
    plugin = ".".join(mindspeed_chunk.__version__.split(".")[:2])
    rows = [
        (plugin, version, pinned["torch"], pinned["torch"], "3.11", run, ", ".join(_bound(version)))
        for version, run in HOSTS.items()
    ]
    return table(
        ("plugin", "MindSpeed-MM", "torch", "torch_npu", "Python", "what was run", "patches made for it"), rows
    )


def _bound(version: str) -> list[str]:
    return [patch.name for patch in PATCHES if version in hosts_of(patch)]


def kernels() -> str:
    """The dtypes of `OPS`. The columns differ in `LATER`; its comment says which releases have it."""

    def told(dtypes: tuple) -> str:
        return ", ".join(_DTYPES[str(dtype).removeprefix("torch.")] for dtype in dtypes)

    alike: dict[tuple, list[str]] = {}
    for name, dtypes in OPS.items():
        alike.setdefault(dtypes, []).append(f"`{name}`")
    rows = [(", ".join(names), told(before), told(later)) for (before, later), names in alike.items()]
    return table(("torch_npu", "2.7.1 - 2.7.1.post6", "2.7.1.post11, 2.13.0"), rows)


def newest_torch() -> str:
    """The default of `ci/test.sh`."""
    (found,) = set(re.findall(r"TORCH_VERSION:-([\d.]+)", (ROOT / "ci" / "test.sh").read_text()))
    return found


def runs() -> Iterator[tuple[str, str, str, list[str]]]:
    """Of each run of each job: the job's name, Python, torch, and its commands."""
    for name, job in yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"].items():
        (python,) = (step["with"]["python-version"] for step in job["steps"] if "cache" in step.get("with", {}))
        commands = [step["run"] for step in job["steps"] if "run" in step]
        for matrix in job.get("strategy", {}).get("matrix", {}).get("include", [{}]):
            words = [python, matrix.get("torch", newest_torch()), *commands]
            for key, value in matrix.items():
                words = [word.replace(f"${{{{ matrix.{key} }}}}", value).strip() for word in words]
            yield name, words[0], words[1], words[2:]


def continuous_integration() -> str:
    rows = [
        (name, python, torch, ", ".join(f"`{command}`" for command in commands))
        for name, python, torch, commands in runs()
    ]
    return table(("job", "Python", "torch", "runs"), rows)
