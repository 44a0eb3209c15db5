"""Yamls with mistakes: values, types, keys, aliases, tags, nesting, names, encodings. Same number, same yaml."""

from __future__ import annotations

import datetime
import math
import os
import random
from pathlib import Path

import yaml

from lint_cases import CLEAN, EXAMPLE
from mindspeed_chunk.lint import FSDP2_SECTIONS

VALUES = (
    "", "~", "null", "true", "yes", "0", "-1", "1.5", "1e-4", ".inf", "-.inf", ".nan", "1e400", "2020-13-45",
    "2020-01-01", "2020-01-01 00:00:00 +99:99", "1:60", "0o9", "0x" + "f" * 5000, "9" * 5000, "9" * 30, "'\\ud800'",
    '"\\ud800"', '"\\0"', '"a\\nb"', "[]", "{}", "[[]]", "[1, a]", "{a: 1}", "'" + "x" * 5000 + "'", "auto", "chunkmoe",
    "alltoal", "1_000", "!!binary aGVsbG8=", "=", "<<",
    "分块", "\u2028", "- - - a", "? a", "*", "&", "|", ">", "%", "@x",
    "2 # why", "'unclosed", '"unclosed', "[unclosed", "{unclosed: ", ":" * 500, "1:" * 500 + "1", "+-5", "'²'", "1e5",
)  # fmt: skip
TAGS = (
    "!!timestamp", "!!int", "!!bool", "!!float", "!!null", "!!str", "!!binary", "!!omap", "!!pairs", "!!set", "!!seq",
    "!!map", "!!merge", "!!python/object:os.system", "!own", "!<tag:yaml.org,2002:int>", "!!", "!", "!!python/tuple",
)  # fmt: skip
NAMES = (
    "{0-9999999}", "{0-999}.{0-999}.{0-999}", "{3-1}", "{}", "{a}", "{*}", "*", "*" * 60, "*a" * 60, "?" * 199,
    "." * 150,
    "{0-" + "9" * 30 + "}", "layers.{*}.{*}.{*}", "m" * 300, "model.language_model.layers.{0-3}", "(a+)+$", "[a-",
    "model.language_model.layers.{0-999999}.{0-999999}.{0-999999}.?", "layers.{00-07}", "{*}{*}{*}{*}", "", "\\",
)  # fmt: skip
KEYS = (
    "chunk_moe_num", "moe_chunks_num", "moe_num_chunk", "dispatchr", "micro_batchsize", "chunk_mb",
    '"a\\nb"', "1", "null",
    "true", "[a]", "{a: b}", "? a", "'a.b'", '""', "x" * 300, "2020-13-45", "*a", "!!int x", "<<", "moe_", "チャンク",
    "1.5", "'moe_num_chunks '", "apply_modules", "parallel", "training", "features", "standalone",
)  # fmt: skip
CODECS = ("utf-16", "utf-16-be", "utf-32", "gbk", "latin-1", "utf-8-sig", "cp1252", "utf-7")


def seeds() -> list[str]:
    """Yamls that are right: those of the examples, and the host's own where `MINDSPEED_MM_HOME` says where they are."""
    paths = sorted(EXAMPLE.glob("*.yaml"))
    if home := os.environ.get("MINDSPEED_MM_HOME"):
        paths += sorted(Path(home, "examples").rglob("*.yaml"))
    texts = [CLEAN, *(path.read_text(encoding="utf-8") for path in paths)]
    return [text for text in texts if _is_right(text)]


def _is_right(text: str) -> bool:
    try:
        return any(section in yaml.safe_load(text) for section in FSDP2_SECTIONS)
    except yaml.YAMLError:
        return False


def mutant(texts: list[str], seed: int, number: int) -> bytes:
    """One of the texts with up to four mistakes: every other one in what it says, and the rest in how it is written."""
    draw = random.Random(f"{seed} {number}")
    text = draw.choice(texts)
    if number % 2:
        data = yaml.safe_load(text)
        for _ in range(draw.choice((1, 1, 2, 3, 6))):
            _spoil(draw, data)
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=draw.random() < 0.5).encode()
    lines = text.splitlines()
    for _ in range(draw.choice((1, 1, 1, 2, 3, 4))):
        draw.choice(MISTAKES)(draw, lines)
    text = draw.choice(("\n", "\n", "\n", "\r\n")).join(lines) + "\n"
    return _encoded(draw, text)


def _spoil(draw: random.Random, data: dict) -> None:
    """Put one mistake into what a yaml says."""
    places = [data]
    for place in places:
        inside = [each for each in place.values() if isinstance(each, dict)]
        places += [each for each in inside if all(each is not known for known in places)]  # one may hold itself
    place = draw.choice([each for each in places if each] or [data])
    word = draw.choice(list(place) or ["a"])
    kind = draw.randrange(8)
    if kind == 0:
        place[misspelt(draw, str(word))] = place.pop(word, None)
    elif kind == 1:
        place[draw.choice(("a\nb", "a.b", "", 1, None, True, 1.5, "x" * 300, *KEYS[:6]))] = draw.choice(_plain())
    elif kind == 2:
        place.pop(word, None)
    elif kind == 3:  # elsewhere, too: the writer makes an alias of it
        draw.choice(places)[word] = place.get(word)
    elif kind == 4:
        lists = [(each, name) for each in places for name, found in each.items() if isinstance(found, list)]
        where, name = draw.choice(lists or [(place, word)])
        where[name] = draw.choices(
            (*NAMES, "lm_head", "model.language_model.layers.{*}", 1, None), k=draw.choice((1, 2, 9))
        )
    else:
        place[word] = draw.choice(_plain())


def _plain() -> tuple:
    shared: list = ["x"]
    for _ in range(6):
        shared = [shared] * 4
    return (
        None, True, False, 0, -1, 1, 2, 3, 10**6, 2**63 - 1, 2**63, -(2**63), 10**30, 1.5, 2.0, 1e-4, 1e300,
        math.inf, math.nan,
        "", "2", "yes", "off", "1e-4", "auto", "chunkmoe", "alltoal", "a\nb", "\0", "分块", "x" * 5000,
        b"\xff", [], {}, [[]],
        [1], ["a", 1], [None], {"a": 1}, {1: 2}, shared, {"a": shared}, datetime.date(2020, 1, 1),
        {"a", "b"}, [-1], [10**30],
        ["model.language_model.layers.{*}"] * 1200,
        [f"layers.{n}" for n in range(300)], "model.language_model.layers.{*}",
    )  # fmt: skip


def misspelt(draw: random.Random, word: str) -> str:
    cut = draw.randrange(max(1, len(word)))
    turned = "_".join(word.split("_")[::-1])
    return draw.choice((word[:cut] + word[cut + 1 :], word[:cut] + "_" + word[cut:], turned, word + word[-1:]))


def _encoded(draw: random.Random, text: str) -> bytes:
    kind = draw.randrange(12)
    if kind == 0:
        return text.encode(draw.choice(CODECS), errors="replace")
    data = bytearray(text, "utf-8", errors="surrogatepass")
    if kind == 1:
        for _ in range(draw.randint(1, 5)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif kind == 2:
        del data[draw.randrange(len(data)) :]
    return bytes(data)


def _with_value(draw: random.Random, lines: list[str]) -> int:
    """A line that has a value, or an item."""
    found = [number for number, line in enumerate(lines) if ": " in line or line.lstrip().startswith("- ")]
    return draw.choice(found or [0])


def _set(lines: list[str], at: int, value: str) -> None:
    line = lines[at]
    mark = ": " if ": " in line else ":" if ":" in line else "- "
    head, found, _ = line.partition(mark)
    lines[at] = f"{head}{found.rstrip(' ')} {value}" if found else f"a: {value}"


def value(draw: random.Random, lines: list[str]) -> None:
    _set(lines, _with_value(draw, lines), draw.choice(VALUES))


def tag(draw: random.Random, lines: list[str]) -> None:
    at = _with_value(draw, lines)
    _set(lines, at, f"{draw.choice(TAGS)} {draw.choice(('', 'x', '[a]', '{a: 1}', '1', *VALUES[:20]))}")


def name(draw: random.Random, lines: list[str]) -> None:
    found = [number for number, line in enumerate(lines) if line.lstrip().startswith("- ")]
    text = draw.choice(NAMES)
    if found and draw.random() < 0.7:
        lines[draw.choice(found)] = f"{lines[draw.choice(found)].partition('- ')[0]}- '{text}'"
    else:
        _set(lines, _with_value(draw, lines), draw.choice((f"['{text}']", f"['{text}', '{text}']", f"'{text}'")))


def key(draw: random.Random, lines: list[str]) -> None:
    at = _with_value(draw, lines)
    line = lines[at]
    indent = line[: len(line) - len(line.lstrip())]
    if draw.random() < 0.4 and ":" in line:  # misspelt
        word, found, rest = line.strip().partition(":")
        lines[at] = f"{indent}{misspelt(draw, word)}{found}{rest}"
    else:
        lines.insert(at, f"{indent}{draw.choice(KEYS)}: {draw.choice(VALUES[:20])}")


def twice(draw: random.Random, lines: list[str]) -> None:
    at = _with_value(draw, lines)
    lines.insert(at, lines[at])


def bomb(draw: random.Random, lines: list[str]) -> None:
    """Aliases of aliases, as lists, mappings or merges, and where a rule or a setting looks at them."""
    levels, wide = draw.choice((2, 3, 6, 8, 30)), draw.choice((1, 2, 10))
    kind = draw.choice(("list", "map", "merge"))
    made = ["b0: &b0 " + draw.choice(("[x]", "{x: 1}", "x") if kind != "merge" else ("{x: 1}",))]
    for level in range(1, levels):
        inner = [f"*b{level - 1}"] * wide
        mapping = ", ".join(f"k{number}: {each} " for number, each in enumerate(inner))
        form = {"list": f"[{', '.join(inner)} ]", "map": f"{{{mapping}}}", "merge": f"{{<<: [{', '.join(inner)} ]}}"}
        made.append(f"b{level}: &b{level} {form[kind]}")
    lines[:0] = made
    if draw.random() < 0.8:
        at = draw.randrange(len(made), len(lines)) if len(lines) > len(made) else 0
        _set(lines, at, f"*b{levels - 1}")


def loop(draw: random.Random, lines: list[str]) -> None:
    _set(lines, _with_value(draw, lines), draw.choice(("&l [*l ]", "&l {a: *l }", "*none", "&l {<<: *l }", "&a &b x")))


def nesting(draw: random.Random, lines: list[str]) -> None:
    depth = draw.choice((10, 49, 60, 400, 3000))
    form = draw.choice(("[", "{a: ", "- ", "? ", "[{a: "))
    closed = {"[": "]", "{a: ": "}", "[{a: ": "}]"}.get(form, "")
    _set(lines, _with_value(draw, lines), form * depth + draw.choice(("x" + closed * depth, "x", "")))


def long(draw: random.Random, lines: list[str]) -> None:
    at = _with_value(draw, lines)
    size = draw.choice((300, 3000, 12_000))
    many = draw.choice(
        ("[" + "a, " * size + "]", "x " * size, "{" + ", ".join(f"k{n}: {n}" for n in range(size)) + "}")
    )
    _set(lines, at, draw.choice((many, "#" * size, '"' + "\\u0041" * size + '"')))


def shape(draw: random.Random, lines: list[str]) -> None:
    """A line that goes, comes elsewhere, or starts elsewhere."""
    at = draw.randrange(len(lines))
    kind = draw.randrange(5)
    if kind == 0 and len(lines) > 1:
        del lines[at]
    elif kind == 1:
        lines.insert(draw.randrange(len(lines)), lines.pop(at))
    elif kind == 2:
        lines[at] = draw.choice(("\t", " ", "      ")) + lines[at]
    elif kind == 3:
        lines[at] = lines[at].lstrip()
    else:
        lines.insert(
            at, draw.choice(("---", "...", "%YAML 9.9", "\x07", "\x85", "\ufeff", "# 注", "\x00", "\ud800", "- a"))
        )


MISTAKES = (value, value, value, tag, name, key, key, twice, bomb, loop, nesting, long, shape)
