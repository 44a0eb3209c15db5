"""Rules on expert parallelism and Chunk MoE.

T tokens per call on this rank, K top-k, E experts of the model, L = E / ep experts per rank, N chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mindspeed_chunk import keys, model_config
from mindspeed_chunk.config import KEY_PREFIXES, ChunkMoEConfig, ConfigError
from mindspeed_chunk.known_devices import DEVICES
from mindspeed_chunk.lint.edits import Remove
from mindspeed_chunk.lint.rule import ERROR, NOTE, WARNING, Problem, Rule, Subject, problems, read_leniently
from mindspeed_chunk.lint.rules_keys import respelt
from mindspeed_chunk.moe import checks
from mindspeed_chunk.moe.checks import DISPATCHER, EP_PLAN, NAME, SIZE
from mindspeed_chunk.moe.costs.rows import LayerShape, resolve_dispatch, share_of_bytes
from mindspeed_chunk.moe.costs.timing import chunk_times

# docs/performance.md, "When not to chunk": below some hundred rows per expert and chunk, matmuls lose efficiency.
MIN_ROWS = 128
CHUNKS, CHUNK_SIZE = f"{EP_PLAN}.moe_num_chunks", f"{EP_PLAN}.moe_chunk_size"
DISPATCH = f"{EP_PLAN}.chunk_moe_dispatch"
MAX_EXPERTS = 2**16  # no model has as many: then the bytes are not computed, which takes time for each expert
MAX_CHUNKS = 64  # of the simulated schedules
LAUNCH_S = 20e-6  # assumed, for an NPU's host with operations whose sizes change: docs/ascend.md, "What a call costs"


def enabled(subject: Subject) -> bool:
    return subject.get(DISPATCHER) == NAME


def _read(subject: Subject) -> tuple[ChunkMoEConfig, list[ConfigError]]:
    """The settings without their wrong keys; and the errors."""
    config, wrong = read_leniently(ChunkMoEConfig.from_mapping, subject.get(EP_PLAN, {}), EP_PLAN)
    return config or ChunkMoEConfig(), wrong


def settings(subject: Subject) -> Iterator[Problem]:
    if enabled(subject):
        ep_plan = subject.get(EP_PLAN)
        for error in _read(subject)[1]:
            yield Problem(error, respelt(error.path, EP_PLAN, ep_plan))


def both_sizes(subject: Subject) -> Iterator[Problem]:
    message = _read(subject)[0].both_sizes
    if message:
        yield Problem(ConfigError(f"{CHUNK_SIZE}: {message}", CHUNK_SIZE), (Remove(CHUNK_SIZE),))


def experts_named(subject: Subject) -> Iterator[Problem]:
    if enabled(subject) or subject.get(SIZE, 1) > 1:
        yield from problems(checks.check_names, subject.get(f"{EP_PLAN}.apply_modules", []))


def exchange(subject: Subject) -> Iterator[Problem]:
    if enabled(subject):
        yield from problems(checks.check_exchange, subject.get(SIZE, 1))


def effect(subject: Subject) -> Iterator[Problem]:
    if _read(subject)[0] != ChunkMoEConfig():
        ours = [key for key in subject.get(EP_PLAN) if str(key).startswith(KEY_PREFIXES)]
        yield from problems(checks.check_effect, ours, subject.get(DISPATCHER, "alltoall"))


def size(subject: Subject) -> Iterator[Problem]:
    value = subject.get(SIZE, 1)
    yield from problems(keys.check, SIZE, value)
    if value < 1:
        return
    if subject.world is not None:
        yield from problems(checks.check_ranks, value, subject.world)
    yield from problems(checks.check_experts, value, model_config.num_experts(subject.text_config))


def node(subject: Subject) -> Iterator[Problem]:
    value = subject.get(SIZE, 1)
    if value > subject.devices_per_node:
        rule = f"larger than a node of {subject.devices_per_node} devices, so rows cross the slower links between nodes"
        way_out = (
            f"use {subject.devices_per_node} or less if the experts fit, or set --devices-per-node to the number of "
            "devices with fast links"
        )
        yield Problem(ConfigError.about(SIZE, value, rule, way_out))


def neighbours(subject: Subject) -> Iterator[Problem]:
    for check in checks.NEIGHBOURS if enabled(subject) else ():
        yield from problems(check, subject.get)


def two_chunks(subject: Subject) -> Iterator[Problem]:
    config = _read(subject)[0]
    number, resident = config.moe_num_chunks, 1 + max(1, config.chunk_moe_lookahead)
    if enabled(subject) and 2 <= number <= resident and config.keep != "activations":
        rule = (
            f"keeping only the {config.keep} is for memory, but {resident} chunks are resident at once, so the peak "
            "falls only a little"
        )
        yield Problem(ConfigError.about(CHUNKS, number, rule, f"use {2 * resident} or more"))


def one_chunk(subject: Subject) -> Iterator[Problem]:
    config, wrong = _read(subject)
    if not enabled(subject) or wrong or config.chunk_moe_auto or subject.get(SIZE, 1) < 2:
        return
    path = CHUNK_SIZE if config.moe_chunk_size and not config.moe_num_chunks else CHUNKS
    # with a chunk size the number of chunks is not known without the number of tokens
    count = _chunks(config, tokens(subject) or 2 * config.moe_chunk_size)
    if count <= 1:
        rule = "one chunk: no all-to-all runs while experts compute"
        way_out = "use moe_num_chunks 2 to 8, or chunk_moe_auto: true"
        yield Problem(ConfigError.about(path, subject.get(path, "not set"), rule, way_out))


def collective(subject: Subject) -> Iterator[Problem]:
    config = _read(subject)[0]
    if enabled(subject) and config.moe_chunk_size and not config.moe_num_chunks:
        rule = "costs one more collective and host copy per call, in which ranks agree on the number of chunks"
        yield Problem(ConfigError.about(CHUNK_SIZE, config.moe_chunk_size, rule, "moe_num_chunks costs none"))


def tokens(subject: Subject) -> int | None:
    """T at most; None if the yaml does not have the sequence length, or a size is below 1."""
    length = subject.get("data.dataset_param.basic_parameters.cutoff_len")
    if length is None:
        return None
    samples = subject.get("training.micro_batch_size", 1)
    if subject.get("features.enable_chunk_mbs", False):
        samples = min(samples, subject.get("features.chunkmbs_plan.chunk_mbs", 1))
    ulysses, ring = (subject.get(f"parallel.{name}", 1) for name in ("ulysses_parallel_size", "ring_attention_size"))
    return samples * length // (ulysses * ring) if min(samples, length, ulysses, ring) > 0 else None


def _chunks(config: ChunkMoEConfig, num_tokens: int) -> int:
    return config.moe_num_chunks or (-(-num_tokens // config.moe_chunk_size) if config.moe_chunk_size else 1)


def chunk_bytes(subject: Subject) -> int:
    """At most, of the rows in bf16 that a rank sends for a chunk; 0 if the yaml lacks a size."""
    config, num_tokens, k = _read(subject)[0], tokens(subject), model_config.top_k(subject.text_config)
    hidden = subject.text_config.get("hidden_size")
    if not num_tokens or not k or not isinstance(hidden, int):
        return 0
    return 2 * hidden * k * -(-num_tokens // _chunks(config, num_tokens))


def few_rows(subject: Subject) -> Iterator[Problem]:
    config, ep = _read(subject)[0], subject.get(SIZE, 1)
    k, experts = model_config.top_k(subject.text_config), model_config.num_experts(subject.text_config)
    num_tokens = tokens(subject)
    if not enabled(subject) or not num_tokens or not k or not experts or ep < 2:
        return
    count = _chunks(config, num_tokens)
    rows = num_tokens * k * ep // (count * experts)
    if 1 < count <= num_tokens and rows < MIN_ROWS:
        path = CHUNKS if config.moe_num_chunks else CHUNK_SIZE
        rule = (
            f"at most {rows} rows per expert and chunk, T K / (N L) = {num_tokens} x {k} / ({count} x "
            f"{experts // ep}); below {MIN_ROWS} matmuls lose efficiency"
        )
        yield Problem(ConfigError.about(path, subject.get(path), rule, "use fewer, larger chunks"))


def empty_chunks(subject: Subject) -> Iterator[Problem]:
    count, num_tokens = _read(subject)[0].moe_num_chunks, tokens(subject)
    if enabled(subject) and num_tokens and count > num_tokens:
        rule = f"more chunks than the {num_tokens} tokens of a call; each chunk costs its collectives"
        yield Problem(ConfigError.about(CHUNKS, count, rule, "use 2 to 8, or moe_chunk_size for a number of tokens"))


def _shape(subject: Subject) -> LayerShape | None:
    """The layer call in bf16, with one token if their number is not known; None without the sizes of a possible one."""
    config, ep = subject.text_config, subject.get(SIZE, 1)
    found = (
        model_config.top_k(config), model_config.num_experts(config), config.get("hidden_size"),
        config.get("moe_intermediate_size"),
    )  # fmt: skip
    sizes = [size for size in found if isinstance(size, int) and size > 0]
    if not enabled(subject) or len(sizes) < len(found):
        return None
    k, experts, hidden, intermediate = sizes
    if not k <= experts <= MAX_EXPERTS or ep < 2 or experts % ep:
        return None
    shape = LayerShape(
        tokens=tokens(subject) or 1, hidden=hidden, intermediate=intermediate, experts=experts, top_k=k, ep=ep,
        element_size=2,
    )  # fmt: skip
    return dataclasses.replace(shape, dispatch=resolve_dispatch(_read(subject)[0].chunk_moe_dispatch, shape))


def dispatch_bytes(subject: Subject) -> Iterator[Problem]:
    """What `auto` computes for rows and router weights in bf16."""
    shape = _shape(subject)
    if shape is None:
        return
    best, share = resolve_dispatch("auto", shape), share_of_bytes(shape)
    times = share if shape.per_rank else 1 / share
    if shape.dispatch != best and times >= 1.01:
        rule = (
            f"sends {times:.2f} times the bytes of {best} with uniform routing (E = {shape.experts}, "
            f"K = {shape.top_k}, EP = {shape.ep})"
        )
        yield Problem(ConfigError.about(DISPATCH, shape.dispatch, rule, "use auto"))


def launch_bound(subject: Subject) -> Iterator[Problem]:
    """By the planner's times for an Ascend 910C, if its host can launch one chunk fast enough."""
    config, shape, num_tokens = _read(subject)[0], _shape(subject), tokens(subject)
    if shape is None or not num_tokens or not 1 < (count := _chunks(config, num_tokens)) <= min(num_tokens, MAX_CHUNKS):
        return
    device = DEVICES["ascend-910c"]
    hosts = dataclasses.replace(device, launch=LAUNCH_S)
    (own, bound), (own_whole, bound_whole) = (
        [1e3 * chunk_times(shape, each, num_chunks=n).total for each in (device, hosts)] for n in (count, 1)
    )
    if bound > 1.1 * own and bound_whole <= 1.1 * own_whole:
        path = CHUNKS if config.moe_num_chunks else CHUNK_SIZE
        rule = (
            f"by the planner, an Ascend 910C waits for its host to launch {count} chunks of {num_tokens} tokens "
            f"together: {bound:.1f} ms for a layer, {own:.1f} ms if launches took no time, {bound_whole:.1f} ms in one "
            f"chunk ({1e6 * LAUNCH_S:.0f} us for a launch)"
        )
        yield Problem(ConfigError.about(path, subject.get(path), rule, "use fewer chunks, or more tokens in a call"))


def allgather(subject: Subject) -> Iterator[Problem]:
    ep, k = subject.get(SIZE, 1), model_config.top_k(subject.text_config)
    if subject.get(DISPATCHER) == "allgather" and k is not None and ep > k:
        rule = f"gathers every token on all {ep} ranks, but an all-to-all sends it to at most {k} (top-k)"
        yield Problem(ConfigError.about(DISPATCHER, "allgather", rule, f"use alltoall or {NAME}"))


def unread(subject: Subject) -> Iterator[Problem]:
    path = f"{EP_PLAN}.chunk_moe_skip_unread"
    recompute = subject.get("features.recompute", False) or subject.get("parallel.recompute", False)
    if enabled(subject) and subject.get(path) is True and not recompute:
        rule = "no effect, because it acts in the recompute of a block, and features.recompute is off"
        yield Problem(ConfigError.about(path, True, rule, "turn recompute on, or remove it"))


RULES = (
    Rule("chunk-moe-settings", ERROR, "A key of Chunk MoE is unknown, out of range, or contradicts another.", settings),
    Rule("chunk-moe-neighbour", ERROR, "A feature is on that does not work with Chunk MoE: EP balance, op replay of "
         "modules that contain experts, quantised grouped matmuls, LoRA on experts.", neighbours),
    Rule("experts-named", ERROR, "Expert parallelism or `chunkmoe` without the names of the experts.", experts_named),
    Rule("ep-size", ERROR, "`expert_parallel_size` does not divide the number of ranks (with `--world`) or of experts "
         "(with the model's config).", size),
    Rule("chunk-moe-off", WARNING, "`chunkmoe` with `expert_parallel_size: 1`: no dispatcher is called.", exchange),
    Rule("chunk-keys-unused", WARNING, "Keys of Chunk MoE are in a plan with another dispatcher.", effect),
    Rule("both-sizes", WARNING, "`moe_num_chunks` and `moe_chunk_size` are both set; the first is used.", both_sizes),
    Rule("two-chunks-for-memory", WARNING, "N = 2 with `chunk_moe_keep: rows` or `input` (or `chunk_moe_recompute`): "
         "two chunks are resident at once, so N = 2 lowers the peak only a little. Each chunk of "
         "`chunk_moe_lookahead` beyond 1 adds one.", two_chunks),
    Rule("ep-crosses-nodes", WARNING, "`expert_parallel_size` is larger than a node, or than the devices whose links "
         "are as fast (`--devices-per-node`).", node),
    Rule("empty-chunks", WARNING, "`moe_num_chunks` is larger than the number of tokens of a call. Needs `cutoff_len`.",
         empty_chunks),
    Rule("skip-unread-unused", WARNING, "`chunk_moe_skip_unread` without recompute.", unread),
    Rule("few-rows", NOTE, f"Fewer than {MIN_ROWS} rows per expert and chunk. Rows are T x K / (N x L), as in "
         "[performance](performance.md#when-not-to-chunk): T tokens per call at most (the smaller of "
         "`micro_batch_size` and `chunk_mbs`, times `cutoff_len`, over the context-parallel size), K top-k, N chunks, "
         "L experts per rank. Needs `cutoff_len` and the model's config.", few_rows),
    Rule("one-chunk", NOTE, "`chunkmoe` without a number or a size of chunks, or with one chunk: nothing overlaps.",
         one_chunk),
    Rule("chunk-size-collective", NOTE, "`moe_chunk_size` costs one more collective and host copy per call than "
         "`moe_num_chunks`.", collective),
    Rule("dispatch-bytes", NOTE, "`chunk_moe_dispatch` is the kind of dispatch that sends more bytes than `auto` "
         "would. Needs the model's config.", dispatch_bytes),
    Rule("launch-bound", NOTE, "An Ascend 910C computes the chunks faster than its host launches them, at 20 us for a "
         "launch: see the [planner](planner.md#launches). Needs `cutoff_len` and the model's config.", launch_bound),
    Rule("allgather-traffic", NOTE, "`allgather` with `expert_parallel_size` > top-k moves more rows than an "
         "all-to-all. Needs the model's config.", allgather),
)  # fmt: skip
