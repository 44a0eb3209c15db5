"""The JSON that commands print and write, held against json_records.txt, which docs/release.md promises to keep.

Behind a line with a record's name in brackets come the paths of its keys, each with the type of the value in JSON's
words. In a path `[]` stands for every element of a list, `*` for any name where keys are data, and `?` at its end for a
key that some records lack.
"""

import itertools
import re
from pathlib import Path

TEXT = Path(__file__).with_suffix(".txt")
TYPES = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}


def assert_record(name, record):
    """Every key that is there is promised, with a value of its type, and every key that is promised is there."""
    wanted, wrong, seen = promised(name), [], set()
    for here, kind in leaves(record):
        path = next((path for path in wanted if matches(path, here)), None)
        seen.add(path)
        if path is None or kind not in wanted[path]:
            wrong.append(f"{here}: {kind}")
    assert not wrong, f"not under [{name}] in {TEXT.name}:\n" + "\n".join(sorted(wrong))
    missing = [path for path in wanted if path not in seen and not path.endswith("?")]
    assert not missing, f"under [{name}] in {TEXT.name}, and not in the record:\n" + "\n".join(missing)


def promised(name):
    """{path: types} of one record."""
    lines = itertools.dropwhile(lambda line: line != f"[{name}]", TEXT.read_text(encoding="utf-8").splitlines())
    lines = itertools.takewhile(bool, itertools.islice(lines, 1, None))
    return {path: kinds.split(" or ") for path, kinds in (line.rsplit(": ", 1) for line in lines)}


def matches(path, here):
    return re.fullmatch(re.escape(path.removesuffix("?")).replace(r"\*", ".+"), here) is not None


def leaves(value, path=""):
    """{(path, type)} of all values that hold no others; empty lists and objects have none."""
    if isinstance(value, dict):
        return set().union(*(leaves(each, f"{path}.{key}" if path else key) for key, each in value.items()))
    if isinstance(value, list):
        return set().union(*(leaves(each, f"{path}[]") for each in value))
    return {(path, TYPES[type(value)])}
