"""Imports the modules of the host that are patched, and reports the state of each patch.

`doctor` runs this file in a separate process: the host may fail to import, write to the screen, or end the process.

    python host_probe.py RESULT.json
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from mindspeed_chunk import copies

HOMES = {"mindspeed": "MINDSPEED_HOME", "mindspeed_mm": "MINDSPEED_MM_HOME"}
NO_HOST = "no host"
UNKNOWN = "unknown"
WRAPPER = "hccl_premul_sum_wrapper"
_EP = "fsdp/distributed/expert_parallel"


def main() -> None:
    sys.path.pop(0)  # this file's folder, which python puts there
    Path(sys.argv[1]).write_text(json.dumps(probe()), encoding="utf-8")


def probe() -> dict:
    """Places of the host's packages and, if torch can be imported, the state of everything that needs torch."""
    from mindspeed_chunk import patches
    from mindspeed_chunk.patches import settings

    places = {name: locate(name, variable) for name, variable in HOMES.items()}
    result: dict = {"places": places, "package": package(), "copies": copies.problems()}
    for place in places.values():
        if place["by"] in HOMES.values():
            sys.path.insert(0, str(Path(place["folders"][0]).parent))
    os.environ.pop(settings.DISABLE, None)  # the report is about the plugin turned on
    try:
        import torch
    except Exception as error:
        result["torch_error"] = _line(error)
        return result
    result["autoloaded"] = patches.installed()
    result["device"] = _device(torch)

    from mindspeed_chunk.ops import BACK_ENDS

    patches.install()
    result["backends"] = list(BACK_ENDS)
    host = places["mindspeed_mm"]
    has_host = host["has_fsdp"]
    records = patches.PATCHES
    if settings.on_cpu():
        from mindspeed_chunk.patches.on_cpu import device

        records += device.PATCHES
    result["patches"] = [_examine(patch, has_host) for patch in records]
    result["host"] = read_host(host["folders"]) if has_host else None
    if has_host and WRAPPER in getattr(torch.distributed.all_reduce, "__qualname__", ""):
        result["host"]["all_reduce_wrapper"] = "applied"
    return result


def locate(package: str, variable: str) -> dict:
    """Where the package is: in the checkout that the variable names, else on Python's path. Imports nothing.

    Returns:
        `folders` of the package, none if it is not found; `by` (the variable, or "Python's path"); `on_path` (whether a
        run finds one without the variable); `has_fsdp` (a placeholder from a package index has no such part).
    """
    spec = importlib.util.find_spec(package)
    on_path = list(spec.submodule_search_locations or ()) if spec else []
    at_home = Path(os.environ.get(variable) or os.devnull) / package
    if at_home.is_dir():
        folders, by = [str(at_home)], variable
    else:
        folders, by = on_path, "Python's path"
    return {
        "folders": folders,
        "by": by if folders else None,
        "on_path": bool(on_path),
        "has_fsdp": any((Path(folder) / "fsdp").is_dir() for folder in folders),
    }


def read_host(folders: list[str]) -> dict:
    """Read from the source, so that it works for a host that cannot be imported.

    Returns:
        `generation` (of MindSpeed-MM, by its dispatcher names and `ep_forward`'s parameters), `dispatchers`,
        `all_reduce_wrapper` ("none", or "in its source").
    """
    dispatchers = _literal(_source(folders, "fsdp/params/parallel_args.py"), "EPPlanConfig", "dispatcher")
    parameters = _parameters(_source(folders, f"{_EP}/ep_dispatcher.py"), "ep_forward")
    if "chunkmoe" in dispatchers:
        generation = "newest master"
    elif "alltoall" in dispatchers:
        generation = "master of 2026-08" if "skip_moe_pad_tokens" in parameters else "26.1"
    else:
        generation = "26.0" if "fused" in dispatchers else UNKNOWN
    wrapped = WRAPPER in _source(folders, f"{_EP}/expert_fully_shard_parallel.py")
    return {
        "generation": generation,
        "dispatchers": dispatchers,
        "all_reduce_wrapper": "in its source" if wrapped else "none",
    }


def _examine(patch: Any, has_host: bool) -> dict:
    """Import the module whose import applies the patch, and return the patch's state."""
    from mindspeed_chunk.patches import config_name, ep_dispatcher, expert_parallel, start_checks
    from mindspeed_chunk.patches.record import APPLIED, DRIFTED, NOT_NEEDED, READY

    state, detail = NO_HOST, ""
    if has_host:
        try:
            importlib.import_module(patch.module)
            state, detail = patch.state, patch.detail
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and f"{patch.module}.".startswith(f"{error.name}."):
                needed = patch in (
                    module.PATCH for module in (config_name, start_checks, expert_parallel, ep_dispatcher)
                )
                state, detail = (DRIFTED if needed else NOT_NEEDED), f"no module {error.name}"
            else:
                state, detail = UNKNOWN, f"{patch.module} cannot be imported: {_line(error)}"
    if state == APPLIED and patch.enabled_by:
        state, detail = READY, f"it fits; active when a yaml has {patch.enabled_by}"
    if state == DRIFTED:
        detail = f"expected {patch.expects}, found {detail}"
    return {"name": patch.name, "module": patch.module, "target": patch.target, "state": state, "detail": detail}


def package() -> dict[str, str | None]:
    """The folders of the plugin's parts."""
    return {"core": copies.core(), "patches": copies.patches()}


def _device(torch: Any) -> str:
    """The device that the host would choose: an NPU, otherwise CUDA."""
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _source(folders: list[str], name: str) -> str:
    """The source of the first file of this name, as an import would find it; empty if there is none."""
    files = (Path(folder) / name for folder in folders)
    return next((file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()), "")


def _literal(source: str, class_name: str, field: str) -> list[str]:
    """The strings in the annotation of a class's field."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and getattr(part.target, "id", None) == field:
                    constants = (each for each in ast.walk(part.annotation) if isinstance(each, ast.Constant))
                    return [each.value for each in constants if isinstance(each.value, str)]
    return []


def _parameters(source: str, function: str) -> list[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return []


if __name__ == "__main__":
    main()
