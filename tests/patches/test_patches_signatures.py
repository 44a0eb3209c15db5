"""The look-alike against the real host: what both define must have the same parameters, fields and defaults.

Files are parsed, not imported: the host's own dependencies are not needed. MINDSPEED_MM_HOME names its checkout.
"""

import ast
import os
import re
from pathlib import Path

import pytest

from host_lookalike import HERE, LAYERS

# modules that the look-alike has under names of its own; their functions have no counterpart
OWN = {"lookalike", "eager", "sharding", "balance", "experts", "generic", "modelhub", "train_engine", "mpu", "log"}
OWN |= {"str_match", "trainer"}
STANDS_IN = {"feature_plans.py": "feature_args.py"}
# written shorter on purpose, or standing elsewhere in the host
SHORTER = {
    "ConfigManager.__init__",
    "BaseArguments.to_dict",
    "get_ep_device_mesh",
    "MM_MoELayer.__init__",
    "MM_MoELayer.forward",
    "SituAndMul.forward",
    "ep_mc2_forward",
    "ep_allgather_forward",
}
COMPLETE = "EPPlanConfig"  # has every field of the host, no fewer
HELPERS = re.compile(r"^_|\.(__init__|activation|dispatchers|call|route|layout|without_ranks)$")


def home():
    path = os.environ.get("MINDSPEED_MM_HOME")
    if not path:
        pytest.skip("MINDSPEED_MM_HOME is not set")
    return Path(path)


def flavour_of(host):
    """Told by what came with each version."""
    folder = host / "mindspeed_mm/fsdp/distributed/expert_parallel"
    text = (folder / "ep_dispatcher.py").read_text(encoding="utf-8")
    if (folder / "ep_chunkmoe.py").exists():
        return "newest"
    if "skip_moe_pad_tokens" in text:
        return "master"
    return "26.1" if "ep_balance_strategy" in text else "26.0"


def modern(node):
    """An annotation or default as text, old and new ways of writing it alike, the host's help texts left out."""
    if node is None:
        return None
    text = ast.unparse(node)
    text = re.sub(r"\bList\[", "list[", text)
    text = re.sub(r"\bOptional\[([\w.\[\]]+)\]", r"\1 | None", text)
    text = re.sub(r", metadata=.*\)$", ")", text, flags=re.DOTALL)
    return re.sub(r"^field\(default=(.*)\)$", r"\1", text, flags=re.DOTALL)


def parameters(function):
    """Names and defaults; annotations are of no consequence there."""
    args = function.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults
    found = [(arg.arg, modern(default)) for arg, default in zip(plain, defaults)]
    return found + [(f"*{arg.arg}", None) for arg in (args.vararg, args.kwarg) if arg]


def definitions(path):
    """Public functions and methods by name, and fields of classes, each as something to compare."""
    functions, fields = {}, {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = parameters(node)
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    functions[f"{node.name}.{part.name}"] = parameters(part)
                elif isinstance(part, ast.AnnAssign):
                    fields[f"{node.name}.{part.target.id}"] = modern(part.annotation), modern(part.value)
    return functions, fields


def counterparts(flavour, host):
    """Pairs of files, the look-alike's and the host's."""
    seen = set()
    for layer in LAYERS[flavour]:
        for path in sorted((HERE / layer).rglob("*.py")):
            name = path.relative_to(HERE / layer)
            if name in seen or path.stem in OWN:
                continue
            seen.add(name)
            yield path, host / name.with_name(STANDS_IN.get(path.name, path.name))


def differences(ours, theirs):
    """Names that differ, and how many were compared."""
    compared = [name for name in ours if name not in SHORTER and not HELPERS.search(name)]
    told = [f"{name}: {ours[name]} here, {theirs.get(name)} in the host" for name in compared]
    told = [line for name, line in zip(compared, told) if theirs.get(name) != ours[name]]
    missing = [name for name in theirs if name.startswith(f"{COMPLETE}.") and name not in ours]
    return told + [f"{name}: in the host only" for name in missing], len(compared)


def test_what_both_define_is_the_same():
    host = home()
    flavour, count, wrong = flavour_of(host), 0, []
    for path, real in counterparts(flavour, host):
        if not real.exists():
            wrong.append(f"{real}: not in the host")
            continue
        for ours, theirs in zip(definitions(path), definitions(real)):
            told, compared = differences(ours, theirs)
            wrong += [f"{real.name}: {line}" for line in told]
            count += compared
    assert not wrong, "\n".join(wrong)
    assert count > 20
