"""Copies of the package in folders of their own, installed as far as Python can tell, for tests that damage them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mindspeed_chunk

PACKAGE = Path(mindspeed_chunk.__path__[0])
_METADATA = "Metadata-Version: 2.1\nName: mindspeed_chunk\nVersion: 0.1.0\n"
_ENTRY_POINT = "[torch.backends]\nmindspeed_chunk = mindspeed_chunk_autoload:autoload\n"


def copy_package(folder):
    """Copy it into `folder` as `pip install` would; return the folder."""
    shutil.copytree(PACKAGE, folder / "mindspeed_chunk", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "mindspeed_chunk_autoload.py", folder)
    metadata = folder / "mindspeed_chunk-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(_METADATA)
    (metadata / "entry_points.txt").write_text(_ENTRY_POINT)
    return folder


def run_python(code, *path, options=(), expect=0, **variables):
    """Run `code` in a fresh interpreter that finds packages in `path` first; return it when it has ended."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_CHUNK", "TORCH_DEV"))}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    command = [sys.executable, *options, "-c", code]
    answer = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=240)
    assert answer.returncode == expect, f"{answer.stdout}\n{answer.stderr}"
    return answer
