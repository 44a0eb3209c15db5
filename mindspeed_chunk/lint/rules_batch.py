"""Rules on the split of ranks and on the global batch, as MindSpeed-MM's arguments compute it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mindspeed_chunk import keys
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.lint.rule import ERROR, NOTE, WARNING, Problem, Rule, Subject, problems

_ATTENTION = "model.attn_implementation"
_EXCHANGES = ("flash_attention_2", "flash_attention_3")
_QWEN = ("qwen3_5", "qwen3_5_moe")
SPLITS = tuple(f"parallel.{name}" for name in ("tensor_parallel_size", "ring_attention_size", "ulysses_parallel_size"))
SHARDS = "parallel.fully_shard_parallel_size"
GLOBAL, STEPS, MICRO = (
    f"training.{name}" for name in ("global_batch_size", "gradient_accumulation_steps", "micro_batch_size")
)


def _product(subject: Subject) -> int:
    """Number of ranks that work on the same samples; 0 if a size is below 1."""
    sizes = [subject.get(path, 1) for path in SPLITS]
    return math.prod(sizes) if min(sizes) > 0 else 0


def _samples(subject: Subject) -> int:
    """Samples per data-parallel rank and optimizer step; 0 if a number is below 1."""
    numbers = subject.get(MICRO, 1), subject.get(STEPS, 1)
    return math.prod(numbers) if min(numbers) > 0 else 0


def data_parallel_size(subject: Subject) -> int | None:
    """None if the number of ranks is not known, or does not fit."""
    split = _product(subject)
    if subject.world is None or split < 1 or subject.world % split:
        return None
    return subject.world // split


def global_batch(subject: Subject) -> tuple[int, str] | None:
    """Samples per optimizer step, and their factors; None if ranks are not known, or a number is below 1."""
    ranks = data_parallel_size(subject)
    if ranks is None or not _samples(subject):
        return None
    micro, steps = subject.get(MICRO, 1), subject.get(STEPS, 1)
    return micro * ranks * steps, f"{micro} x {ranks} data-parallel x {steps} accumulated"


def positive(subject: Subject) -> Iterator[Problem]:
    for path in (*SPLITS, SHARDS, MICRO, STEPS, "training.val_micro_batch_size"):
        yield from problems(keys.check, path, subject.get(path, 1))


def world(subject: Subject) -> Iterator[Problem]:
    ranks, split, shards = subject.world, _product(subject), subject.get(SHARDS, "auto")
    if ranks is None or split < 1:
        return
    if ranks % split:
        last = next((path for path in reversed(SPLITS) if subject.get(path, 1) > 1), SPLITS[-1])
        rule = f"tensor x ring x ulysses, {split}, must divide the number of ranks, {ranks}"
        yield Problem(ConfigError.about(last, subject.get(last), rule, "change one of them"))
        return
    tensor, context = subject.get(SPLITS[0], 1), split // subject.get(SPLITS[0], 1)
    if isinstance(shards, int) and shards > 0:
        if ranks % (tensor * shards):
            rule = f"must divide the number of ranks, {ranks}"
            yield Problem(ConfigError.about(SHARDS, shards, rule, "write auto"))
        if shards < context:
            rule = f"must be at least the context-parallel size, {context}"
            yield Problem(ConfigError.about(SHARDS, shards, rule, "write auto"))
    path = "parallel.data_parallel_size"
    given = subject.get(path)
    if given is not None and given != ranks // split:
        rule = f"with {ranks} ranks it is {ranks // split}"
        yield Problem(ConfigError.about(path, given, rule, "remove it: MindSpeed-MM computes it"))


def tensor(subject: Subject) -> Iterator[Problem]:
    """As `mindspeed_mm/fsdp/params/parallel_args.py` of 26.1.0 and master."""
    if (size := subject.get(SPLITS[0], 1)) > 1:
        rule = "MindSpeed-MM's FSDP2 back end does not support tensor parallelism, and refuses to start"
        yield Problem(ConfigError.about(SPLITS[0], size, rule, "set it to 1"))


def ulysses_heads(subject: Subject) -> Iterator[Problem]:
    size = subject.get(SPLITS[2], 1)
    for key in ("num_attention_heads", "linear_num_key_heads") if size > 1 else ():
        heads = subject.text_config.get(key)
        if isinstance(heads, int) and heads > 0 and heads % size:
            rule = f"must divide the model's {key}, {heads}: each rank of a sequence gets as many heads"
            yield Problem(ConfigError.about(SPLITS[2], size, rule, "change it"))
            return


def ulysses_attention(subject: Subject) -> Iterator[Problem]:
    """As `flash_attention_forward` of MindSpeed-MM 26.1.0 and master (mindspeed_mm/fsdp/ops/flash_attn/flash_attn.py).

    Only there the full attention of its Qwen3.5 exchanges the heads; other models have their own exchanges.
    """
    given = subject.get(_ATTENTION, "")
    if subject.get(SPLITS[2], 1) > 1 and subject.get("model.model_id") in _QWEN and given not in ("", *_EXCHANGES):
        rule = f"with {SPLITS[2]} above 1, tokens would attend only to those on the same rank"
        yield Problem(ConfigError.about(_ATTENTION, given, rule, f"set it to {_EXCHANGES[0]}"))


def global_size(subject: Subject) -> Iterator[Problem]:
    """MindSpeed-MM sets it to the product, whatever the yaml says; without accumulation the factor is 1."""
    given, samples = subject.get(GLOBAL), _samples(subject)
    if given is None or not samples or not _product(subject):
        return
    reckoned = global_batch(subject)
    way_out = f"set {STEPS}, which decides"
    if reckoned is not None and reckoned[0] != given:
        rule = f"MindSpeed-MM ignores it and uses {reckoned[0]}, {reckoned[1]}"
        yield Problem(ConfigError.about(GLOBAL, given, rule, way_out))
    elif reckoned is None:
        if given % samples:
            rule = f"MindSpeed-MM ignores it, and it is not a multiple of the {samples} samples per rank"
            yield Problem(ConfigError.about(GLOBAL, given, rule, way_out))
        elif subject.get(STEPS) is None:
            rule = f"MindSpeed-MM ignores it, and without {STEPS} does not accumulate"
            yield Problem(ConfigError.about(GLOBAL, given, rule, way_out))


def accumulation(subject: Subject) -> Iterator[Problem]:
    steps = subject.get(STEPS, 1)
    if steps > 1 and _samples(subject) and not subject.get("features.enable_chunk_mbs", False):
        rule = f"gathers every block's parameters {steps} times per step and direction"
        way_out = f"use ChunkMBS, which gathers once: {MICRO} {steps} times as large, chunk_mbs {subject.get(MICRO, 1)}"
        yield Problem(ConfigError.about(STEPS, steps, rule, way_out))


RULES = (
    Rule("positive-size", ERROR, "A batch size, a number of steps or a parallel size below 1.", positive),
    Rule("world-split", ERROR, "The parallel sizes do not fit the number of ranks. Needs `--world`.", world),
    Rule("tensor-parallel", ERROR, "`tensor_parallel_size` above 1, which MindSpeed-MM's FSDP2 back end refuses.",
         tensor),
    Rule("ulysses-heads", ERROR, "`ulysses_parallel_size` does not divide the model's attention heads, or the key "
         "heads of its linear attention. Needs the model's config.", ulysses_heads),
    Rule("ulysses-attention", ERROR, "`model.attn_implementation` of Qwen3.5 exchanges no heads, but "
         "`ulysses_parallel_size` is above 1.", ulysses_attention),
    Rule("global-batch", WARNING, "`training.global_batch_size` is not micro batch x data-parallel size x "
         "accumulation, which MindSpeed-MM uses instead.", global_size),
    Rule("accumulation-gathers", NOTE, "Gradient accumulation without ChunkMBS gathers all parameters once per "
         "micro batch.", accumulation),
)  # fmt: skip
