"""Versions are the same wherever they stand: setup.py, patches, back ends, scripts, CI."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import version_tables
from host_lookalike import FLAVOURS
from mindspeed_chunk.ops import npu_ops
from mindspeed_chunk.patches import PATCHES

ROOT = Path(__file__).resolve().parent.parent
META = version_tables.metadata()
RANGES = {
    name: SpecifierSet(versions)
    for extra in (META["install_requires"], *META["extras_require"].values())
    for name, versions in map(version_tables.requirement, extra)
}
PYTHONS = [f"3.{minor}" for minor in range(8, 20) if f"3.{minor}" in SpecifierSet(META["python_requires"])]


def lowest(specifiers):
    (version,) = (each.version for each in specifiers if each.operator == ">=")
    return version


def test_pythons():
    classifiers = [each.rpartition(" ")[2] for each in META["classifiers"] if "Python :: 3." in each]
    assert classifiers == PYTHONS
    first, last = PYTHONS[0], PYTHONS[-1]
    # the scripts install the embedded trainer, and with it what its transformers needs
    needed = Version(lowest(SpecifierSet(importlib.metadata.metadata("transformers")["Requires-Python"])))
    script = (ROOT / "ci" / "environment.sh").read_text()
    assert f" oldest={needed.minor}\n" in script and f"|| oldest={Version(first).minor}\n" in script
    assert f"(3, $oldest) <= sys.version_info[:2] <= ({last.replace('.', ', ')})" in script
    assert script.count(f"Python 3.$oldest to {last}") == 2
    assert f"if at_least {needed.minor}; then" in (ROOT / "ci" / "short.sh").read_text()
    ruff = re.search(r'target-version = "py(\d)(\d+)"', (ROOT / "pyproject.toml").read_text()).groups()
    assert ".".join(ruff) == first


def test_torch_and_torch_npu_have_one_range():
    assert RANGES["torch"] == RANGES["torch_npu"]
    assert lowest(RANGES["torch_npu"]) == str(npu_ops.MINIMUM)


def test_ci_runs_both_ends_of_torchs_range():
    _, pythons, (newest, oldest, *_), _ = zip(*version_tables.runs())
    assert oldest == lowest(RANGES["torch"]) and newest in RANGES["torch"]
    following = Version(newest)
    assert f"{following.major}.{following.minor + 1}" not in RANGES["torch"], "a later one is allowed, and not run"
    assert version_tables.newest_torch() == newest
    quickstart = (ROOT / "examples" / "qwen3_5_35b" / "quickstart.sh").read_text()
    assert f'make_environment "$VENV" {newest} ' in quickstart
    assert f"TORCH_VERSION={oldest} " in (ROOT / ".ci" / "run").read_text()
    assert set(pythons) <= set(PYTHONS)


def test_every_version_of_the_host_has_patches_and_a_look_alike():
    named = {version for patch in PATCHES for version in version_tables.hosts_of(patch)}
    assert named == set(version_tables.HOSTS)
    assert len(FLAVOURS) == len(named)
    short = [version.removesuffix(".0").split()[0] for version in version_tables.HOSTS]
    assert short == list(FLAVOURS), "in the order of the look-alikes"


def test_host_requirements_are_in_range():
    pinned = dict(
        line.split("==") for line in version_tables.HOST_REQUIREMENTS.read_text().splitlines() if "==" in line
    )
    assert pinned["torch"] in RANGES["torch"]


def test_a_version_without_a_word_on_what_was_run_is_refused(monkeypatch):
    others = {version: run for version, run in version_tables.HOSTS.items() if version != "26.0.0"}
    monkeypatch.setattr(version_tables, "HOSTS", others)
    with pytest.raises(SystemExit, match="26.0.0: named by a patch: say in HOSTS"):
        version_tables.hosts()
