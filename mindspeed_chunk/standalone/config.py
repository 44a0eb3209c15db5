"""The trainer's configuration: MindSpeed-MM's yaml, read into frozen dataclasses.

A field is a key of the yaml, with the conversion that checks it and its default. Every other key is named in one
warning, so that nothing is dropped silently. An error is a ConfigError of one line.
"""

from dataclasses import dataclass
from pathlib import Path
from warnings import catch_warnings, simplefilter

from mindspeed_chunk import yaml_text
from mindspeed_chunk.config import KEY_PREFIXES, ChunkMBSConfig, ChunkMoEConfig, ConfigError
from mindspeed_chunk.mbs import checks as mbs_checks
from mindspeed_chunk.moe import checks as moe_checks
from mindspeed_chunk.standalone.section import (
    Section,
    choice,
    dtype,
    flag,
    integer,
    key,
    names,
    number,
    override,
    text,
    warnings_of,
)


@dataclass(frozen=True, kw_only=True)
class FsdpPlan:
    """`parallel.fsdp_plan`; dtypes by torch's names."""

    apply_modules: tuple[str, ...] = key(names, ())
    param_dtype: str = key(dtype, "float32")
    reduce_dtype: str = key(dtype, "float32")
    reshard_after_forward: bool = key(flag, True)
    num_to_forward_prefetch: int = key(integer(0), 0)
    num_to_backward_prefetch: int = key(integer(0), 0)


@dataclass(frozen=True, kw_only=True)
class EpPlan:
    """`parallel.ep_plan`, without the keys of Chunk MoE."""

    apply_modules: tuple[str, ...] = key(names, ())
    dispatcher: str = key(choice("alltoall", "chunkmoe"), "alltoall")


@dataclass(frozen=True, kw_only=True)
class Training:
    """`training`."""

    optimizer: str = key(choice("adamw"), "adamw")
    micro_batch_size: int = key(integer(1), 1)
    gradient_accumulation_steps: int = key(integer(1), 1)
    seed: int = key(integer(0), 42)
    lr: float = key(number(0.0), 5e-5)
    weight_decay: float = key(number(0.0), 0.0)
    adam_beta1: float = key(number(0.0, below=1.0), 0.9)
    adam_beta2: float = key(number(0.0, below=1.0), 0.999)
    adam_eps: float = key(number(0.0), 1e-8)
    clip_grad: float = key(number(0.0), 1.0)
    train_iters: int = key(integer(1), 10000)
    log_interval: int = key(integer(1), 1)


@dataclass(frozen=True, kw_only=True)
class Model:
    """`model`."""

    model_id: str = key(choice("qwen3_5_moe"), "qwen3_5_moe")
    model_name_or_path: str = key(text)
    attn_implementation: str = key(choice("sdpa", "eager"), "sdpa")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything the trainer acts on."""

    fsdp: FsdpPlan
    ep: EpPlan
    ep_size: int
    chunk_moe: ChunkMoEConfig
    model: Model
    training: Training
    sequence_length: int
    recompute_modules: tuple[str, ...]
    offload_modules: tuple[str, ...]
    chunk_mbs: ChunkMBSConfig | None
    router_aux_loss_coef: float
    metrics_path: Path | None

    def global_batch_size(self, world_size):
        """Samples an optimizer step, all ranks and micro batches together."""
        return self.training.micro_batch_size * self.training.gradient_accumulation_steps * world_size

    def shared(self):
        """What must be the same on every rank, by the keys of the yaml: all but paths and what is logged."""
        from mindspeed_chunk.consistency import flatten  # torch, which an error in a yaml does not wait for

        shared = {
            **flatten(self.fsdp, "parallel.fsdp_plan"),
            **flatten(self.ep, moe_checks.PLAN),
            **flatten(self.chunk_moe, moe_checks.PLAN),
            moe_checks.SIZE: self.ep_size,
            "model.attn_implementation": self.model.attn_implementation,
            **flatten(self.training, "training"),
            "data.dataset_param.basic_parameters.cutoff_len": self.sequence_length,
            "features.recompute": bool(self.recompute_modules),
            "features.recompute_plan.apply_modules": self.recompute_modules,
            "features.enable_activation_offload": bool(self.offload_modules),
            "features.activation_offload_plan.apply_modules": self.offload_modules,
            mbs_checks.ENABLE: self.chunk_mbs is not None,
            **flatten(self.chunk_mbs or ChunkMBSConfig(), mbs_checks.PLAN),
            "features.loss_cfg.router_aux_loss_coef": self.router_aux_loss_coef,
        }
        del shared["training.log_interval"]
        return shared


def load_config(path, overrides, world_size):
    """Read the yaml at `path`, apply the `key.path=value` overrides, check all that needs no model.

    Returns (Config, list of warnings). Raises ConfigError.
    """
    content = yaml_text.sections(yaml_text.read(Path(path)), str(path)).data
    for argument in overrides:
        override(content, argument)
    root = Section(content, "")
    warnings: list[str] = []
    parallel, features = root.section("parallel"), root.section("features")
    data = root.section("data").section("dataset_param").section("basic_parameters")
    recompute_modules = features.section("recompute_plan").read("apply_modules", names, ())
    offload_modules = features.section("activation_offload_plan").read("apply_modules", names, ())
    metrics_path = root.section("standalone").read("metrics_path", text, None)
    parallel.read("fully_shard_parallel_size", choice("auto", world_size), "auto")
    ep_size = parallel.read("expert_parallel_size", integer(1), 1)
    moe_checks.check_ranks(ep_size, world_size)
    ep, chunk_moe = _read_ep_plan(parallel.section("ep_plan"), ep_size, warnings)
    config = Config(
        fsdp=parallel.section("fsdp_plan").read_all(FsdpPlan),
        ep=ep,
        ep_size=ep_size,
        chunk_moe=chunk_moe,
        model=root.section("model").read_all(Model),
        training=root.section("training").read_all(Training),
        sequence_length=data.read("cutoff_len", integer(2)),
        recompute_modules=recompute_modules if features.read("recompute", flag, False) else (),
        offload_modules=offload_modules if features.read("enable_activation_offload", flag, False) else (),
        chunk_mbs=_read_chunkmbs_plan(features),
        router_aux_loss_coef=features.section("loss_cfg").read("router_aux_loss_coef", number(0.0), 0.0),
        metrics_path=Path(metrics_path) if metrics_path else None,
    )
    warnings += _chunkmbs_warnings(config)
    return config, [*warnings, *warnings_of(root.unused())]


def _read_chunkmbs_plan(features):
    """The ChunkMBSConfig, or None where the feature is off. Its keys are checked in either case."""
    section = features.section("chunkmbs_plan")
    section.mark_used(section.mapping)
    ChunkMBSConfig.from_mapping(section.mapping, section.path)
    if not features.read("enable_chunk_mbs", flag, False):
        return None
    return mbs_checks.read_config(section.mapping)


def _chunkmbs_warnings(config):
    if config.chunk_mbs is None:
        return
    inner = {
        "features.recompute": config.recompute_modules or None,
        "features.enable_activation_offload": config.offload_modules or None,
    }
    yield from _told(mbs_checks.check_size, config.chunk_mbs.chunk_mbs, config.training.micro_batch_size)
    yield from _told(mbs_checks.check_memory, inner)


def _told(check, *arguments):
    """What a check has to say, as a warning."""
    try:
        check(*arguments)
    except ConfigError as error:
        yield str(error)


def _read_ep_plan(section, ep_size, warnings):
    plan = section.read_all(EpPlan)
    with catch_warnings(record=True) as caught:
        simplefilter("always")
        chunk_moe = ChunkMoEConfig.from_mapping(section.mapping, path=section.path)
    warnings += [str(warning.message) for warning in caught]
    chunk_keys = [name for name in section.mapping if str(name).startswith(KEY_PREFIXES)]
    section.mark_used(chunk_keys)
    if chunk_moe != ChunkMoEConfig():
        warnings += _told(moe_checks.check_effect, chunk_keys, plan.dispatcher)
    if ep_size > 1 or plan.dispatcher == moe_checks.NAME:
        moe_checks.check_names(plan.apply_modules)
    return plan, chunk_moe
