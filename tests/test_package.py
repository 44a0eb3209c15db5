"""The package as a whole: what an import does, what is installed, and rules for every file of the project."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import mindspeed_chunk

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"mindspeed_chunk": ROOT / "mindspeed_chunk", "mindspeed_chunk.patches": ROOT / "patches"}
OLDEST_PYTHON = (3, 10)
MAX_LINES = 400
# Who may import whom: a part only imports parts of lower floors. On the ground, below all of these, modules share.
FLOORS = (
    ("autoload", "launch", "standalone"),
    ("tools",),
    ("lint", "patches", "planner"),
    ("mbs", "moe"),
    ("ops",),
)
# What patches use of the packages below them: algorithms stand behind these doors.
DOORS = (
    "config consistency copies device dist log model_config ops patches "
    "moe.arguments moe.checks moe.dispatcher moe.replay moe.shared_expert mbs.block mbs.checks"
).split()
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


def test_the_changelog_has_the_version():
    entries = re.findall(r"^## \[(.+)\](?: - \d{4}-\d\d-\d\d)?$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    version, released = Version(mindspeed_chunk.__version__), [Version(entry) for entry in entries[1:]]
    assert entries[0] == "Unreleased" and released == sorted(released, reverse=True)
    assert released[0] == version or version.is_prerelease and released[0] < version


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


@pytest.mark.skipif(not PACKAGES["mindspeed_chunk"].is_dir(), reason="needs the package's own checkout")
def test_the_checkout_has_the_patches_in_the_package():
    """It comes before an installed package wherever Python is started in its root."""
    link = ROOT / "mindspeed_chunk" / "patches"
    assert os.readlink(link) == "../patches"
    assert (link / "__init__.py").samefile(ROOT / "patches" / "__init__.py")


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


def trees(package):
    """The modules of one of PACKAGES, parsed, by their paths."""
    folder = PACKAGES[package]
    found = {
        path.relative_to(folder): ast.parse(path.read_text(encoding="utf-8"))
        for path in python_files()
        if folder in path.parents
    }
    assert len(found) > 10
    return found.items()


def imported(nodes):
    """Full names of what is imported by any of the nodes."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def of_the_host(name):
    return name.partition(".")[0] in ("mindspeed", "mindspeed_mm")


def test_imports_point_one_way():
    floors = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
    ground = len(FLOORS)
    files = [(path.parts[0].removesuffix(".py"), path, tree) for path, tree in trees("mindspeed_chunk")]
    files += [("patches", path, tree) for path, tree in trees("mindspeed_chunk.patches")]
    assert floors.keys() <= {part for part, *_ in files}
    for part, path, tree in files:
        for name in imported(ast.walk(tree)):
            package, _, rest = name.partition(".")
            to = rest.partition(".")[0]
            here, there = floors.get(part, ground), floors.get(to, ground)
            down = here < there or part == to or here == there == ground
            assert down or package != "mindspeed_chunk", f"{part}: {path} imports {name}"


def test_the_package_never_imports_the_host():
    for path, tree in trees("mindspeed_chunk"):
        assert not [name for name in imported(ast.walk(tree)) if of_the_host(name)], path


def test_only_patches_and_tools_know_names_of_the_hosts_modules():
    for path, tree in trees("mindspeed_chunk"):
        if path.parts[0] != "tools":
            nodes = list(ast.walk(tree))
            docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            assert not [each.value for each in texts if of_the_host(each.value) and id(each) not in docstrings], path


def test_patches_hold_no_algorithm_and_import_nothing_heavy_at_their_top():
    for path, tree in trees("mindspeed_chunk.patches"):
        for name in imported(ast.walk(tree)):
            package, _, rest = name.partition(".")
            if package == "mindspeed_chunk":
                assert any(f"{rest}.".startswith(f"{door}.") for door in DOORS), f"{path} imports {name}"
        for name in imported(tree.body):
            assert name.partition(".")[0] in sys.stdlib_module_names | {"mindspeed_chunk"}, f"{path} imports {name}"
        bases = [ast.unparse(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
        assert not [base for base in bases if base.rpartition(".")[2] in ("Function", "Module")], path
