"""An unpacked torch_npu wheel, and libraries that stand in for CANN's.

The wheel's libraries are linked against CANN's. Libraries of the same names are enough for an import, as long as some
library has every symbol that is missing; each is a function that returns 0. torch_npu then finds no device, and has all
its schemas and meta kernels.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

VARIABLE = "MINDSPEED_CHUNK_TORCH_NPU"
# Provided by the interpreter, which is no library.
OF_PYTHON = ("Py", "_Py")
# No library is linked against it, but 2.7.1 opens it when it is imported.
OPENED = "libopapi.so"


def locate() -> Path:
    """The folder that the wheel was unpacked in.

    Raises:
        FileNotFoundError: with the reason, if there is none, or no tools to build what stands in for CANN.
    """
    folder = Path(os.environ.get(VARIABLE) or Path(sys.prefix) / "torch_npu-wheel")
    if not (folder / "torch_npu" / "__init__.py").exists():
        raise FileNotFoundError(f"{folder}: no torch_npu wheel there; ci/test.sh unpacks one, or set {VARIABLE}")
    wanted = torch.__version__.split("+")[0]
    if not list(folder.glob(f"torch_npu-{wanted}*.dist-info")):
        found = ", ".join(path.stem for path in folder.glob("torch_npu-*.dist-info"))
        raise FileNotFoundError(f"{folder}: {found}: must be for torch {wanted}; run ci/test.sh with this torch")
    missing = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        raise FileNotFoundError(f"{', '.join(missing)}: not found; install gcc and binutils (Debian: build-essential)")
    return folder


def load(folder: Path) -> None:
    """Import torch_npu into this process, for good."""
    for library in stand_ins(folder):
        # a library that is loaded is found by its name when another one asks for it
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    sys.path.append(str(folder))
    import torch_npu  # noqa: F401


def stand_ins(folder: Path) -> list[Path]:
    """The libraries in place of CANN's, built if they are not there; the first one has the symbols."""
    done = folder / "stand-ins"
    if not done.exists():
        draft = Path(tempfile.mkdtemp(dir=folder))
        _build(folder, draft)
        try:
            draft.rename(done)
        except OSError:  # another process was faster
            shutil.rmtree(draft)
    return sorted(done.iterdir())


def _build(folder: Path, out: Path) -> None:
    package = folder / "torch_npu"
    own = [*package.glob("lib/*.so"), *package.glob("_C*.so")]
    torchs = list((Path(torch.__file__).parent / "lib").glob("*.so*"))
    needed = {OPENED}.union(*map(_needed, own)) - {path.name for path in (*own, *torchs)}
    systems = {name: path for name in needed if (path := _system(name))}
    defined = set().union(*(_symbols(path, "--defined-only") for path in (*own, *torchs, *systems.values())))
    missing = set().union(*(_symbols(path, "--undefined-only") for path in own)) - defined
    source = "".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(missing))
    for index, name in enumerate(sorted(needed - systems.keys())):
        _compile(source if index == 0 else "", name, out / f"{index}-{name}")


def _compile(source: str, soname: str, path: Path) -> None:
    options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{soname}", "-x", "c", "-", "-o", str(path)]
    subprocess.run(["gcc", *options], input=source, text=True, check=True)


def _needed(library: Path) -> set[str]:
    """Names of the libraries that it is linked against."""
    lines = _output("readelf", "--dynamic", "--wide", library)
    return {line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line}


def _system(name: str) -> Path | None:
    (found,) = _output("gcc", f"-print-file-name={name}")
    return Path(found) if os.path.isabs(found) else None


def _symbols(library: Path, which: str) -> set[str]:
    """Its dynamic symbols, without versions; of the undefined ones those that it cannot do without."""
    fields = [line.split() for line in _output("nm", "--dynamic", which, library)]
    names = {field[-1].split("@")[0] for field in fields if which == "--defined-only" or field[-2] == "U"}
    return {name for name in names if not name.startswith(OF_PYTHON)}


def _output(*command: str | Path) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
