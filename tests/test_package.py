"""The package as a whole: what an import does, what is installed, and rules for every file of the project."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mindspeed_chunk

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"mindspeed_chunk": ROOT / "mindspeed_chunk", "mindspeed_chunk.patches": ROOT / "patches"}
OLDEST_PYTHON = (3, 10)
MAX_LINES = 400
# Who may import whom: a part only imports parts of its own or a higher number.
LAYERS = {
    **dict.fromkeys(("tools", "lint", "standalone", "patches", "autoload", "launch"), 0),
    **dict.fromkeys(("moe", "mbs", "planner"), 1),
}
BASE_LAYER = 2
MACHINE_PATH = re.compile(r"(?<![\w.}])/(work|root|home|opt|mnt|Users)/\w")
REGISTRY_HOST = re.compile(r"(pypi|pythonhosted|download\.pytorch|debian|ubuntu)\.(org|com)")


def project_files():
    """Every file that is tracked or could be, as paths below ROOT."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout")
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    answer = subprocess.run(listing, capture_output=True, text=True, check=True)
    return [path for name in answer.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def python_files():
    return [path for path in project_files() if path.suffix == ".py"]


def run_python(code):
    """Run `code` in a fresh interpreter that sees this process's `sys.path`."""
    code = f"import sys; sys.path[:] = {sys.path!r}\n{code}"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_import_changes_nothing():
    run_python(
        "import os, threading\n"
        "def state():\n"
        "    return dict(os.environ), list(sys.meta_path), list(sys.path_hooks), threading.enumerate()\n"
        "before = state()\n"
        "import mindspeed_chunk\n"
        "assert state() == before\n"
        "assert not {'torch', 'torch_npu', 'transformers', 'numpy', 'yaml', 'mindspeed_mm'} & set(sys.modules)\n"
    )


def test_import_of_every_module_touches_no_device_and_no_process_group():
    pytest.importorskip("transformers")
    run_python(
        "import os, pkgutil, importlib, mindspeed_chunk\n"
        "names = [module.name for module in pkgutil.walk_packages(mindspeed_chunk.__path__, 'mindspeed_chunk.')]\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
        "import torch\n"
        "assert not torch.distributed.is_initialized()\n"
        "assert not torch.cuda.is_initialized()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(int(torch.ones(3).sum().item()))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3\n"
    )


def test_public_names():
    assert set(mindspeed_chunk.__all__) == {"ChunkMoEConfig", "ConfigError", "__version__"}
    for name in mindspeed_chunk.__all__:
        assert hasattr(mindspeed_chunk, name)


def test_installed_version_and_patches():
    # Metadata in the checkout is left there by an editable install into some environment, maybe not this one.
    found = importlib.metadata.distributions(name="mindspeed_chunk")
    versions = {each.version for each in found if Path(each.locate_file("")).resolve() != ROOT}
    if not versions:
        pytest.skip("mindspeed_chunk is not installed here")
    assert versions == {mindspeed_chunk.__version__}
    assert run_python("import mindspeed_chunk.patches as patches; print(patches.__name__)").strip() == (
        "mindspeed_chunk.patches"
    )


def test_the_checkout_has_the_patches_in_the_package():
    """It comes before an installed package wherever Python is started in its root."""
    link = ROOT / "mindspeed_chunk" / "patches"
    assert os.readlink(link) == "../patches"
    assert (link / "__init__.py").samefile(ROOT / "patches" / "__init__.py")


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_packages(tmp_path):
    pytest.importorskip("setuptools", minversion="70.1", reason="older ones need the package wheel to build one")
    source = tmp_path / "source"
    for path in project_files():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (source / "mindspeed_chunk" / "patches").symlink_to(os.readlink(ROOT / "mindspeed_chunk" / "patches"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    answer = subprocess.run([*build, "-w", str(tmp_path), str(source)], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    installed = {name for name in names if ".dist-info/" not in name}
    expected = {"mindspeed_chunk/patches/README.md"}
    for package, folder in PACKAGES.items():
        for path in python_files():
            if folder in path.parents:
                expected.add(f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}")
    assert installed == expected
    (points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    points = zipfile.ZipFile(wheel).read(points).decode()
    assert "[console_scripts]\nmindspeed-chunk = mindspeed_chunk.tools.__main__:main\n" in points
    assert "[torch.backends]\nmindspeed_chunk = mindspeed_chunk.autoload:autoload\n" in points


def test_every_python_file_is_short_and_parses_with_the_oldest_python():
    files = python_files()
    assert len(files) > 10
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") < MAX_LINES, f"{path}: a file this long is asking to be two"
        ast.parse(text, str(path), feature_version=OLDEST_PYTHON)


def test_no_machine_path_and_no_registry_host_in_any_file():
    found = []
    for path in project_files():
        if path.suffix == ".png":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line) or REGISTRY_HOST.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def imported_parts(tree):
    """Names of the package's parts that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            assert package not in ("mindspeed", "mindspeed_mm"), f"{name}: the host is never imported"
            if package == "mindspeed_chunk":
                yield rest.split(".")[0]


def test_imports_point_one_way():
    for path in python_files():
        if PACKAGES["mindspeed_chunk"] not in path.parents:
            continue
        part = path.relative_to(PACKAGES["mindspeed_chunk"]).parts[0].removesuffix(".py")
        for imported in imported_parts(ast.parse(path.read_text(encoding="utf-8"))):
            assert LAYERS.get(part, BASE_LAYER) <= LAYERS.get(imported, BASE_LAYER), f"{path} imports {imported}"
