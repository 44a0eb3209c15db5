"""What is known of the patches before the host is imported, and what its modules look like afterwards."""

import importlib
import importlib.machinery
import importlib.resources
import inspect
import runpy
import sys

import pytest

from mindspeed_chunk import patches
from mindspeed_chunk.patches.hooks import PostImport
from mindspeed_chunk.patches.on_cpu import device as on_cpu

NAME = "hooked_module"
TEXT = """value = 1


def f():
    pass


if __name__ == "__main__":
    value = 2
"""


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """What the hook on NAME, a module on the path, has seen."""
    (tmp_path / f"{NAME}.py").write_text(
        "value = 1\n\n\ndef f():\n    pass\n\n\nif __name__ == '__main__':\n    value = 2\n"
    )
    seen = []
    hook = PostImport({NAME}, lambda name, module: seen.append((name, module.value)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    yield seen
    sys.modules.pop(NAME, None)


def test_the_table_of_hooks_is_that_of_the_records():
    for records, hooks in ((patches.PATCHES, patches.HOOKS), (on_cpu.PATCHES, patches.ON_CPU)):
        assert {patch.module for patch in records} == set(hooks)
        for patch in records:
            files = [importlib.import_module(f"mindspeed_chunk.patches.{file}") for file in hooks[patch.module]]
            found = [vars(file).get("PATCHES", [getattr(file, "PATCH", None)]) for file in files]
            assert patch in [each for several in found for each in several]
    assert not set(patches.HOOKS) & set(patches.ON_CPU)


def test_every_patch_has_one_record_and_its_file_is_in_the_table():
    names = [patch.name for patch in (*patches.PATCHES, *on_cpu.PATCHES)]
    assert len(set(names)) == len(names)
    folder = importlib.resources.files(patches)
    with_records = {file.stem for file in folder.glob("*.py") if "Patch(\n" in file.read_text("utf-8")}
    assert with_records == {file for files in patches.HOOKS.values() for file in files}


def test_a_hook_runs_after_the_module_and_leaves_no_trace_in_it(seen):
    module = importlib.import_module(NAME)
    assert seen == [(NAME, 1)]
    assert type(module.__loader__) is type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert inspect.getsource(module.f) == "def f():\n    pass\n"
    assert importlib.import_module(NAME) is module and len(seen) == 1


def test_a_module_that_fails_is_hooked_at_its_next_import(seen, tmp_path):
    (tmp_path / f"{NAME}.py").write_text("1 / 0  # shorter, so that no cached code fits\n")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(NAME)
    assert seen == [] and NAME not in sys.modules
    (tmp_path / f"{NAME}.py").write_text(TEXT)
    importlib.import_module(NAME)
    assert seen == [(NAME, 1)]


def test_a_module_that_runs_as_a_script_or_is_not_there_is_as_without_a_hook(seen, tmp_path):
    assert runpy.run_module(NAME, run_name="__main__")["value"] == 2
    (tmp_path / f"{NAME}.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{NAME}'"):
        importlib.import_module(NAME)
    assert seen == []


def test_two_finders_that_ask_each_other_end(seen, monkeypatch):
    """As wrapt's does: it asks all finders again, but for itself."""

    class Asking:
        busy = False

        def find_spec(self, name, path=None, target=None):
            if name != NAME or self.busy:
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    ours, *others = sys.meta_path
    for finders in ([ours, Asking()], [Asking(), ours]):
        monkeypatch.setattr(sys, "meta_path", [*finders, *others])
        sys.modules.pop(NAME, None)
        seen.clear()
        importlib.import_module(NAME)
        assert set(seen) == {(NAME, 1)}
