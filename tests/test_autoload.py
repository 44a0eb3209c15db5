"""What damaged files of the plugin, or of what it requires, do to others: one line on stderr and nothing else."""

import pytest

from copied import copy_package, run_python
from host_lookalike import folders

# What torch does at the end of its import.
LOAD = """
import sys
from importlib.metadata import entry_points
(point,) = (point for point in entry_points(group="torch.backends") if point.name == "mindspeed_chunk")
point.load()()
"""
OURS = "print(*sorted(name for name in sys.modules if name.startswith('mindspeed_chunk')))"
AS_ERRORS = ("-W", "error")
DAMAGES = {
    "cut off": ("def install(\n", "SyntaxError"),
    "empty": ("", "ImportError"),
    "not text": ("\0", "SyntaxError"),
    "raises": ("1 / 0\n", "ZeroDivisionError: division by zero"),
    "raises lines": ("raise ValueError('one\\ntwo')\n", "ValueError: one two"),
    "warns": ("import warnings\nwarnings.warn('of old')\n" + "def install(): pass\n", "UserWarning: of old"),
    "exits": ("raise SystemExit(3)\n", "SystemExit: 3"),
    "interrupts": ("class Stop(BaseException): pass\nraise Stop\n", "Stop"),
    "missing": (None, "ImportError"),
    "blank": ("", "has no attribute 'PATCH'"),
}


@pytest.fixture
def package(tmp_path):
    return copy_package(tmp_path / "site")


def damage(package, file, text):
    path = package / "mindspeed_chunk" / file
    if text is None:
        path.unlink()
    else:
        path.write_text(text)


def one_line(answer, *parts):
    (line,) = answer.stderr.splitlines()
    assert line.startswith("mindspeed_chunk is not available: ") and all(part in line for part in parts), line


def test_a_sound_package_says_nothing_and_imports_no_requirement(package):
    broken = package.parent / "broken"
    broken.mkdir()
    for name in ("yaml", "packaging", "rich", "wrapt"):
        (broken / f"{name}.py").write_text("raise SystemExit(3)\n")
    answer = run_python(f"{LOAD}{OURS}", package, broken, options=AS_ERRORS)
    assert answer.stderr == "" and "mindspeed_chunk.patches" in answer.stdout.split()


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "blank"])
def test_whatever_a_file_does_is_one_line_also_where_warnings_are_errors(package, kind):
    text, told = DAMAGES[kind]
    damage(package, "patches/__init__.py", text)
    one_line(run_python(LOAD, package, options=AS_ERRORS), told, str(package))


@pytest.mark.parametrize("file", ["__init__.py", "patches/hooks.py", "patches/settings.py"])
def test_any_file_may_be_cut_off(package, file):
    damage(package, file, "def half(\n")
    one_line(run_python(LOAD, package, options=AS_ERRORS), "SyntaxError", str(package))


def test_damaged_files_that_are_not_needed_yet_say_nothing(package):
    for file in ("config.py", "autoload.py", "patches/config_name.py", "patches/record.py"):
        damage(package, file, "def half(\n")
    assert run_python(LOAD, package, options=AS_ERRORS).stderr == ""


@pytest.mark.parametrize("kind", ["cut off", "exits"])
def test_torch_is_imported(package, kind):
    damage(package, "__init__.py", DAMAGES[kind][0])
    code = "import torch\nassert torch.ones(2).sum() == 2"
    one_line(run_python(code, package, options=AS_ERRORS), DAMAGES[kind][1])


def test_an_interrupt_of_the_user_is_one(package):
    damage(package, "patches/__init__.py", "raise KeyboardInterrupt\n")
    assert "KeyboardInterrupt" in run_python(LOAD, package, expect=-2).stderr


@pytest.mark.parametrize("stderr", ["sys.stderr = None", "sys.stderr.close()", "import os; os.close(2)"])
def test_without_stderr_nothing_is_said(package, stderr):
    damage(package, "patches/__init__.py", "1 / 0\n")
    answer = run_python(f"import sys\n{stderr}\n{LOAD}", package)
    assert answer.stdout == answer.stderr == ""


def test_turned_off_nothing_is_imported(package):
    answer = run_python(f"{LOAD}{OURS}", package, MINDSPEED_CHUNK_DISABLE="1")
    assert answer.stdout.split() == ["mindspeed_chunk_autoload"]


def test_the_entry_point_of_0_1_0_still_works_in_an_editable_install(package):
    """Its finder knows the package and no module beside it."""
    code = "import sys; sys.modules['mindspeed_chunk_autoload'] = None\nfrom mindspeed_chunk.autoload import autoload\n"
    answer = run_python(f"{code}autoload()\nfrom mindspeed_chunk import patches\nprint(patches.installed())", package)
    assert answer.stdout == "True\n" and answer.stderr == ""


IN_THE_HOST = """
import sys
from mindspeed_chunk import patches
patches.install()
from mindspeed_mm.fsdp.params import parallel_args
try:
    from mindspeed_mm.fsdp.params import argument
    from mindspeed_mm.fsdp.distributed import torch_parallelize
    parallel_args.EPPlanConfig(dispatcher="chunkmoe", apply_modules=["experts"])
except ValueError:
    print("refused by the host")
assert not patches.installed()
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("mindspeed_chunk")]
"""


@pytest.mark.parametrize(
    "file, kind",
    [
        ("config.py", "cut off"),
        ("patches/start_checks.py", "exits"),
        ("patches/record.py", "interrupts"),
        *((f"patches/{name}.py", "blank") for name in ("start_checks", "config_name", "expert_parallel")),
    ],
)
def test_an_import_of_the_host_goes_on_without_the_plugin(package, file, kind):
    """All patches are taken back: the name that the first of them admits would be the name of nothing."""
    pytest.importorskip("pydantic")
    text, told = DAMAGES[kind]
    damage(package, file, text)
    options = ("-W", "error::UserWarning")
    answer = run_python(IN_THE_HOST, package, *folders("master"), options=options, RANK="1")  # 0 would tell of copies
    assert answer.stdout == "refused by the host\n"
    one_line(answer, told, str(package))


def test_an_import_of_the_host_goes_on_with_stderr_closed(package):
    pytest.importorskip("pydantic")
    damage(package, "patches/start_checks.py", "1 / 0\n")
    answer = run_python(f"import sys; sys.stderr.close()\n{IN_THE_HOST}", package, *folders("master"))
    assert answer.stdout == "refused by the host\n"


def test_interrupted_imports_of_the_host_end(package):
    pytest.importorskip("pydantic")
    damage(package, "patches/start_checks.py", "raise KeyboardInterrupt\n")
    assert "KeyboardInterrupt" in run_python(IN_THE_HOST, package, *folders("master"), expect=-2).stderr
