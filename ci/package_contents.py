"""Whether an sdist and a wheel hold what they should, and nothing else.

    python ci/package_contents.py dist/NAME.tar.gz dist/NAME.whl

Should be in them: the checkout's modules, each once, those of `patches/` in the wheel as `mindspeed_chunk/patches/`;
the licence; in the sdist also what builds the wheel. Exits with 1 and a line for each file that is missing or too many.
"""

import re
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OTHERS = {"mindspeed_chunk_autoload.py", "mindspeed_chunk/py.typed", "patches/README.md"}
LINK = "mindspeed_chunk/patches/"
BUILDS = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py", "setup.cfg", "PKG-INFO"}
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}


def main(sdist: str, wheel: str) -> int:
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "mindspeed_chunk" / "__init__.py").read_text(), re.M)
    folder = f"mindspeed_chunk-{version}"
    files = zipfile.ZipFile(wheel).namelist()
    installed = {f"mindspeed_chunk/{name}" if name.startswith("patches/") else name for name in sources()}
    problems = differences(wheel, files, installed | {f"{folder}.dist-info/{name}" for name in METADATA})

    with tarfile.open(sdist) as archive:
        files = [member.name for member in archive.getmembers() if not member.isdir()]
    files = [name for name in files if ".egg-info/" not in name]
    problems += differences(sdist, files, {f"{folder}/{name}" for name in sources() | BUILDS})
    print(*problems or [f"{len(installed)} files of the package in each"], sep="\n")
    return int(bool(problems))


def sources() -> set[str]:
    """What is installed, by its path in the checkout."""
    found = {path for name in ("mindspeed_chunk", "patches") for path in (ROOT / name).rglob("*.py")}
    names = {path.relative_to(ROOT).as_posix() for path in found}
    # a link to patches/, which some versions of Python follow
    return OTHERS | {name for name in names if not name.startswith(LINK)}


def differences(archive: str, files: list[str], expected: set[str]) -> list[str]:
    name = Path(archive).name
    return [
        *(f"{name}: {file}: is missing" for file in sorted(expected - set(files))),
        *(f"{name}: {file}: should not be there" for file in sorted(set(files) - expected)),
        *(f"{name}: {file}: is there {times} times" for file, times in Counter(files).items() if times > 1),
    ]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
