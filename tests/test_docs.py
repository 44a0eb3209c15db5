"""What the documents say is there: links, commands, messages, pictures; what they show can be pasted."""

import ast
import re
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import yaml

from mindspeed_chunk.tools.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT, *(ROOT / name for name in ("docs", "patches")), *(ROOT / "examples").iterdir(), *ROOT.glob("tests/*/"))
DOCUMENTS = sorted(path for folder in FOLDERS for path in folder.glob("*.md"))
# each with its Chinese twin
PAIRS = [path for path in DOCUMENTS if path.with_suffix(".zh-CN.md").exists()]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.S | re.M)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^(#+) +(.*)$", re.M)
NUMBER = re.compile(r"\d+(?:\.\d+)*(?:e-?\d+)?")
OURS = re.compile(r"(?<![\w./-])((?:benchmarks|ci|docs|examples|mindspeed_chunk|patches|tests)/[\w./-]*)")
# files of MindSpeed-MM that stand in folders of the same names
THEIRS = {"examples/qwen3_5/README.md"}


def name_of(path):
    return str(path.relative_to(ROOT))


def read(path):
    return path.read_text(encoding="utf-8")


def blocks(path, *languages):
    return [text for language, text in FENCE.findall(read(path)) if language in languages]


def prose(path):
    """Without blocks of code and spans of code, which may hold what looks like a link or a heading."""
    return SPAN.sub("", FENCE.sub("", read(path)))


def anchors(path):
    """As GitHub makes them of headings: lower case, punctuation gone, a number where one comes again."""
    found, seen = set(), Counter()
    for _, title in HEADING.findall(FENCE.sub("", read(path))):
        slug = re.sub(r"[^\w\- ]", "", LINK.sub(lambda link: link[0].split("](")[0][1:], title).lower()).replace(
            " ", "-"
        )
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)


@every_document
def test_yaml_in_the_documents_is_yaml(path):
    for text in blocks(path, "yaml"):
        assert isinstance(yaml.safe_load(textwrap.dedent(text)), dict), text


@every_document
def test_python_in_the_documents_is_python(path):
    for text in blocks(path, "python"):
        ast.parse(textwrap.dedent(text))


@every_document
def test_every_link_leads_somewhere(path):
    broken = []
    for target in LINK.findall(prose(path)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or anchor and anchor not in anchors(there):
            broken.append(target)
    assert not broken


@every_document
def test_files_and_modules_that_are_named_exist(path):
    text = read(path)
    named = "\n".join([*blocks(path, "bash", "console"), *SPAN.findall(FENCE.sub("", text))])
    files = {found.rstrip("./") for found in OURS.findall(named) if "NAME" not in found} - THEIRS
    missing = [name for name in files if not (ROOT / name).exists() and not list(ROOT.glob(f"{name}*"))]
    modules = {found.rstrip(".") for found in re.findall(r"-m (mindspeed_chunk[\w.]*)", named)}
    tests = "".join(read(module) for module in (ROOT / "tests").rglob("test_*.py"))
    missing += [name for name in re.findall(r"(?<![\w/])test_\w+(?![\w.])", named) if f"def {name}(" not in tests]
    missing += [name for name in modules if not list(ROOT.glob(f"{name.replace('.', '/')}*"))]
    assert not missing


@every_document
def test_commands_and_their_options_exist(path):
    text = FENCE.sub("", read(path))
    lines = "\n".join(blocks(path, "bash", "console")).replace("\\\n", " ").splitlines()
    for line in [*lines, *(" ".join(span.split()) for span in SPAN.findall(text))]:
        for command, rest in re.findall(r"mindspeed-chunk (\w+)([^|;&#]*)", line):
            if command == "COMMAND":
                continue
            assert command in COMMANDS, line
            source = "".join(read(module) for module in (ROOT / "mindspeed_chunk" / "tools").glob("*.py"))
            for option in re.findall(r"(?<!\S)--[\w-]+", rest):
                assert option == "--help" or f'"{option}"' in source, line


def test_every_option_has_help():
    for path in sorted([*(ROOT / "mindspeed_chunk").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]):
        calls = [node for node in ast.walk(ast.parse(read(path))) if isinstance(node, ast.Call)]
        for call in calls:
            if getattr(call.func, "attr", "") == "add_argument" and ast.unparse(call.args[0]) != "'--version'":
                assert any(each.arg == "help" for each in call.keywords), (name_of(path), ast.unparse(call.args[0]))


def test_the_readme_lists_every_document():
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in LINK.findall(prose(ROOT / "README.md"))}
    assert not [name_of(path) for path in DOCUMENTS if path.parent == ROOT / "docs" and path not in linked]


def sections(path):
    """For each heading its depth, its spans of code, and the numbers in its prose."""
    parts = re.split(r"^(#+) .*$", FENCE.sub("", read(path)), flags=re.M)
    for depth, text in zip(parts[1::2], parts[2::2]):
        spans = Counter(" ".join(span.split()) for span in SPAN.findall(text))
        numbers = Counter(NUMBER.findall(re.sub(r"\]\([^)]*\)", "]", SPAN.sub("", text))))
        yield depth, spans, numbers


def without_comments(text):
    return [re.sub(r"(^|\s+)#.*", "", line) for line in text.splitlines()]


@pytest.mark.parametrize("path", PAIRS, ids=name_of)
def test_a_document_and_its_chinese_twin_say_the_same(path):
    twin = path.with_suffix(".zh-CN.md")
    assert f"({twin.name})" in read(path) and f"({path.name})" in read(twin)
    ours, theirs = list(sections(path)), list(sections(twin))
    assert [depth for depth, *_ in ours] == [depth for depth, *_ in theirs]
    code, twins_code = (FENCE.findall(read(each)) for each in (path, twin))
    assert [language for language, _ in code] == [language for language, _ in twins_code]
    for (_, text), (_, other) in zip(code, twins_code):
        assert without_comments(text) == without_comments(other)


@pytest.mark.parametrize("path", [path for path in PAIRS if path.name == "README.md"], ids=name_of)
def test_the_readmes_have_the_same_names_and_figures(path):
    for (_, spans, numbers), (_, other_spans, other_numbers) in zip(
        sections(path), sections(path.with_suffix(".zh-CN.md")), strict=True
    ):
        assert spans == other_spans
        assert numbers == other_numbers


def test_messages_in_the_troubleshooting_are_those_of_the_code():
    trees = [
        ast.parse(read(path)) for folder in ("mindspeed_chunk", "patches") for path in (ROOT / folder).rglob("*.py")
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    said = "\n".join(
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    )
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", read(ROOT / "docs" / "troubleshooting.md"))
    assert len(quoted) > 40
    for message in quoted:
        for part in " ".join(message.split()).split("..."):
            # keys and values are put together with colons, rules and ways out with semicolons
            for piece in re.split(r"; |: ", part):
                assert piece.strip(" :;,") in said, message
