"""Rules on ChunkMBS."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_chunk.config import ChunkMBSConfig, ConfigError
from mindspeed_chunk.lint.edits import Append, Set
from mindspeed_chunk.lint.rule import ERROR, NOTE, WARNING, Problem, Rule, Subject, problems, read_leniently
from mindspeed_chunk.lint.rules_keys import respelt
from mindspeed_chunk.mbs import checks
from mindspeed_chunk.mbs.checks import ENABLE, HOOKS, MBS_PLAN

_SIZE = f"{MBS_PLAN}.chunk_mbs"
_MICRO, _VALIDATION = "training.micro_batch_size", "training.val_micro_batch_size"


def enabled(subject: Subject) -> bool:
    return subject.get(ENABLE, False)


def _read(subject: Subject) -> tuple[ChunkMBSConfig, list[ConfigError]]:
    """The settings without their wrong keys; and the errors."""
    config, wrong = read_leniently(checks.read_config, subject.get(MBS_PLAN, {}), MBS_PLAN)
    return config or ChunkMBSConfig(), wrong  # without blocks there is nothing more to check


def settings(subject: Subject) -> Iterator[Problem]:
    if enabled(subject):
        mbs_plan = subject.get(MBS_PLAN, {})
        for error in _read(subject)[1]:
            yield Problem(error, respelt(error.path, MBS_PLAN, mbs_plan))


def inner(subject: Subject) -> checks.Inner:
    """Modules that are recomputed and offloaded, by the key that turns it on; None if it is off."""
    get = subject.get
    return checks.inner(get, [old if get(old) and not get(new) else new for new, old in checks.SWITCHES.items()])


def covered(subject: Subject) -> Iterator[Problem]:
    if not enabled(subject):
        return
    blocks = _read(subject)[0].apply_modules
    for switch, patterns in inner(subject).items():
        try:
            missing = checks.not_covered(switch, patterns, blocks) if patterns is not None else []
        except ConfigError:  # a name that cannot be read, which the check below reports
            missing = []
        edits = (Append(checks.names_key(switch), block) for block in missing)
        yield from problems(checks.check_covered, {switch: patterns}, blocks, edits=edits)


def memory(subject: Subject) -> Iterator[Problem]:
    if enabled(subject):
        switches = [switch for switch, patterns in inner(subject).items() if patterns is None]
        # only if the list of modules is given
        ready = [
            switch for switch in switches if subject.get(checks.names_key(switch)) and subject.document.find(switch)
        ]
        edits = (Set(switch, True) for switch in ready)
        yield from problems(checks.check_memory, inner(subject), edits=edits)


def hooks(subject: Subject) -> Iterator[Problem]:
    if not enabled(subject):
        return
    blocks, present = _read(subject)[0].apply_modules, subject.get(HOOKS, [])
    missing = [block for block in blocks if block not in present]
    edits = (Append(HOOKS, block) for block in missing if present)
    yield from problems(checks.check_hooks, checks.units(subject.get), present, blocks, edits=edits)


def loss(subject: Subject) -> Iterator[Problem]:
    if enabled(subject):
        yield from problems(checks.check_loss, subject.get, edits=[Set(checks.LOSS, False)])


def packed(subject: Subject) -> Iterator[Problem]:
    if enabled(subject):
        yield from problems(checks.check_named, _read(subject)[0].chunk_kwarg_names)


def neighbours(subject: Subject) -> Iterator[Problem]:
    if enabled(subject):
        yield from problems(checks.check_chunk_layer, subject.get)


def size(subject: Subject) -> Iterator[Problem]:
    samples = subject.get(_MICRO, 1)
    if enabled(subject) and samples > 0 and not _read(subject)[1]:
        yield from problems(checks.check_size, _read(subject)[0].chunk_mbs, samples)


def uneven(subject: Subject) -> Iterator[Problem]:
    chunk = _read(subject)[0].chunk_mbs if enabled(subject) else 1
    for path in (_MICRO, _VALIDATION):
        samples = subject.get(path, 0)
        if samples > chunk and samples % chunk:
            rule = f"{_SIZE} {chunk} does not divide it, so the last micro-chunk has {samples % chunk}"
            yield Problem(ConfigError.about(path, samples, rule, f"use a multiple of {chunk}"))


def last_batch(subject: Subject) -> Iterator[Problem]:
    path = "data.dataloader_param.drop_last"
    if enabled(subject) and subject.get(path) is False:
        rule = "a short last batch makes fewer micro-chunks on one rank, and all ranks must run the same number"
        yield Problem(ConfigError.about(path, False, rule, "set it to true"), (Set(path, True),))


RULES = (
    Rule("chunk-mbs-settings", ERROR, "A key of ChunkMBS is unknown or out of range, or no block is named.", settings),
    Rule("chunk-mbs-covered", ERROR, "A block of ChunkMBS is not in the list of recompute or offload, and that feature "
         "is on.", covered),
    Rule("chunk-mbs-hooks", ERROR, "FSDP2 units inside a block of ChunkMBS are not gathered with it "
         "(`hook_modules`).", hooks),
    Rule("chunk-mbs-loss", ERROR, "ChunkMBS with `router_aux_loss_offload`.", loss),
    Rule("chunk-mbs-neighbour", ERROR, "ChunkMBS with a feature that has not been tested with it "
         "(`enable_chunk_layer`).", neighbours),
    Rule("chunk-mbs-packed", WARNING, "`chunk_kwarg_names` lists an argument with packed rows, which are not "
         "samples (`cu_seqlens`, `deepstack_visual_embeds`).", packed),
    Rule("chunk-mbs-memory", WARNING, "ChunkMBS without recompute or offload saves little memory.", memory),
    Rule("chunk-mbs-size", WARNING, "`chunk_mbs` is not smaller than `micro_batch_size`, so nothing is cut.", size),
    Rule("chunk-mbs-last-batch", WARNING, "ChunkMBS with `drop_last: false`: ranks may differ in their last batch.",
         last_batch),
    Rule("chunk-mbs-uneven", NOTE, "`chunk_mbs` does not divide `micro_batch_size` or `val_micro_batch_size`.", uneven),
)  # fmt: skip
