"""The prose of documents, docstrings, comments and messages has none of the words in WORDS: there are plainer ones."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COUNTED = (
    "once twice times one bytes rows tokens samples experts calls? copy copies line matmul passes messages "
    "collectives? all-to-alls?"
)
PER = (
    "token rank step layer call chunk micro-chunk block device node message second expert group process model case "
    "direction file run kind line sample row key host round pass sequence launch stage unit parameter element page"
)
# what is not written, and what to write instead
WORDS = {
    r"told|tells?|telling": "reports, shows, says; is passed",
    r"(?<!-)(stands?(?! for\b|-)|stood|standing)": "is in, is, has",
    r"whoever|nobody|somebody": "no user, no rank, another process",
    r"lets? expect": "gives, expects",
    r"of (its|their|your|one's|our|an) own": "its own ..., a separate ...",
    r"comes? home": "returns",
    r"asks? for it": "needs it, turns it on",
    r"for want of": "without, because there is no",
    r"beside": "next to, in addition to, with",
    r"(may|can) be had": "is available",
    r"mend(s|ed|ing)?": "fix",
    r"at the (worst|most|latest)": "at worst, at most, within",
    r"(in|out)side of": "inside, outside",
    r"parts? ways": "diverge",
    r"for good": "permanently",
    r"a fourth|a fifth": "a quarter, 1/5",
    r"at hand": "current, here",
    r"but for": "except",
    r"the other way round": "reversed, in the wrong order",
    rf"({'|'.join(COUNTED.split())}) an? ({'|'.join(PER.split())}|back end)": "per token, per rank, per step",
}
BANNED = re.compile("|".join(rf"(?P<word{i}>\b({word})\b)".replace(" ", r"\s+") for i, word in enumerate(WORDS)), re.I)
INSTEAD = {f"word{i}": plain for i, plain in enumerate(WORDS.values())}
FENCE = re.compile(r"^ *```.*?^ *```", re.S | re.M)
SPAN = re.compile(r"`[^`\n]+(\n[^`\n]+)?`")
RELEASED = "## [0.1.0]"  # entries of the changelog from here on stay as they are
FOLDERS = ("mindspeed_chunk", "patches", "ci", "benchmarks", "examples", "docs")
# Files that are not in plain words yet, with the number of words to replace: a file without any is taken out.
NOT_YET: dict[str, int] = {
    "mindspeed_chunk/tools/bench_layer.py": 6,
    "mindspeed_chunk/tools/bench_report.py": 5,
    "mindspeed_chunk/tools/trace_files.py": 3,
    "mindspeed_chunk/tools/trace_record.py": 7,
}


def files():
    found = [*ROOT.glob("*.md"), *ROOT.glob("*.py"), *ROOT.glob("tests/*/README.md")]
    for folder in FOLDERS:
        found += [path for suffix in (".md", ".py", ".sh", ".yaml") for path in (ROOT / folder).rglob(f"*{suffix}")]
    return sorted({path.resolve() for path in found})


def prose_of_python(text):
    """Line and words of each string that is more than a name, and of each run of comments."""
    inside = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "x" for part in node.values]
            inside.update(map(id, node.values))
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            if " " in node.value:
                yield node.lineno, node.value
    comments = {}
    for each in tokenize.generate_tokens(io.StringIO(text).readline):
        if each.type == tokenize.COMMENT:
            comments[each.start[0]] = each.string.strip("#")
    while comments:
        line = first = min(comments)
        run = []
        while line in comments:
            run.append(comments.pop(line))
            line += 1
        yield first, "\n".join(run)


def prose(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from prose_of_python(text)
    elif path.suffix == ".md":
        yield 1, FENCE.sub(blank, text.partition(RELEASED)[0] if path.name == "CHANGELOG.md" else text)
    else:
        yield 1, "\n".join(line.partition("#")[2] for line in text.splitlines())


def blank(code):
    """In place of code: a word, and as many lines."""
    return "x" + "\n" * code[0].count("\n")


def findings(path):
    name = path.relative_to(ROOT)
    for line, text in prose(path):
        text = SPAN.sub(blank, text)
        for match in BANNED.finditer(text):
            at = line + text.count("\n", 0, match.start())
            yield f"{name}:{at}: {' '.join(match[0].split())!r}: write for example: {INSTEAD[match.lastgroup]}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_in_plain_words(path):
    found = list(findings(path))
    allowed = NOT_YET.get(str(path.relative_to(ROOT)), 0)
    assert len(found) <= allowed, "\n".join(["", *found, f"expected at most {allowed}, got {len(found)}"])


@pytest.mark.parametrize("name", NOT_YET)
def test_only_files_with_such_words_are_exempt(name):
    assert (ROOT / name).exists() and list(findings(ROOT / name))


@pytest.mark.parametrize(
    "text, lines",
    [
        ("# 8 experts a token", [1]),
        ("# rows are\n# told, and", [2]),
        ('"""Rows go once\n\na layer."""', [1]),
        ('raise ValueError(\n    f"{x}: once a "\n    "layer"\n)', [2]),
        ('told = {"told": f"{told}"}  # `told` is code, and a stand-in stands for a stub', []),
    ],
)
def test_what_is_found_where(text, lines):
    found = [
        line + text.count("\n", 0, match.start())
        for line, text in prose_of_python(text + "\n")
        for match in BANNED.finditer(SPAN.sub(blank, text))
    ]
    assert found == lines
