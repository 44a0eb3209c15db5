"""Parameters, gradients and optimizer state on one rank of FSDP2, to the byte.

FSDP2 cuts each parameter along one dimension of size d into pieces of ceil(d / n) for the n ranks of its unit, so the
last ranks may hold less or nothing, and a gather moves n x ceil(d / n). Experts are first cut into EP parts along
dimension 0, then over the ranks / EP that hold the same ones; everything else over all ranks.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from mindspeed_chunk.planner.model import ModelSize, Parameter
from mindspeed_chunk.planner.precision import Recipe

# `fsdp_plan.apply_modules` of MindSpeed-MM's Qwen3.5 examples, without the multi-token prediction head
FSDP_MODULES = (
    "model.visual",
    "model.visual.blocks.{*}",
    "model.language_model.embed_tokens",
    "model.language_model",
    "model.language_model.layers.{*}",
    "model.language_model.layers.{*}.linear_attn",
    "model.language_model.layers.{*}.mlp.experts",
    "lm_head",
)
VISION = "model.visual"
BLOCKS = "model.language_model.layers.{*}"
_ADAM_STEP = 4  # bytes: torch keeps the step count of every parameter as a separate fp32 tensor


class Sharding(NamedTuple):
    """How FSDP2 spreads a model.

    Attributes:
        ranks: the number of ranks that share the parameters.
        ep: expert-parallel size.
        modules: `fsdp_plan.apply_modules`; each match is a unit, gathered as one.
        expert_dim: along which an expert parameter is spread over the ranks with the same experts: 1 in MindSpeed-MM, 0
            in the embedded trainer.
        train_vision: whether the vision tower is trained; the embedded trainer neither trains nor runs it.
    """

    ranks: int
    ep: int = 1
    modules: tuple[str, ...] = FSDP_MODULES
    expert_dim: int = 1
    train_vision: bool = True


class Units(NamedTuple):
    """FSDP2 units that are alike, as in most blocks: each has these parameters, which are gathered together.

    Attributes:
        names: of the modules; "" for what belongs to no module of the plan.
        pieces: of each parameter before it is spread over `ranks`: (size along the dimension that is cut, elements in a
            slice of it).
    """

    names: tuple[str, ...]
    pieces: tuple[tuple[int, int], ...]
    ranks: int
    expert: bool
    trained: bool

    @property
    def number(self) -> int:
        """How many units these are."""
        return len(self.names)

    @property
    def in_block(self) -> bool:
        """Whether they are in blocks of the language model."""
        return ".layers." in self.names[0]

    def gathered(self) -> int:
        """Elements that a gather of one of them moves, with the padding that makes all ranks send the same."""
        return sum(_ceil(size, self.ranks) * self.ranks * rest for size, rest in self.pieces)

    def local(self, rank: int) -> int:
        """Elements of one of them in the shard of one of its ranks, counted from 0."""
        return sum(_piece(size, self.ranks, rank) * rest for size, rest in self.pieces)


class StateBytes(NamedTuple):
    """Bytes of parameters, gradients and optimizer state on one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """The three together."""
        return sum(self)


@functools.lru_cache(maxsize=256)
def units(model: ModelSize, sharding: Sharding) -> tuple[Units, ...]:
    """The units of a model, in the order of their first parameter."""
    alike = _alike(model, sharding.modules)
    return tuple(_units(names, parameters, sharding) for (_, parameters), names in alike.items())


@functools.lru_cache(maxsize=16)
def _alike(model: ModelSize, modules: tuple[str, ...]) -> dict[tuple[str, tuple[Parameter, ...]], tuple[str, ...]]:
    """Names of modules by the pattern that they match and their parameters."""
    matches = re.compile("|".join(f"({_regex(pattern)})" for pattern in modules)).fullmatch

    @functools.cache
    def owner(name: str) -> tuple[str, str]:
        """Of a module: the innermost one of the plan that it is or is in, after the pattern of that."""
        match = matches(name)
        if match and match.lastindex:
            return modules[match.lastindex - 1], name
        return owner(name.rpartition(".")[0]) if name else ("", "")

    by_module: dict[tuple[str, str], list[Parameter]] = {}
    for parameter in model.parameters():
        pattern, module = owner(parameter.name.rpartition(".")[0])
        own_name = parameter.name.removeprefix(module)
        by_module.setdefault((pattern, module), []).append(parameter._replace(name=own_name))
    alike: dict[tuple[str, tuple[Parameter, ...]], list[str]] = {}
    for (pattern, module), parameters in by_module.items():
        alike.setdefault((pattern, tuple(parameters)), []).append(module)
    return {key: tuple(modules) for key, modules in alike.items()}


def _units(names: tuple[str, ...], parameters: Sequence[Parameter], sharding: Sharding) -> Units:
    expert = all(parameter.expert for parameter in parameters)
    pieces = []
    for parameter in parameters:
        shape, dim = list(parameter.shape), 0
        if parameter.expert:
            shape[0], dim = shape[0] // sharding.ep, sharding.expert_dim
        pieces.append((shape[dim], math.prod(shape) // shape[dim]))
    ranks = sharding.ranks // sharding.ep if expert else sharding.ranks
    return Units(names, tuple(pieces), ranks, expert, sharding.train_vision or not names[0].startswith(VISION))


def state_bytes(model: ModelSize, sharding: Sharding, recipe: Recipe, rank: int = 0) -> StateBytes:
    """Bytes of one rank's shards: sum over its units of local elements x the recipe's bytes.

    Parameters that are not trained have neither gradients nor optimizer state.
    """
    kept = trained = count = 0
    for unit in units(model, sharding):
        # ranks with the same experts are EP apart: rank = ep + EP x place
        elements = unit.number * unit.local(rank // sharding.ep if unit.expert else rank)
        kept += elements
        if unit.trained:
            trained += elements
            count += unit.number * len(unit.pieces)
    return StateBytes(
        kept * recipe.weight,
        trained * recipe.grad,
        trained * (recipe.master + recipe.moments) + count * _ADAM_STEP,
    )


def _regex(pattern: str) -> str:
    """MindSpeed-MM's {*}: any number."""
    return r"\d+".join(re.escape(part) for part in pattern.split("{*}"))


def _ceil(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _piece(size: int, ranks: int, rank: int) -> int:
    piece = _ceil(size, ranks)
    return max(0, min(piece, size - rank * piece))
