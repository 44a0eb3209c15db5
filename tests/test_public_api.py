"""The public names: as they are written down, each with a docstring, in a document, and imported as cheaply as told."""

import inspect
import subprocess
import sys

import pytest

import documents
import mindspeed_chunk
import public_api

NAMES = {f"{module}.{name}": value for module, name, value in public_api.names() if callable(value)}


@pytest.mark.parametrize("name", documents.FILES)
def test_what_is_made_from_the_code_is_current(name):
    changed = documents.difference(name, documents.current(name))
    assert not changed, f"`python ci/reference` writes it; docs/release.md says what a change means\n{changed}"


def test_a_change_is_a_readable_difference(monkeypatch):
    monkeypatch.setattr(mindspeed_chunk, "__all__", ["ChunkMoEConfig", "ConfigError", "__version__"])
    changed = documents.difference("tests/public_api.txt", public_api.text())
    assert "\n-class mindspeed_chunk.ChunkMBSConfig()\n" in changed and "\n+" not in changed.split("\n", 2)[2]


@pytest.mark.parametrize("name", NAMES)
def test_docstrings(name):
    value = NAMES[name]
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        # a generated one is the signature again
        assert not value.__doc__.startswith(f"{value.__name__}(")
        members = [
            line.split("(")[0].split()[-1] for line in public_api.members(value) if ": " not in line.split("(")[0]
        ]
        bare = [member for member in members if member != "__init__" and not inspect.getdoc(getattr(value, member))]
        assert not bare, "no docstring"


@pytest.mark.parametrize("module", ["mindspeed_chunk", "mindspeed_chunk.moe.schedule", "mindspeed_chunk.planner"])
def test_imports_without_torch(module):
    code = f"import sys; sys.path[:] = {sys.path!r}; import {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
