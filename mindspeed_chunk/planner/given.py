"""A yaml of MindSpeed-MM as a job and a setting of the planner."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_chunk import keys, model_config, yaml_text
from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig, ConfigError
from mindspeed_chunk.hardware import Device
from mindspeed_chunk.moe import checks
from mindspeed_chunk.moe.costs.rows import PER_EXPERT
from mindspeed_chunk.planner.layout import Layout
from mindspeed_chunk.planner.model import load_model
from mindspeed_chunk.planner.precision import FSDP2_RECIPES
from mindspeed_chunk.planner.sequence import ulysses_problem
from mindspeed_chunk.planner.setting import Job, Setting
from mindspeed_chunk.planner.state import BLOCKS, VISION
from mindspeed_chunk.values import COUNT, FLAG, NAMES
from mindspeed_chunk.wording import shown

_LENGTH = "data.dataset_param.basic_parameters.cutoff_len"
_MODEL = "model.model_name_or_path"
_DTYPE, _ULYSSES = "parallel.fsdp_plan.param_dtype", "parallel.ulysses_parallel_size"
_SHARDS = "parallel.fully_shard_parallel_size"
_DTYPES = {"bf16": "bf16-fsdp2", "bfloat16": "bf16-fsdp2", "fp32": "fp32", "float32": "fp32"}
_MOST_CHUNKS = 1024
_MOST_TOKENS = 10**8
# keys that change a run and are not read, with the values that are estimated
_NOT_READ: dict[str, tuple] = {
    _SHARDS: ("auto",),
    "parallel.expert_fully_shard_parallel_size": (None,),
    "parallel.fsdp_plan.reduce_dtype": ("fp32", "float32"),
    f"{checks.EP_PLAN}.chunk_moe_lookahead": (1,),
    f"{checks.EP_PLAN}.chunk_moe_overlap_shared_expert": (False,),
    f"{checks.EP_PLAN}.chunk_moe_skip_unread": (False,),
    "training.optimizer": ("adamw",),
}
# the planner's layouts with these are another back end's
_ONLY_ONE = ("parallel.tensor_parallel_size", "parallel.ring_attention_size")


class Given(NamedTuple):
    """Attributes:
    notes: what the yaml says that the estimate does not, one sentence each.
    """

    job: Job
    setting: Setting
    notes: list[str]


class _Yaml:
    """The values at paths, checked by the table of keys."""

    def __init__(self, path: Path) -> None:
        data = yaml_text.load(yaml_text.read(path), str(path)).data
        if not isinstance(data, Mapping):
            raise ConfigError.about(
                str(path), data, "must be a mapping, as a yaml of MindSpeed-MM is", "give another file"
            )
        self._settings = keys.read(data)

    def get(self, path: str, default: Any = None) -> Any:
        value: Any = self._settings
        for segment in path.split("."):
            value = value.get(segment) if isinstance(value, Mapping) else None
        if value is None:
            return default
        key = keys.at(path)
        return key.lint.take(path, value) if isinstance(key, keys.Key) and key.lint else value


def read(path: Path, *, nodes: int, devices_per_node: int, device: Device, model: str | None, **more: Any) -> Given:
    """Args:
        model: in place of the yaml's `model.model_name_or_path`.
        more: further attributes of the job, which the yaml does not have.

    Raises:
        ConfigError: for a wrong value, and for what the planner cannot estimate.
    """
    config = _Yaml(path)
    world, ep, cp = nodes * devices_per_node, config.get(checks.SIZE, 1), config.get(_ULYSSES, 1)
    notes = list(_not_read(config, world))
    for name in _ONLY_ONE:
        if config.get(name, 1) != 1:
            rule = "the planner has no estimate for it with MindSpeed-MM's FSDP2 back end"
            raise ConfigError.about(name, config.get(name), rule, "set it to 1")
    if world % cp:
        rule = f"must divide the number of ranks, {world}"
        raise ConfigError.about(_ULYSSES, cp, rule, "change one of the two")
    checks.check_ranks(ep, world)
    batch = config.get("training.micro_batch_size", 1), config.get("training.gradient_accumulation_steps", 1)
    length = config.get(_LENGTH)
    if isinstance(length, int) and length > _MOST_TOKENS:
        raise ConfigError.about(_LENGTH, length, f"at most {_MOST_TOKENS} tokens can be estimated", "make it shorter")
    if length is None:
        raise ConfigError(f"{_LENGTH}: is missing; give the tokens per sample", _LENGTH)
    job = Job(
        model=load_model(_folder(config, path, model)),
        device=device,
        nodes=nodes,
        devices_per_node=devices_per_node,
        recipe=FSDP2_RECIPES[_recipe(config)],
        sequence=length,
        global_batch=batch[0] * batch[1] * (world // cp),
        chunk_loss=_chunk_loss(config, batch[0]),
        train_vision=VISION not in _frozen(config, notes),
        **more,
    )
    if job.compute not in device.flops:
        rule = f"{device.name} has no matrix unit for {job.compute}, which a missing key means, too"
        raise ConfigError.about(_DTYPE, config.get(_DTYPE), rule, "use bf16, or another --device")
    checks.check_experts(ep, job.model.num_experts)
    if problem := ulysses_problem(job.model, cp, length):
        raise ConfigError.about(_ULYSSES, cp, problem, "change it")
    setting = Setting(
        layout=Layout(cp=cp, ep=ep, dp=world // cp),
        micro_batch=batch[0],
        accumulation=batch[1],
        chunk_mbs=_chunk_mbs(config, batch[0]),
        policy=_policy(config, notes),
    )
    return Given(job, _with_experts(config, setting, job, notes), notes)


def _not_read(config: _Yaml, world: int) -> Iterator[str]:
    for name, (usual, *alike) in _NOT_READ.items():
        value = config.get(name, usual)
        if value not in (usual, *alike) and (name != _SHARDS or value != world):  # all ranks are what auto means
            numbers = "without this key" if usual is None else f"for {usual}"
            yield f"{name}: {shown(value)} is not estimated; the numbers are {numbers}."


def _frozen(config: _Yaml, notes: list[str]) -> list[str]:
    names = NAMES.take("model.freeze", config.get("model.freeze", []))
    if others := [name for name in names if name != VISION]:
        notes.append(f"model.freeze: of its modules only {VISION} is read, not {', '.join(others[:3])}.")
    return list(names)


def _folder(config: _Yaml, path: Path, model: str | None) -> str:
    if model is not None:
        return model
    name = config.get(_MODEL)
    if not name:
        raise ConfigError(f"{_MODEL}: is missing; add it, or --model", _MODEL)
    folders = (Path(name), path.parent / name)
    folder = next((each for each in folders if model_config.has_config(each)), None)
    if folder is None:
        raise ConfigError.about(_MODEL, name, "is no folder with a config.json here", "add --model")
    return str(folder)


def _recipe(config: _Yaml) -> str:
    dtype = config.get(_DTYPE) or "fp32"
    if dtype not in _DTYPES:
        rule = f"must be one of {', '.join(_DTYPES)} for an estimate"
        raise ConfigError.about(_DTYPE, dtype, rule, "use one of them")
    return _DTYPES[dtype]


def _chunk_loss(config: _Yaml, micro_batch: int) -> int:
    for section in ("features", "model"):  # 26.0 has it in the second
        if FLAG.take(f"{section}.enable_chunk_loss", config.get(f"{section}.enable_chunk_loss", False)):
            plan = config.get(f"{section}.chunkloss_plan") or {}
            size = plan.get("chunk_size", 1024) if isinstance(plan, Mapping) else 1024
            path = f"{section}.chunkloss_plan.chunk_size"
            return COUNT.take(path, size) * micro_batch
    return 0


def _chunk_mbs(config: _Yaml, micro_batch: int) -> int:
    if not config.get("features.enable_chunk_mbs", False):
        return 0
    size = ChunkMBSConfig.from_mapping(config.get("features.chunkmbs_plan", {})).chunk_mbs
    if size < micro_batch and micro_batch % size:
        path = "features.chunkmbs_plan.chunk_mbs"
        rule = f"does not divide training.micro_batch_size, {micro_batch}, and unequal micro-chunks cannot be estimated"
        raise ConfigError.about(path, size, rule, "use a divisor")
    return size if size < micro_batch else 0


def _policy(config: _Yaml, notes: list[str]) -> str:
    recompute = config.get("features.recompute", False) or config.get("parallel.recompute", False)
    offload = config.get("features.enable_activation_offload", False)
    for name, on in (("recompute_plan", recompute), ("activation_offload_plan", offload)):
        section = "features" if config.get(f"features.{name}") else "parallel"
        if on and BLOCKS not in config.get(f"{section}.{name}.apply_modules", [BLOCKS]):
            notes.append(f"{section}.{name}.apply_modules lacks {BLOCKS}: the numbers are for all blocks.")
    if offload and not recompute:
        notes.append("Activation offload without recompute is estimated as if nothing were offloaded.")
    return ("offload" if offload else "full") if recompute else "none"


def _with_experts(config: _Yaml, setting: Setting, job: Job, notes: list[str]) -> Setting:
    dispatcher = config.get(checks.DISPATCHER, "alltoall")
    if setting.layout.ep == 1:
        notes.append("With EP=1 MindSpeed-MM's own experts run, assumed to take the time and memory of one chunk.")
        return setting
    if dispatcher != checks.NAME:
        notes.append(f"dispatcher: {dispatcher} is estimated as this package's with one chunk and a row per expert.")
        return dataclasses.replace(setting, dispatch=PER_EXPERT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lint reports it
        plan = ChunkMoEConfig.from_mapping(config.get(checks.EP_PLAN, {}))
    number, path = plan.moe_num_chunks or 1, "moe_num_chunks"
    if plan.moe_chunk_size and not plan.moe_num_chunks:
        number, path = -(-setting.tokens(job) // plan.moe_chunk_size), "moe_chunk_size"
    if number > _MOST_CHUNKS:
        rule = f"makes {number} chunks, and at most {_MOST_CHUNKS} can be estimated"
        raise ConfigError.about(f"{checks.EP_PLAN}.{path}", getattr(plan, path), rule, "use 2 to 8 chunks")
    if plan.chunk_moe_auto:
        notes.append("chunk_moe_auto: true is estimated as one chunk; the table of the MoE layer has the others.")
    return dataclasses.replace(
        setting,
        num_chunks=number,
        schedule=plan.chunk_moe_schedule,
        keep=plan.keep,
        dispatch=plan.chunk_moe_dispatch,
    )
