"""Bytes that one parameter costs in each number format recipe, spread over the ranks that share it.

fp32 has 8 bits of exponent and 23 of mantissa, bf16 8 and 7, fp16 5 and 10, fp8 (E4M3) 4 and 3. bf16 has the range of
fp32: gradients neither overflow nor vanish in it, and it needs no loss scaling. fp16 ends at 65504 and below 6e-8:
the loss is multiplied by a scale that keeps small gradients above that, and steps that overflow are skipped
(Micikevicius et al., Mixed Precision Training, arXiv:1710.03740).
"""

from __future__ import annotations

from typing import NamedTuple


class Recipe(NamedTuple):
    """A way to keep and compute with parameters: bytes that each costs.

    Attributes:
        weight: the copy that is kept, sharded.
        master: a second copy that the optimizer updates; 0 if it updates the first one.
        grad: the gradient that the optimizer reads.
        moments: Adam's two moments together.
        gathered: an element of a unit while it is gathered for computing.
        compute: the format of the matmuls, a key of a device's `flops`.
        loss_scaling: whether the format needs it.
        source: where the recipe is described.
    """

    name: str
    weight: int
    master: int
    grad: int
    moments: int
    gathered: int
    compute: str
    loss_scaling: bool
    source: str

    @property
    def kept(self) -> int:
        """All that stays from step to step, together."""
        return self.weight + self.master + self.grad + self.moments


ZERO = "Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3.1"
_FSDP2 = "torch.distributed.fsdp.MixedPrecisionPolicy: parameters stay fp32 in shards, and are cast for the gather"

DEFAULT_RECIPE = "bf16-fsdp2"
# those that MindSpeed-MM's FSDP2 yaml can select
FSDP2_RECIPES = {
    "fp32": Recipe("fp32", 4, 0, 4, 8, 4, "fp32", False, ZERO),
    DEFAULT_RECIPE: Recipe(DEFAULT_RECIPE, 4, 0, 4, 8, 2, "bf16", False, _FSDP2),
}
