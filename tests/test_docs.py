"""What the documents show can be pasted."""

import re
import textwrap
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path for folder in (ROOT, ROOT / "docs", *(ROOT / "examples").iterdir()) for path in folder.glob("*.md")
)
BLOCKS = [
    pytest.param(text, id=f"{path.name}-{number}")
    for path in DOCUMENTS
    for number, text in enumerate(re.findall(r"^ *```yaml\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.S | re.M))
]


@pytest.mark.parametrize("text", BLOCKS)
def test_yaml_in_the_documents_is_yaml(text):
    assert isinstance(yaml.safe_load(textwrap.dedent(text)), dict)
