"""The names that a release keeps, as text: modules and their `__all__`, commands, keys of the yaml, entry points."""

import argparse
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import setting_tables
import version_tables
from markdown_table import table
from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig
from mindspeed_chunk.patches.settings import VARIABLES
from mindspeed_chunk.tools.__main__ import COMMANDS

# Everything in their `__all__` is public, and nothing else is.
MODULES = (
    "mindspeed_chunk",
    "mindspeed_chunk.moe.dispatcher",
    "mindspeed_chunk.moe.alltoall",
    "mindspeed_chunk.moe.reference",
    "mindspeed_chunk.moe.replay",
    "mindspeed_chunk.moe.schedule",
    "mindspeed_chunk.planner",
)
# Run as `python -m`; each has a function `main`.
RUNNABLE = ("mindspeed_chunk.standalone.__main__", "mindspeed_chunk.standalone.compare")
_OPERATORS = ("__init__", "__call__")
_DATA = {"__version__": "the version", "RECIPES": "the recipes of `state_bytes`, by name"}


def names() -> Iterator[tuple[str, str, object]]:
    """Module, name and value of each public name."""
    for module in MODULES:
        found = importlib.import_module(module)
        yield from ((module, name, getattr(found, name)) for name in sorted(found.__all__))


def table_of_names() -> str:
    rows = []
    for module, name, value in names():
        said = (inspect.getdoc(value) or "").split("\n\n")[0] if callable(value) else _DATA[name]
        rows.append((f"`{module}`", f"`{name}`", " ".join(said.split())))
    return table(("module", "name", "what it is"), rows)


def text() -> str:
    lines = [
        "# What a release keeps. Written by `python docs/make`; docs/release.md says what a change here means.",
        "",
    ]
    lines += [line for module, name, value in names() for line in _described(module, name, value)]
    for title, part in (("commands", _commands()), ("yaml", _keys()), ("environment", sorted(VARIABLES))):
        lines += ["", f"# {title}", *part]
    points = version_tables.metadata()["entry_points"]
    lines += ["", "# entry points", *(f"{group}: {point}" for group in sorted(points) for point in points[group])]
    return "\n".join(lines) + "\n"


def _described(module: str, name: str, value: object) -> Iterator[str]:
    path = f"{module}.{name}"
    if inspect.isclass(value):
        bases = [base.__name__ for base in value.__bases__ if base is not object]
        yield f"class {path}({', '.join(bases)})"
        yield from (f"    {line}" for line in members(value))
    elif callable(value):
        yield f"def {path}{_signature(value)}"
    else:
        yield f"{path}: {', '.join(value)}" if isinstance(value, dict) else path


def members(cls: type) -> Iterator[str]:
    """A line a field, property and method."""
    fields = _fields(cls)
    yield from (f"{name}: {kind}{default}" for name, kind, default in fields)
    seen = {name for name, _, _ in fields}
    own = [base for base in cls.__mro__ if base.__module__.startswith("mindspeed_chunk")]
    for name in sorted({name for base in own for name in vars(base)} - seen):
        if name.startswith("_") and not (name in _OPERATORS and not (name == "__init__" and fields)):
            continue
        value = inspect.getattr_static(cls, name)
        if isinstance(value, property):
            yield f"property {name}"
        elif isinstance(value, classmethod | staticmethod):
            yield f"{type(value).__name__} {name}{_signature(getattr(cls, name))}"
        elif inspect.isfunction(value):
            yield f"def {name}{_signature(value)}"


def _fields(cls: type) -> list[tuple[str, str, str]]:
    """Name, type and default of a dataclass's or a named tuple's fields."""
    if dataclasses.is_dataclass(cls):
        return [(field.name, _type(field.type), _default(field.default)) for field in dataclasses.fields(cls)]
    kinds, defaults = getattr(cls, "__annotations__", {}), getattr(cls, "_field_defaults", {})
    names = getattr(cls, "_fields", ())
    return [(name, _type(kinds[name]), _default(defaults.get(name, dataclasses.MISSING))) for name in names]


def _type(annotation: object) -> str:
    # the text of a named tuple's annotation is in a ForwardRef
    annotation = getattr(annotation, "__forward_arg__", annotation)
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: object) -> str:
    if value in (dataclasses.MISSING, inspect.Parameter.empty):
        return ""
    return f" = {value.__name__ if inspect.isfunction(value) else repr(value)}"


def _signature(function: Callable) -> str:
    signature, written, star = inspect.signature(function), [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            written.append("*")
        star = star or parameter.kind in (parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY)
        name = parameter.replace(annotation=parameter.empty, default=parameter.empty)  # with the stars of *args
        kind = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
        written.append(f"{name}{kind}{_default(parameter.default)}")
    result = signature.return_annotation
    return f"({', '.join(written)})" + ("" if result is signature.empty else f" -> {_type(result)}")


class _Parsed(Exception):
    """Stops a command where it parses its arguments; holds the parser."""


def _parser_of(main: Callable[[], object]) -> argparse.ArgumentParser:
    def stop(parser, *_):
        raise _Parsed(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop), mock.patch.object(sys, "argv", ["command"]):
        try:
            main()
        except _Parsed as stopped:
            return stopped.args[0]
    raise AssertionError(f"{main} parses no arguments")


def _commands() -> Iterator[str]:
    modules = {f"mindspeed-chunk {name}": f"mindspeed_chunk.tools.{name}" for name in COMMANDS}
    modules |= {f"python -m {name.removesuffix('.__main__')}": name for name in RUNNABLE}
    yield "mindspeed-chunk --version"
    yield "python -m mindspeed_chunk.launch SCRIPT.py [ARGUMENTS ...]"
    for command, module in modules.items():
        yield command
        for action in _parser_of(importlib.import_module(module).main)._actions:
            yield f"    {_option(action)}"


def _option(action: argparse.Action) -> str:
    said = [", ".join(action.option_strings) or str(action.metavar or action.dest)]
    if action.nargs is not None:
        said.append(f"nargs {action.nargs}")
    if action.choices:
        said.append(f"one of {', '.join(map(str, action.choices))}")
    if action.default not in (None, argparse.SUPPRESS):
        said.append(f"default {action.default!r}")
    return "; ".join([*said, *["required"] * bool(action.required and action.option_strings)])


def _keys() -> Iterator[str]:
    for section, cls in (("parallel.ep_plan", ChunkMoEConfig), ("features.chunkmbs_plan", ChunkMBSConfig)):
        yield from (f"{section}.{field.name} = {field.default!r}" for field in dataclasses.fields(cls))
    yield "# of the embedded trainer"
    yield from (f"{path} = {default.strip('`')}" for path, _, default, _ in setting_tables.trainer_keys())
