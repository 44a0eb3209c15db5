"""The public names: as they are written down, each with a docstring, in a document, and imported as cheaply as told."""

import inspect
import re
import subprocess
import sys

import pytest
import torch

import documents
import mindspeed_chunk
import public_api
from mindspeed_chunk.moe.reference import moe_reference

NAMES = {f"{module}.{name}": value for module, name, value in public_api.names() if callable(value)}


@pytest.mark.parametrize("name", documents.FILES)
def test_what_is_made_from_the_code_is_current(name):
    changed = documents.difference(name, documents.current(name))
    assert not changed, f"`python docs/make` writes it; docs/release.md says what a change means\n{changed}"


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


EXAMPLES = re.findall(r"^```python\n(.*?)^```", (documents.ROOT / "docs" / "api.md").read_text("utf-8"), re.S | re.M)


def test_examples_of_the_document(capsys):
    """In their order: each may use what those before it have made."""
    layer, checkpoints, schedule = EXAMPLES
    made = {}
    exec(layer, made)
    assert made["out"].shape == (made["T"], made["H"])
    expected = moe_reference(*(made[name] for name in ("x", "experts", "weights", "fc1", "fc2")))
    torch.testing.assert_close(made["out"], expected, rtol=1e-4, atol=1e-4)
    exec(checkpoints, made)
    assert torch.equal(made["y"], made["z"]) and made["x"].grad.shape == made["x"].shape
    exec(schedule, made)
    assert capsys.readouterr().out == "hides 75.0%  P0 D0 P1 D1 E0 C0 P2 D2 E1 C1 U0 P3 D3 E2 C2 U1 E3 C3 U2 U3\n"
