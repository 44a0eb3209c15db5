"""Which arguments are cut, how outputs are joined, and what is refused; B samples, b in a micro-chunk, S, H."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._pytree import tree_leaves, tree_map
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from mindspeed_chunk.config import ChunkMBSConfig
from mindspeed_chunk.mbs.arguments import CannotCut, Cutter, pair_up
from mindspeed_chunk.mbs.block import ChunkMBS

B, S, H = 5, 7, 6
WHOLE = "whole"


def block(hidden_states, position_embeddings=None, attention_mask=None, position_ids=None, *rest, **others):
    return hidden_states


def cut(args, kwargs, forward=block, batch_sizes=(), **settings):
    return Cutter(ChunkMBSConfig(**{"chunk_mbs": 2, **settings}), forward, batch_sizes).cut(args, kwargs)


def rand(*shape):
    return torch.rand(shape, dtype=torch.float64)


def hidden(batch=B):
    return rand(batch, S, H)


def check_parts(cut_call, value, dims, name="value"):
    """`dims` is like `value`, with the dimension that a leaf is cut along, or WHOLE for what is handed on as it is."""
    start = 0
    for c, length in enumerate(cut_call.lengths):

        def same(part, whole, dim, start=start, length=length):
            if dim == WHOLE:
                assert part is whole
            else:
                torch.testing.assert_close(part, whole.narrow(dim, start, length), rtol=0, atol=0)

        part = cut_call.micro(c)[1][name]
        assert type(part) is type(value)
        tree_map(same, part, value, dims)
        start += length


@pytest.mark.parametrize(
    ("batch", "size", "lengths"),
    [(5, 2, (2, 2, 1)), (6, 2, (2, 2, 2)), (5, 5, (5,)), (5, 9, (5,)), (1, 2, (1,)), (1, 1, (1,)), (3, 1, (1, 1, 1))],
)
def test_micro_chunks_are_of_one_size_but_for_the_last(batch, size, lengths):
    x = hidden(batch)
    made = cut((x,), {}, chunk_mbs=size)
    assert (made.batch, made.lengths) == (batch, lengths)
    assert torch.equal(torch.cat([made.micro(c)[0][0] for c in range(len(lengths))]), x)


def test_no_samples_is_one_empty_micro_chunk():
    assert cut((hidden(0),), {}).lengths == (0,)
    chunked = ChunkMBS(ChunkMBSConfig(chunk_mbs=2)).wrap("block", lambda x: x * 2, block)
    assert chunked(hidden(0)).shape == (0, S, H)


CUT_OR_WHOLE = [
    ((rand(B, S, 4), rand(B, S, 4)), (0, 0)),
    ((rand(1, S, 4), rand(1, S, 4)), (WHOLE, WHOLE)),
    ({"cos": rand(B, S), "sin": rand(1, S), "none": None, "deep": [rand(B, 2, S)]},
     {"cos": 0, "sin": WHOLE, "none": WHOLE, "deep": [0]}),
    (None, WHOLE),
    (torch.tensor(3.0), WHOLE),
    (3, WHOLE),
    (True, WHOLE),
    ("sdpa", WHOLE),
    (rand(B, 1, S, S), 0),
    (rand(1, 1, S, S), WHOLE),
]  # fmt: skip


@pytest.mark.parametrize(("value", "dims"), CUT_OR_WHOLE)
@pytest.mark.parametrize("named", [False, True])
def test_what_has_the_batchs_size_is_cut_and_the_rest_is_handed_on(value, dims, named):
    made = cut((hidden(),), {"value": value}, chunk_kwarg_names=["value"] if named else [])
    check_parts(made, value, dims)


@pytest.mark.parametrize(
    ("batch", "shape", "dim"),
    [(B, (B, S), 0), (B, (1, S), WHOLE), (B, (S,), WHOLE), (B, (3, B, S), 1), (3, (3, 3, S), 1), (B, (3, 1, S), WHOLE),
     (B, (4, B, S), 1)],
)  # fmt: skip
@pytest.mark.parametrize("names", [[], ["position_ids"]])
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_position_ids_have_their_batch_before_the_sequence(batch, shape, dim, names, batch_dim):
    x = hidden(batch) if batch_dim == 0 else rand(S, batch, H)
    ids = torch.randint(9, shape)
    made = cut((x,), {"position_ids": ids}, chunk_kwarg_names=names, batch_dim=batch_dim)
    check_parts(made, ids, dim, "position_ids")


def test_names_that_are_cut_and_names_that_are_not():
    square = rand(S, S)
    check_parts(cut((hidden(),), {"mask": square}), square, WHOLE, "mask")
    x, other = hidden(), rand(B, 3)
    call = ((x,), {"other": other})
    check_parts(cut(*call, chunk_infer=False), other, WHOLE, "other")
    check_parts(cut(*call, chunk_infer=False, chunk_kwarg_names=["other"]), other, 0, "other")
    check_parts(cut(*call, chunk_whole_names=["other"]), other, WHOLE, "other")
    positions = torch.arange(B)
    for settings in ({}, {"chunk_infer": False}):
        made = cut((x,), {"cache_position": positions}, **settings)
        check_parts(made, positions, WHOLE, "cache_position")
    # by position: the second and the fifth, which has no name
    args = (x, other, None, None, other)
    for indexs, cut_ones in (([0], []), ([0, 1], [1]), ([0, 4], [4])):
        made = cut(args, {}, chunk_infer=False, chunk_arg_indexs=indexs)
        parts = made.micro(1)[0]
        assert [i for i in (1, 4) if len(parts[i]) == 2] == cut_ones
        assert torch.equal(parts[0], x[2:4])


def test_hidden_states_by_keyword_behind_other_tensors():
    x, mask = hidden(), rand(1, 1, S, S)
    made = cut((), {"attention_mask": mask, "hidden_states": x})
    assert made.batch == B
    check_parts(made, x, 0, "hidden_states")
    check_parts(made, mask, WHOLE, "attention_mask")
    # without any name, the first tensor says how large the batch is
    assert cut((None, "text", rand(4, S)), {}, chunk_arg_indexs=[]).batch == 4
    assert cut((), {"m": mask, "x": x}, chunk_arg_indexs=[], chunk_kwarg_names=["x"]).batch == B


def test_no_tensor_with_a_batch():
    for args in ((), (None, 3), (torch.tensor(3.0),)):
        with pytest.raises(CannotCut, match=r"no argument is a tensor with a dimension 0 \(batch_dim\)"):
            cut(args, {})


def test_a_micro_chunk_of_hidden_states_owns_its_storage():
    for needs_grad in (False, True):
        x = hidden().requires_grad_(needs_grad)
        for batch_dim, whole in ((0, x), (1, x.transpose(0, 1)), (0, x[:, :1].expand(-1, S, -1))):
            made = cut((whole,), {}, batch_dim=batch_dim)
            parts = [made.micro(c)[0][0] for c in range(3)]
            for part, length in zip(parts, made.lengths):
                assert part.untyped_storage().nbytes() == length * S * H * 8
                assert part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            expected = parts[1].clone()
            parts[0].untyped_storage().resize_(0)
            assert torch.equal(parts[1], expected) and torch.equal(parts[1], whole.narrow(batch_dim, 2, 2))


REFUSED = [
    ({"cu_seqlens": torch.tensor([0, 4, 7])}, "cu_seqlens: samples packed into one row"),
    ({"cu_seq_lens_q": torch.tensor([0, 4, 7])}, "cu_seq_lens_q: samples packed"),
    ({"max_length_q": 7}, "max_length_q: samples packed"),
    ({"attention_mask": create_block_mask(lambda b, h, q, k: q >= k, B, None, 128, 128, device="cpu")},
     "attention_mask: samples packed"),
    ({"attention_mask": {"full": [type("BlockMask", (), {})()]}}, "attention_mask['full'][0]: samples packed"),
    ({"block_mask": torch.ones(B)}, "block_mask: samples packed"),
]  # fmt: skip


@pytest.mark.parametrize(("kwargs", "reason"), REFUSED)
def test_packed_samples_are_refused_where_there_is_something_to_cut(kwargs, reason):
    with pytest.raises(CannotCut) as error:
        cut((hidden(),), kwargs)
    assert str(error.value).startswith(reason) and "features.enable_chunk_mbs: false" in str(error.value)
    assert "\n" not in str(error.value)
    for batch, size in ((1, 1), (B, B)):
        made = cut((hidden(batch),), kwargs, chunk_mbs=size)
        assert made.micro(0)[1] == kwargs


def test_a_packed_argument_that_is_none_is_no_packed_argument():
    assert cut((hidden(),), {"cu_seqlens": None, "max_length_q": None}).lengths == (2, 2, 1)


def test_an_empty_cache_is_left_out_and_a_full_one_refused():
    cache = DynamicCache()
    made = cut((hidden(),), {"past_key_values": cache})
    assert all(made.micro(c)[1]["past_key_values"] is None for c in range(3))
    assert cut((hidden(1),), {"past_key_values": cache}).micro(0)[1]["past_key_values"] is cache
    cache.update(rand(B, 2, 3, 4), rand(B, 2, 3, 4), 0)
    with pytest.raises(CannotCut, match="past_key_values: a cache that holds keys and values.*use_cache to false"):
        cut((hidden(),), {"past_key_values": cache})


@pytest.mark.parametrize(
    ("args", "kwargs", "settings", "beginning"),
    [
        (
            (),
            {"mask": rand(4, S)},
            {"chunk_kwarg_names": ["mask"]},
            "mask: [4, 7]: dimension 0 must have the batch's 5",
        ),
        ((rand(7, S),), {}, {"chunk_arg_indexs": [0, 1]}, "position_embeddings: [7, 7]: dimension 0 must have"),
        (((rand(B, S), rand(4, S)),), {}, {"chunk_arg_indexs": [0, 1]}, "position_embeddings[1]: [4, 7]: dimension 0"),
        ((), {"position_ids": rand(3, 4, S)}, {"chunk_kwarg_names": ["position_ids"]}, "position_ids: [3, 4, 7]: dim"),
    ],
)
def test_a_named_argument_of_another_size_is_named_with_its_shape(args, kwargs, settings, beginning):
    with pytest.raises(CannotCut) as error:
        cut((hidden(), *args), kwargs, **settings)
    assert str(error.value).startswith(beginning) and "\n" not in str(error.value)


def test_batch_dim_at_the_sequence_is_an_error_that_says_what_to_set():
    with pytest.raises(CannotCut) as error:
        cut((hidden(),), {}, batch_dim=1, batch_sizes=(B, 2))
    assert str(error.value) == (
        "features.chunkmbs_plan.batch_dim: 1: hidden_states is [5, 7, 6], and a batch has 2 or 5 samples; set it to 0"
    )
    with pytest.raises(CannotCut, match="batch_dim: 0: .*set it to 1"):
        cut((rand(S, B, H),), {}, batch_sizes=(B,))
    # also where there would be one micro-chunk
    with pytest.raises(CannotCut, match="set it to 0"):
        cut((hidden(),), {}, batch_dim=1, batch_sizes=(B,), chunk_mbs=S)


def test_short_last_batches_and_sequence_first_are_fine():
    assert cut((hidden(3),), {}, batch_sizes=(B,)).lengths == (2, 1)
    assert cut((rand(S, 3, H),), {}, batch_sizes=(B,), batch_dim=1).lengths == (2, 1)
    assert cut((hidden(2),), {}, batch_sizes=(B, 2)).lengths == (2,)
    x = rand(S, B, H)
    made = cut((x,), {"mask": rand(S, B)}, batch_dim=1, batch_sizes=(B,))
    parts = [made.micro(c) for c in range(3)]
    assert torch.equal(torch.cat([args[0] for args, _ in parts], 1), x)
    assert [kwargs["mask"].shape[1] for _, kwargs in parts] == [2, 2, 1]


Named = namedtuple("Named", ["first", "second"])


def chunked(forward, size=2, **settings):
    return ChunkMBS(ChunkMBSConfig(chunk_mbs=size, **settings)).wrap("layers.3", forward, block)


OUTPUTS = [
    lambda x: x * 2,
    lambda x: (x * 2, None, x.sum(-1)),
    lambda x: {"a": x * 2, "b": [x.sum((1, 2)), None]},
    lambda x: Named(x * 2, x > 0.5),
    lambda x: BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x, x + 1)),
    lambda x: (x * 2).flatten(0, 1),
    lambda x: (x * 2, x.flatten(0, 1).argmax(-1)),
    lambda x: (x * 2, 3, "text", True),
    lambda x: (x, x),
    lambda x: x.transpose(1, 2),
    lambda x: x[:, :1].expand(-1, 4, -1),
    lambda x: None,
]


@pytest.mark.parametrize("forward", OUTPUTS)
@pytest.mark.parametrize(("batch", "size"), [(5, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_outputs_are_those_of_the_whole_batch_in_one_buffer_each(forward, batch, size, needs_grad):
    x = hidden(batch).requires_grad_(needs_grad)
    expected, out = forward(x), chunked(forward, size)(x)
    assert type(out) is type(expected)
    for mine, theirs in zip(tree_leaves(out), tree_leaves(expected), strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
    tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
    assert len({t.data_ptr() for t in tensors}) == len(tensors)
    wanted = [t.requires_grad for t in tree_leaves(expected) if isinstance(t, torch.Tensor)]
    assert [t.requires_grad for t in tensors] == wanted


def test_outputs_on_another_batch_dim():
    x = rand(S, B, H)
    out = chunked(lambda x: (x * 2, x.sum(-1)), batch_dim=1)(x)
    torch.testing.assert_close(out, (x * 2, x.sum(-1)), rtol=0, atol=0)


@dataclass
class Plain:
    value: torch.Tensor


def by_length(first, second):
    """A forward whose micro-chunks of 2 samples and of 1 differ in what they return."""
    return lambda x: first(x) if len(x) == 2 else second(x)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda x: x.sum(), r"an output of shape \[\] has no batch of 2 samples on dimension 0"),
        (lambda x: (x, x.new_zeros(3)), r"an output of shape \[3\] has no batch of 2 samples"),
        # counts of 4 experts: divisible, and no batch all the same
        (lambda x: (x, x.new_zeros(4)), r"an output of shape \[4\] has no batch of 2 samples"),
        (lambda x: (x, x.new_zeros(2 * H, 3)), r"an output of shape \[12, 3\] has no batch of 2 samples"),
        (by_length(lambda x: (x, None), lambda x: (x, x)), "differ: None and a tensor"),
        (by_length(lambda x: x, lambda x: (x,)), "a micro-chunk's output is "),
        (by_length(lambda x: {"a": x}, lambda x: {"b": x}), "a micro-chunk's output is "),
        (by_length(lambda x: (x, 3), lambda x: (x, 4)), "outputs of two micro-chunks differ: 3 and 4"),
        (by_length(lambda x: (x, x), lambda x: (x, 4)), "differ: a tensor and 4"),
        (lambda x: Plain(x), "outputs of two micro-chunks differ: Plain"),
        (lambda x: (x, SimpleNamespace(text="line\n" * 99, x=x)), "outputs of two micro-chunks differ: namespace"),
        # copied into place, these would be broadcast, or written over those of others
        (by_length(lambda x: x, lambda x: x[:, :1]), r"an output of shape \[1, 1, 6\] .*, expected \[1, 7, 6\]"),
        (by_length(lambda x: x.flatten(0, 1), lambda x: x[:, :3].flatten(0, 1)), r"an output of shape \[3, 6\]"),
        (by_length(lambda x: x, lambda x: x.float()), r"torch.float32"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused_with_the_blocks_name(forward, reason):
    with pytest.raises(CannotCut, match=rf"^ChunkMBS, layers\.3: .*{reason}") as error:
        chunked(forward)(hidden())
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_what_hooks_recorded_is_paired_up_call_by_call():
    first, second = [rand(2, 3), rand(4, 2)], [rand(1, 3), rand(2, 2)]
    paired = list(pair_up([first, second]))
    torch.testing.assert_close(paired, [torch.cat([a, b]) for a, b in zip(first, second)], rtol=0, atol=0)
    assert list(pair_up([])) == [] and list(pair_up([[], []])) == []
