"""Ring attention (Liu et al., arXiv:2310.01889): ranks keep their queries, and pass keys and values around.

c ranks share a sequence, with T tokens on each of them. They send c - 1 times T (keys + values) s bytes in the forward;
in the backward these and their gradients. Any number of ranks is possible. With a causal mask, each must hold matching
early and late pieces to have equal work. Only full attention can be split so: other layers have a state that runs along
the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_chunk.hardware import POINT_TO_POINT
from mindspeed_chunk.planner.model import ModelSize


def ring_problem(model: ModelSize, ranks: int, sequence: int) -> str | None:
    """Why `ranks` ranks cannot pass a sequence around, or None."""
    if sequence % ranks:
        return f"{ranks} ranks do not divide a sequence of {sequence}"
    layers = model.num_hidden_layers
    linear = layers - model.num_full_attention
    return f"{linear} of its {layers} layers are Gated DeltaNet, along the sequence" if linear and ranks > 1 else None


def ring_traffic(model: ModelSize, ranks: int, tokens: int, element_size: int) -> Iterator[tuple[str, int, int]]:
    """As `ulysses_traffic`."""
    calls = (ranks - 1) * (1 + 2) * model.num_full_attention
    yield POINT_TO_POINT, calls, calls * tokens * 2 * model.num_key_value_heads * model.head_dim * element_size
