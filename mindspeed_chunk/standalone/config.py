"""The trainer's configuration: MindSpeed-MM's yaml, read into frozen dataclasses.

`mindspeed_chunk.keys` has the keys with rules, defaults and meanings. A warning names every other key of the yaml, so
that none is ignored silently. An error is a ConfigError of one line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from warnings import catch_warnings, simplefilter

from mindspeed_chunk import keys, yaml_text
from mindspeed_chunk.config import KEY_PREFIXES, ChunkMBSConfig, ChunkMoEConfig, ConfigError
from mindspeed_chunk.mbs import checks as mbs_checks
from mindspeed_chunk.moe import checks as moe_checks
from mindspeed_chunk.values import MAPPING
from mindspeed_chunk.wording import one_line, shortened

_SHARDS = "parallel.fully_shard_parallel_size"
_RECOMPUTE, _OFFLOAD = "features.recompute", "features.enable_activation_offload"
# Keys that may differ between ranks.
_LOCAL = (_SHARDS, "model.model_name_or_path", "training.log_interval", "standalone.metrics_path")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that the trainer uses.

    values: the values of the keys for the trainer in `mindspeed_chunk.keys`, by path.
    fsdp, ep, model, training: the values of one section, by name (their types: `keys`); dtypes are torch's names.
    recompute_modules, offload_modules: empty if the feature is off. chunk_mbs: None if it is off.
    """

    values: dict[str, Any]
    fsdp: SimpleNamespace
    ep: SimpleNamespace
    ep_size: int
    chunk_moe: ChunkMoEConfig
    model: SimpleNamespace
    training: SimpleNamespace
    sequence_length: int
    recompute_modules: tuple[str, ...]
    offload_modules: tuple[str, ...]
    chunk_mbs: ChunkMBSConfig | None
    router_aux_loss_coef: float
    metrics_path: Path | None

    def global_batch_size(self, world_size: int) -> int:
        """Samples per optimizer step, over all ranks and micro batches."""
        return self.training.micro_batch_size * self.training.gradient_accumulation_steps * world_size

    def shared(self) -> dict[str, Any]:
        """What must be the same on every rank, by the keys of the yaml: all but paths and what is logged."""
        from mindspeed_chunk.consistency import flatten  # imports torch, which an error in a yaml does not need

        return {
            **{path: value for path, value in self.values.items() if path not in _LOCAL},
            **flatten(self.chunk_moe, moe_checks.EP_PLAN),
            **flatten(self.chunk_mbs or ChunkMBSConfig(), mbs_checks.MBS_PLAN),
        }


def load_config(path: str | Path, overrides: Iterable[str], world_size: int) -> tuple[Config, list[str]]:
    """Read the yaml at `path`, apply the `key.path=value` overrides, and check everything that needs no model.

    Returns the Config and the warnings. Raises ConfigError.
    """
    content = yaml_text.sections(yaml_text.read(Path(path)), str(path)).data
    for argument in overrides:
        _override(content, argument)
    values: dict[str, Any] = {}
    without_effect = list(_read(content, values))
    if values[_SHARDS] not in ("auto", world_size):
        raise ConfigError.about(_SHARDS, values[_SHARDS], f"must be one of auto, {world_size}", "write auto")
    moe_checks.check_ranks(values[moe_checks.SIZE], world_size)
    for switch in (_RECOMPUTE, _OFFLOAD):
        if not values[switch]:
            values[mbs_checks.names_key(switch)] = ()
    warnings: list[str] = []
    metrics_path = values["standalone.metrics_path"]
    config = Config(
        values=values,
        fsdp=_section(values, "parallel.fsdp_plan"),
        ep=_section(values, moe_checks.EP_PLAN),
        ep_size=values[moe_checks.SIZE],
        chunk_moe=_read_chunk_moe(_mapping(content, "parallel", "ep_plan"), values, warnings),
        model=_section(values, "model"),
        training=_section(values, "training"),
        sequence_length=values["data.dataset_param.basic_parameters.cutoff_len"],
        recompute_modules=values[mbs_checks.names_key(_RECOMPUTE)],
        offload_modules=values[mbs_checks.names_key(_OFFLOAD)],
        chunk_mbs=_read_chunk_mbs(_mapping(content, "features", "chunkmbs_plan"), values),
        router_aux_loss_coef=values["features.loss_cfg.router_aux_loss_coef"],
        metrics_path=Path(metrics_path) if metrics_path else None,
    )
    warnings += _chunk_mbs_warnings(config)
    return config, [*warnings, *_warnings_of(without_effect)]


def _read(
    content: Any, values: dict[str, Any], known: dict[str, Any] = keys.SECTIONS, section: str = ""
) -> Iterator[tuple[str, str, object]]:
    """Put the values that the trainer reads into `values`, by path. Yields section, path and value of other keys."""
    content = {} if content is None else MAPPING.take(section, content)
    for name, value in content.items():
        if not _used(known.get(name)):
            yield section, keys.joined(section, name), value
    for name, key in known.items():
        path, value = keys.joined(section, name), content.get(name)
        if isinstance(key, dict):
            yield from _read(value, values, key, path) if _used(key) else ()
        elif key.trainer and value is None:
            if key.default is keys.REQUIRED:
                raise ConfigError.about(path, None, "the trainer needs it", "add it to the yaml")
            values[path] = key.default
        elif key.trainer:
            values[path] = key.trainer.take(path, value)


def _used(key: Any) -> bool:
    """Whether the trainer reads the key, or a key of the section."""
    if isinstance(key, dict):
        return any(map(_used, key.values()))
    return key is not None and (key.trainer is not None or key.setting)


def _section(values: dict[str, Any], section: str) -> SimpleNamespace:
    paths = {name: f"{section}.{name}" for name in keys.at(section)}
    return SimpleNamespace(**{name: values[path] for name, path in paths.items() if path in values})


def _mapping(content: Mapping, section: str, key: str) -> Mapping:
    return (content.get(section) or {}).get(key) or {}


def _read_chunk_moe(ep_plan: Mapping, values: dict[str, Any], warnings: list[str]) -> ChunkMoEConfig:
    with catch_warnings(record=True) as caught:
        simplefilter("always")
        chunk_moe = ChunkMoEConfig.from_mapping(ep_plan)
    warnings += [str(warning.message) for warning in caught]
    dispatcher = values[moe_checks.DISPATCHER]
    if chunk_moe != ChunkMoEConfig():
        chunk_keys = [name for name in ep_plan if str(name).startswith(KEY_PREFIXES)]
        warnings += _warning_of(moe_checks.check_effect, chunk_keys, dispatcher)
    if values[moe_checks.SIZE] > 1 or dispatcher == moe_checks.NAME:
        moe_checks.check_names(values[f"{moe_checks.EP_PLAN}.apply_modules"])
    return chunk_moe


def _read_chunk_mbs(mbs_plan: Mapping, values: dict[str, Any]) -> ChunkMBSConfig | None:
    """The ChunkMBSConfig, or None if the feature is off. Its keys are checked in both cases."""
    ChunkMBSConfig.from_mapping(mbs_plan)
    return mbs_checks.read_config(mbs_plan) if values[mbs_checks.ENABLE] else None


def _chunk_mbs_warnings(config: Config) -> Iterator[str]:
    if config.chunk_mbs is None:
        return
    inner = {_RECOMPUTE: config.recompute_modules or None, _OFFLOAD: config.offload_modules or None}
    yield from _warning_of(mbs_checks.check_size, config.chunk_mbs.chunk_mbs, config.training.micro_batch_size)
    yield from _warning_of(mbs_checks.check_memory, inner)


def _warning_of(check: Callable, *arguments: object) -> Iterator[str]:
    """The error of a check as a warning."""
    try:
        check(*arguments)
    except ConfigError as error:
        yield str(error)


def _warnings_of(without_effect: Iterable[tuple[str, str, object]]) -> Iterator[str]:
    """One warning per key that may be misspelt, and one for all others."""
    others = []
    for section, path, value in without_effect:
        if keys.nearest(path.rpartition(".")[2], section):
            yield str(keys.unknown(path, value, section))
        else:
            others.append(path)
    if others:
        yield one_line(f"without effect in this trainer: {', '.join(others)}")


def _override(content: dict, argument: str) -> None:
    """Set one `key.path=value` in the mapping `content`; the value is yaml. Raises ConfigError."""
    name, equals, value = argument.partition("=")
    *parents, last = name.split(".")
    if not (equals and all((*parents, last))):
        raise ConfigError(f"{shortened(argument)}: must read key.path=value; for example training.train_iters=5")
    for parent in parents:
        inner = {} if content.get(parent) is None else content[parent]
        if not isinstance(inner, dict):
            raise ConfigError.about(argument, inner, f"`{parent}` is no mapping in the yaml", "correct the path")
        # a copy: an alias elsewhere in the yaml may name the same mapping
        content[parent] = content = dict(inner)
    content[last] = yaml_text.load(value, shortened(argument)).data
