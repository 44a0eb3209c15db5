"""Rules on lists of modules, held against the model itself where its config folder is there."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.lint.model import CannotBuild, module_names
from mindspeed_chunk.lint.rule import ERROR, NOTE, WARNING, Problem, Rule, Subject, problems
from mindspeed_chunk.lint.rules_mbs import enabled as chunk_mbs_enabled
from mindspeed_chunk.lint.rules_mbs import inner
from mindspeed_chunk.mbs.checks import BLOCKS, names_key
from mindspeed_chunk.names import MAX_NAMES, Pattern, read_patterns

# MindSpeed-MM's own classes add multi-token prediction to those of transformers.
_HOST_ONLY = ("mtp",)
# How many unmatched names are compared, which takes long. If there are more, the list is for another model.
_COMPARED = 20
_FOLDER = "model.model_name_or_path"


def lists(subject: Subject) -> Iterator[tuple[str, list[str]]]:
    """Path and names of every list that has an effect."""
    paths = [f"parallel.fsdp_plan.{key}" for key in ("apply_modules", "ignored_modules", "hook_modules")]
    if subject.get("parallel.expert_parallel_size", 1) > 1:
        paths += [f"parallel.ep_plan.{key}" for key in ("apply_modules", "apply_efsdp_modules")]
    paths += [names_key(switch) for switch, patterns in inner(subject).items() if patterns is not None]
    paths += [BLOCKS] if chunk_mbs_enabled(subject) else []
    yield from ((path, subject.get(path, [])) for path in paths)


def wildcards(subject: Subject) -> Iterator[Problem]:
    for path, texts in lists(subject):
        if len(texts) > MAX_NAMES:
            yield from problems(read_patterns, texts, path)
            continue
        for text in texts:
            for problem in problems(Pattern, text, path):
                yield problem._replace(item=text)


def _names(subject: Subject) -> list[str]:
    """Names of the model's modules; none if it cannot be built, which `not_checked` reports."""
    if subject.model_folder is None:
        return []
    try:
        return module_names(subject.model_folder)
    except CannotBuild:
        return []


def _patterns(subject: Subject) -> Iterator[tuple[str, Pattern]]:
    for path, texts in lists(subject):
        for text in texts if len(texts) <= MAX_NAMES else ():
            if not any(problems(Pattern, text, path)):
                yield path, Pattern(text, path)


def unmatched(subject: Subject) -> Iterator[Problem]:
    names = _names(subject)
    shapes = {re.sub(r"(?<=\.)\d+(?=\.|$)", "{*}", name) for name in names if name}
    counter = itertools.count(1)
    for path, pattern in _patterns(subject) if names else ():
        if pattern.text.split(".")[0] not in _HOST_ONLY and not any(map(pattern.matches, names)):
            known = sorted(shapes) if next(counter) <= _COMPARED else []
            near = difflib.get_close_matches(pattern.text, known, n=1, cutoff=0.0)
            way_out = f"the nearest one is {near[0]}" if near else "correct or remove it"
            rule = f"matches no module of {subject.get(_FOLDER)} as transformers builds it"
            yield Problem(ConfigError.about(path, pattern.text, rule, way_out), item=pattern.text)


def order(subject: Subject) -> Iterator[Problem]:
    names = _names(subject)
    if not names or not chunk_mbs_enabled(subject):
        return
    from mindspeed_chunk.mbs.block import check_order

    matched: dict[str, list[str]] = {path: [] for path in ("recompute", "offload", BLOCKS)}
    kinds = dict(zip(map(names_key, inner(subject)), ("recompute", "offload"))) | {BLOCKS: BLOCKS}
    for path, pattern in _patterns(subject):
        if path in kinds:
            matched[kinds[path]] += [name for name in names if pattern.matches(name)]
    yield from problems(check_order, *(list(dict.fromkeys(modules)) for modules in matched.values()))


def not_checked(subject: Subject) -> Iterator[Problem]:
    name = subject.get(_FOLDER)
    if not name:
        return
    if subject.model_folder is None:
        rule = "no config.json here or next to the yaml, so names of modules and numbers of experts were not checked"
        yield Problem(ConfigError.about(_FOLDER, name, rule, "run lint where the folder is"))
        return
    try:
        module_names(subject.model_folder)
    except CannotBuild as error:
        rule = f"names of modules were not checked: {error}"
        yield Problem(ConfigError.about(_FOLDER, name, rule, "install what is missing, or check them yourself"))


RULES = (
    Rule("wildcard", ERROR, "A list of modules has something in braces that is neither `{*}` nor a range.", wildcards),
    Rule("chunk-mbs-order", ERROR, "A block of ChunkMBS is inside another one, or inside a recomputed or offloaded "
         "module. Needs the model.", order),
    Rule("unmatched-name", WARNING, "A name of a list matches no module of the model, built on the meta device by "
         "transformers. `mtp`, which only MindSpeed-MM's own classes have, is left out. Needs the model.", unmatched),
    Rule("model-not-checked", NOTE, "Rules that need the model were not checked, with the reason.", not_checked),
)  # fmt: skip
