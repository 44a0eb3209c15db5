"""Long sequences: what Ulysses context parallelism splits, what it sends, and its limits.

c ranks share a sequence, with T tokens on each of them and s bytes per element. Ulysses (Jacobs et al.,
arXiv:2309.14509) gathers the sequence and splits the heads. It makes all-to-alls of queries, keys and values before the
attention core and one of its output after it, and the same in the backward; in a recompute, those of the forward again.
c must divide the number of query heads. Keys and values with fewer heads than c are repeated until there are c. Gated
DeltaNet layers, which are recurrences along the sequence, are split by their heads: queries, keys, values, the two
numbers b and a of each value head, and the output. The output's gate of either kind of layer stays where its token is.

Sequence parallelism in a TP group splits the operations between attention and matmuls, not the attention itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_chunk.hardware import ALL_TO_ALL
from mindspeed_chunk.planner.model import ModelSize


def ulysses_problem(model: ModelSize, ranks: int, sequence: int) -> str | None:
    """Why `ranks` ranks cannot share a sequence, or None."""
    if sequence % ranks:
        return f"{ranks} ranks do not divide a sequence of {sequence}"
    if model.num_full_attention and model.num_attention_heads % ranks:
        return f"{ranks} ranks do not divide {model.num_attention_heads} attention heads"
    if model.num_full_attention < model.num_hidden_layers and model.linear_num_key_heads % ranks:
        return f"{ranks} ranks do not divide {model.linear_num_key_heads} key heads of the Gated DeltaNet layers"
    return None


def ulysses_traffic(
    model: ModelSize, ranks: int, tokens: int, element_size: int, directions: int = 2
) -> Iterator[tuple[str, int, int]]:
    """(kind, calls, bytes) of all layers in one forward and backward.

    Args:
        tokens: of one rank.
        directions: 1: the forward alone; 3: the forward, its recompute, and the backward.
    """
    full, linear = model.num_full_attention, model.num_hidden_layers - model.num_full_attention
    query = model.num_attention_heads * model.head_dim
    repeated = model.num_key_value_heads * model.head_dim * max(1, ranks // model.num_key_value_heads)
    attention = query + 2 * repeated + query  # queries, keys, values; the output
    delta = 2 * model.linear_key_width + 2 * model.linear_value_width + 2 * model.linear_num_value_heads
    for layers, calls, width in ((full, 4, attention), (linear, 6, delta)):
        if layers:
            yield ALL_TO_ALL, directions * calls * layers, directions * layers * tokens * width * element_size
