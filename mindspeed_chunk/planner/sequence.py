"""Long sequences: what ring and Ulysses context parallelism split, what they send, and where they end.

c ranks share a sequence, T tokens on each of them, s bytes an element.

Ulysses (Jacobs et al., arXiv:2309.14509) gathers the sequence and splits the heads: all-to-alls of queries, keys,
values in front of the attention core and one of its output behind it, in the backward the same again. c cannot be
larger than the number of query heads, and must divide it; keys and values with fewer heads than c are repeated until
there are c. Gated DeltaNet layers, which are recurrences along the sequence, are split by their heads in the same way.

Ring attention (Liu et al., arXiv:2310.01889) keeps queries where they are and passes keys and values around: c - 1
times T (keys + values) s forward; in the backward these and their gradients. Any number of ranks; with a causal mask
they must hold matching early and late pieces to have equal work. It splits full attention only: a layer whose state
runs along the sequence cannot be passed around so.

Sequence parallelism in a TP group splits what lies between the attention and the matmuls, not the attention itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_chunk.hardware import ALL_TO_ALL, POINT_TO_POINT
from mindspeed_chunk.planner.model import ModelSize

CONTEXTS = ("ulysses", "ring")


def context_problem(model: ModelSize, context: str, ranks: int, sequence: int) -> str | None:
    """Why a sequence cannot be shared by `ranks` in this way, or None."""
    if sequence % ranks:
        return f"{ranks} ranks do not divide a sequence of {sequence}"
    linear = model.num_hidden_layers - model.num_full_attention
    if ranks == 1:
        return None
    if context == "ring":
        return (
            f"{linear} of its {model.num_hidden_layers} layers are Gated DeltaNet, along the sequence"
            if linear
            else None
        )
    if model.num_full_attention and model.num_attention_heads % ranks:
        return f"{ranks} ranks do not divide {model.num_attention_heads} attention heads"
    if linear and model.linear_num_key_heads % ranks:
        return f"{ranks} ranks do not divide {model.linear_num_key_heads} key heads of the Gated DeltaNet layers"
    return None


def context_traffic(
    model: ModelSize, context: str, ranks: int, tokens: int, element_size: int
) -> Iterator[tuple[str, int, int]]:
    """(kind, calls, bytes) of all layers in one forward and backward; `tokens` are those of one rank."""
    full, linear = model.num_full_attention, model.num_hidden_layers - model.num_full_attention
    query = model.num_attention_heads * model.head_dim
    key = model.num_key_value_heads * model.head_dim
    if context == "ring":
        calls = (ranks - 1) * (1 + 2) * full
        yield POINT_TO_POINT, calls, calls * tokens * 2 * key * element_size
        return
    repeated = key * max(1, ranks // model.num_key_value_heads)
    gated = 2 * query + 2 * repeated + query  # queries with the output's gate, keys, values; the output
    state = 2 * model.linear_key_width + 2 * model.linear_value_width + model.linear_value_width
    for layers, width in ((full, gated), (linear, state)):
        if layers:
            yield ALL_TO_ALL, 8 * layers, 2 * layers * tokens * width * element_size
