"""More than one copy of the package on the path: what is told of it, and where."""

import json
import shutil

import pytest

from copied import copy_package, run_python
from host_lookalike import folders
from mindspeed_chunk.tools import doctor

# Only what a test puts on the path: neither an editable install nor one in site-packages.
ALONE = """
import os, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not getattr(finder, "__module__", "").startswith("__edit")]
sys.path[:] = [entry for entry in sys.path if entry in {mine!r} or not os.path.isdir(entry + "/mindspeed_chunk")]
"""
# As setuptools' finder of an editable install does.
EDITABLE = """
import importlib.machinery
class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "mindspeed_chunk" or name.startswith("mindspeed_chunk.") and name.count(".") == 1:
            folder = {folder!r} if name == "mindspeed_chunk" else {folder!r} + "/mindspeed_chunk"
            return importlib.machinery.PathFinder.find_spec(name, [folder])
sys.meta_path.append(Editable)
"""
PROBLEMS = "from mindspeed_chunk import copies\nprint(copies.core(), copies.patches(), *copies.problems(), sep='\\n')"


@pytest.fixture
def two(tmp_path):
    return [copy_package(tmp_path / name) for name in ("first", "second")]


def told(*path, editable=None, code=PROBLEMS, **variables):
    alone = ALONE.format(mine=[str(folder) for folder in path])
    code = alone + (EDITABLE.format(folder=str(editable)) if editable else "") + code
    return run_python(code, *path, **variables)


def test_a_package_alone_is_no_problem(two):
    package = two[0] / "mindspeed_chunk"
    assert told(two[0]).stdout.splitlines() == [str(package), str(package / "patches")]
    # found twice, and a link to it, is one copy
    link = two[0].parent / "link"
    link.symlink_to(two[0])
    assert len(told(two[0], two[0], link, editable=two[0]).stdout.splitlines()) == 2


def test_a_checkout_has_its_patches_beside_the_package(two):
    shutil.move(two[0] / "mindspeed_chunk" / "patches", two[0] / "patches")
    (two[0] / "mindspeed_chunk" / "patches").symlink_to("../patches")
    assert told(two[0]).stdout.splitlines() == [str(two[0] / "mindspeed_chunk"), str(two[0] / "patches")]


@pytest.mark.parametrize("editable", [False, True])
def test_a_second_copy_is_told_with_both_folders(two, editable):
    first, second = two
    answer = told(first, editable=second) if editable else told(first, second)
    *_, line = answer.stdout.splitlines()
    used, hidden = first / "mindspeed_chunk", second / "mindspeed_chunk"
    assert line == f"there are several copies: {used} is used, not used: {hidden}; remove the unwanted ones"


def test_patches_of_another_copy_are_told_with_both_folders(two):
    first, second = two
    shutil.rmtree(first / "mindspeed_chunk" / "patches")
    core, seams, line = told(first, editable=second).stdout.splitlines()
    assert core == str(first / "mindspeed_chunk") and seams == str(second / "mindspeed_chunk" / "patches")
    assert line == f"two copies are mixed: the core is {core}, its patches are {seams}; uninstall one of them"


def test_the_host_is_told_once_on_rank_0(two):
    pytest.importorskip("pydantic")
    code = (
        "from mindspeed_chunk.patches import install\n"
        "install()\n"
        "import mindspeed_mm.fsdp.params.parallel_args, mindspeed_mm.fsdp.params.argument\n"
    )
    path = (*two, *folders("master"))
    (line,) = told(*path, code=code, RANK="0").stderr.splitlines()
    assert line.startswith(f"mindspeed_chunk: there are several copies: {two[0] / 'mindspeed_chunk'} is used, ")
    assert told(*path, code=code, RANK="1").stderr == ""
    assert told(two[0], *folders("master"), code=code, RANK="0").stderr == ""


def test_doctor_shows_the_folder_of_each_part_and_the_copies(two):
    code = (
        "import sys\n"
        "from mindspeed_chunk.tools.__main__ import main\n"
        "sys.argv[1:] = ['doctor', '--json']\n"
        "sys.exit(main())\n"
    )
    report = json.loads(run_python(code, *two, expect=1).stdout)
    package = two[0] / "mindspeed_chunk"
    assert report["package"] == {"core": str(package), "patches": str(package / "patches")}
    (line,) = report["notes"]
    assert line.startswith(f"there are several copies: {package} is used, not used: {two[1] / 'mindspeed_chunk'}")
    shown = dict(doctor._facts(report))
    assert shown["its core"] == str(package) and shown["its patches"] == str(package / "patches")
