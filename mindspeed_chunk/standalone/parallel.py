"""Expert parallelism and FSDP2, and for these the sum of gradients and their norm.

Ranks form a grid [efsdp, ep]: an expert-parallel group is a run of consecutive ranks, and the ranks with the same
experts shard them further. Everything else is sharded over all ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Module, ModuleDict, ModuleList, Sequential

DEVICE = "cpu"


@dataclass(frozen=True)
class Meshes:
    """`world`: all ranks. `efsdp`: the ranks with this rank's experts. `ep_group`: None if all experts are here."""

    world: DeviceMesh
    efsdp: DeviceMesh
    ep_group: dist.ProcessGroup | None
    ep_rank: int
    ep_size: int


def build_meshes(ep_size: int) -> Meshes:
    """Collective over all ranks; their number must be a multiple of `ep_size`."""
    world_size = dist.get_world_size()
    grid = init_device_mesh(DEVICE, (world_size // ep_size, ep_size), mesh_dim_names=("efsdp", "ep"))
    return Meshes(
        world=init_device_mesh(DEVICE, (world_size,), mesh_dim_names=("world",)),
        efsdp=grid["efsdp"],
        ep_group=grid.get_group("ep") if ep_size > 1 else None,
        ep_rank=grid.get_local_rank("ep"),
        ep_size=ep_size,
    )


def shard_model(
    model: Module, units: Iterable[Module], experts: Iterable[Module], config: SimpleNamespace, meshes: Meshes
) -> None:
    """Keep this rank's experts, then apply FSDP2: `experts` over `efsdp`, the other `units` and the rest over `world`.

    Every rank must have the same weights when this is called.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype), reduce_dtype=getattr(torch, config.reduce_dtype)
    )
    for module in experts:
        for name, parameter in list(module.named_parameters(recurse=False)):
            mine = parameter.detach().chunk(meshes.ep_size)[meshes.ep_rank].clone()
            module.register_parameter(name, torch.nn.Parameter(mine))
    experts, units = set(experts), set(units)
    reshard = config.reshard_after_forward
    for module in _children_first(model):
        if module in experts:
            fully_shard(module, mesh=meshes.efsdp, mp_policy=policy, reshard_after_forward=reshard)
        elif module is model or module in units:
            fully_shard(module, mesh=meshes.world, mp_policy=policy, reshard_after_forward=reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _sum_gradients(module)
    _set_prefetch(model.modules(), "set_modules_to_forward_prefetch", config.num_to_forward_prefetch)
    backward_order = reversed(list(_children_first(model)))
    _set_prefetch(backward_order, "set_modules_to_backward_prefetch", config.num_to_backward_prefetch)


def hoist_units(block: Module) -> None:
    """Gather the FSDP units inside `block` with the block: once per direction for its whole batch.

    Otherwise they would be gathered, and their gradients reduced, once per micro-chunk. With this function the block's
    forward runs inside one call of each unit, between its hooks, and calls inside the block bypass the hooks.
    """
    for parent in list(block.modules()):
        for name, unit in list(parent.named_children()):
            if isinstance(unit, FSDPModule):
                if isinstance(parent, (ModuleDict, ModuleList, Sequential)) or unit.forward is _call:
                    raise ValueError(
                        f"parallel.fsdp_plan.apply_modules: a unit {type(unit).__name__}, inside a block of "
                        "features.chunkmbs_plan, is in a container or in two places; remove it from one of the two"
                    )
                # Python finds this before the module's own entry, so that entry and the names of its parameters stay
                parent.__dict__[name] = _WithoutHooks(unit)
                unit.forward = _call
                block.forward = partial(unit, block.forward)


def _call(body: Callable, *args: Any, **kwargs: Any) -> Any:
    return body(*args, **kwargs)


class _WithoutHooks:
    """Replaces a unit inside its block: calls its original forward; all other attributes are the unit's."""

    def __init__(self, unit: Any) -> None:
        self._unit, self._forward = unit, unit.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_unit":  # missing while a copy is being made
            raise AttributeError(name)
        return getattr(self._unit, name)


def _children_first(module: Module) -> Iterator[Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _sum_gradients(module: Any) -> None:
    """Make FSDP2 reduce with a plain sum; the trainer has the mean over ranks in its loss.

    FSDP2 would average over a unit's ranks. But an expert's gradient, too, must be divided by the number of all ranks,
    although its unit spans only some of them: the all-to-all sent it the tokens of the others. And on gloo the division
    depends on the version: torch 2.7 silently skips it, so only a factor of 1 works; newer versions have a switch for
    the plain sum.
    """
    if hasattr(module, "set_force_sum_reduction_for_comms"):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    else:
        module.set_reduce_scatter_divide_factor(1.0)


def _set_prefetch(modules: Iterable[Module], setter: str, count: int) -> None:
    """Make every trained unit gather the next `count` ones in advance; `modules` are in their order of use."""
    units = [m for m in modules if isinstance(m, FSDPModule) and any(p.requires_grad for p in m.parameters())]
    for position, unit in enumerate(units) if count else ():
        getattr(unit, setter)(units[position + 1 : position + 1 + count])


def clip_gradients(parameters: Iterable[Any], max_norm: float) -> float:
    """Scale the gradients down to `max_norm` (0: never); returns their global norm before that.

    No two ranks have the same piece of a parameter, so the sum of the squares of all pieces' norms is the square of the
    whole norm. torch's own clipping supports only parameters of one mesh.
    """
    pieces = [parameter.grad.to_local() for parameter in parameters if parameter.grad is not None]
    total = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]).square().sum()
    dist.all_reduce(total)
    norm = total.sqrt().item()
    if max_norm and norm > max_norm:
        for piece in pieces:
            piece.mul_(max_norm / (norm + 1e-6))
    return norm
