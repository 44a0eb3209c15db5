"""Which table is in which document, which files are generated completely, and what each should contain now."""

import difflib
from pathlib import Path

import cost_tables
import drawings
import public_api
import setting_tables
import version_tables

ROOT = Path(__file__).resolve().parents[2]
TABLES = {
    "docs/config.md": {
        "Chunk MoE": setting_tables.chunk_moe,
        "ChunkMBS": setting_tables.chunk_mbs,
        "embedded trainer": setting_tables.trainer,
        "switches": setting_tables.switches,
    },
    "docs/compatibility.md": {
        "requirements": version_tables.requirements,
        "hosts": version_tables.hosts,
        "continuous integration": version_tables.continuous_integration,
    },
    "docs/ascend.md": {
        "kernels": version_tables.kernels,
        "costs": cost_tables.counts,
        "AI CPU": cost_tables.kernels,
    },
    "docs/ascend.zh-CN.md": {"kernels": version_tables.kernels},
    "docs/api.md": {"names": public_api.table_of_names},
}
WHOLE_FILES = {
    "tests/public_api.txt": public_api.text,
    **{f"docs/{name}": draw for name, draw in drawings.DRAWINGS.items()},
}

FILES = (*TABLES, *WHOLE_FILES)


def current(name: str) -> str:
    """The text that one of FILES should have."""
    if name in WHOLE_FILES:
        return WHOLE_FILES[name]()
    text = (ROOT / name).read_text(encoding="utf-8")
    for title, make in TABLES[name].items():
        begin, end = f"<!-- table: {title} -->\n", "<!-- end of table -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise SystemExit(f"{name}: must have the lines {begin.strip()} and {end}")
        text = f"{before}{begin}\n{make()}\n\n{rest[rest.index(end) :]}"
    return text


def difference(name: str, text: str) -> str:
    """From the file as it is to `text`, as a unified diff; empty if they are equal."""
    path = ROOT / name
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = difflib.unified_diff(old.splitlines(True), text.splitlines(True), name, f"{name} (from the code)")
    return "".join(lines)
