"""Arguments whose rows are not the samples': refused by name whatever their number is by chance, or cut as they lie.

B samples, S tokens each, H hidden, n visual tokens in the whole batch.
"""

from collections import UserDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launcher import run_ranks
from mindspeed_chunk.config import ChunkMBSConfig
from mindspeed_chunk.mbs.arguments import CannotCut, Cutter
from mindspeed_chunk.mbs.block import ChunkMBS
from mindspeed_chunk.observe import observe

B, S, H = 4, 7, 6
# visual tokens of each sample: as many as there are samples, other numbers, one, none
COUNTS = [(2, 2, 0, 0), (4, 0, 0, 0), (1, 2, 1, 0), (2, 0, 1, 3), (0, 1, 0, 0), (0, 0, 0, 0)]


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


def visual(counts, depth=None):
    """The mask, and rows of visual tokens; a list of them for each of `depth` layers."""
    mask = torch.zeros(len(counts), S, dtype=torch.bool)
    for sample, count in enumerate(counts):
        mask[sample, :count] = True
    rows = [rand(sum(counts), H) for _ in range(depth or 1)]
    return {"visual_pos_masks": mask, "deepstack_visual_embeds": rows if depth else rows[0]}


class VisualBlock(nn.Module):
    """Adds rows of visual tokens at their places, as Qwen3-VL does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(H, H).double()

    def forward(self, hidden_states, visual_pos_masks=None, deepstack_visual_embeds=None, rows=None):
        hidden = hidden_states + self.linear(hidden_states).tanh()
        embeds = deepstack_visual_embeds if rows is None else rows
        for part in embeds if isinstance(embeds, list) else [embeds]:
            if part is not None:
                hidden = hidden.masked_scatter(visual_pos_masks[..., None], hidden[visual_pos_masks] + part)
        return hidden


def chunked(block, **settings):
    options = {key: settings.pop(key) for key in ("group", "batch_sizes") if key in settings}
    chunk = ChunkMBS(ChunkMBSConfig(**{"chunk_mbs": 1, **settings}), **options)
    block.forward = chunk.wrap("layers.0", block.forward, type(block).forward.__get__(block))
    return block


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("depth", [None, 2])
@pytest.mark.parametrize("settings", [{}, {"chunk_kwarg_names": ["deepstack_visual_embeds"]}, {"chunk_infer": False}])
def test_rows_of_visual_tokens_are_refused_by_name_however_many_there_are(counts, depth, settings):
    kwargs = visual(counts, depth)
    with pytest.raises(CannotCut) as error:
        chunked(VisualBlock(), **settings)(rand(B, S, H), **kwargs)
    name = "deepstack_visual_embeds[0]" if depth else "deepstack_visual_embeds"
    assert str(error.value).startswith(f"ChunkMBS, layers.0: {name}: rows of visual tokens cannot be cut")
    assert "\n" not in str(error.value) and "features.enable_chunk_mbs: false" in str(error.value)


def test_they_are_passed_where_one_micro_chunk_runs_and_none_of_them_is_no_reason():
    x, kwargs = rand(B, S, H), visual((2, 0, 1, 3))
    expected = VisualBlock()(x, **kwargs)
    assert torch.equal(chunked(VisualBlock(), chunk_mbs=B)(x, **kwargs), expected)
    for nothing in (None, []):
        kwargs["deepstack_visual_embeds"] = nothing
        torch.testing.assert_close(chunked(VisualBlock())(x, **kwargs), VisualBlock()(x, **kwargs))


@pytest.mark.parametrize("counts", COUNTS)
def test_rows_as_wide_as_the_hidden_states_need_a_name_of_the_users_under_any_name_of_the_models(counts):
    """The rule does not look at their number: with another batch it is another one."""
    told = visual(counts)
    kwargs = {"visual_pos_masks": told["visual_pos_masks"], "rows": told["deepstack_visual_embeds"]}
    with pytest.raises(
        CannotCut, match=rf"^ChunkMBS, layers.0: rows: \[{sum(counts)}, 6\]: it is not clear whether its"
    ):
        chunked(VisualBlock())(rand(B, S, H), **kwargs)


@pytest.mark.parametrize(
    "value", [torch.zeros(B, 3, dtype=torch.int64), rand(B), rand(B, 5), rand(B, 5, H), rand(B, H)]
)
def test_what_has_the_batchs_size_and_no_length_of_sequences_is_cut_only_by_name(value):
    def cut(**settings):
        def forward(hidden_states, other=None):
            return hidden_states

        return Cutter(ChunkMBSConfig(chunk_mbs=1, **settings), forward).cut((rand(B, S, H),), {"other": value})

    with pytest.raises(CannotCut, match="^other: .*name it in chunkmbs_plan.chunk_kwarg_names if they are, in chunk_w"):
        cut()
    assert torch.equal(cut(chunk_kwarg_names=["other"]).micro(2)[1]["other"], value[2:3])
    assert cut(chunk_whole_names=["other"]).micro(2)[1]["other"] is value
    assert cut(chunk_infer=False).micro(2)[1]["other"] is value


def on_ranks(rank, world_size, cases):
    told = []
    for case in cases:
        counts = case[rank]
        block = chunked(VisualBlock(), group=dist.group.WORLD)
        with observe() as events:
            try:
                block(rand(B, S, H), **({} if counts is None else visual(counts)))
                told.append(None)
            except CannotCut as error:
                told.append(str(error))
        assert sum(event.kind == "all_gather" for event in events) == 1
    return told


def test_a_rank_that_alone_has_visual_tokens_is_told_of_by_the_others():
    """One packed by chance as the batch, one not: every rank ends, whatever its own batch holds."""
    cases = [(one, other) for one in COUNTS[:4] for other in (COUNTS[3], None)] + [(None, None)]
    first, second = run_ranks(on_ranks, 2, cases)
    for (_, other), one, two in zip(cases[:-1], first, second):
        assert one.startswith("ChunkMBS, layers.0: deepstack_visual_embeds: rows of visual tokens cannot be cut")
        if other is None:
            assert "there are an error on rank 0, 4 on rank 1" in two
        else:
            assert two == one
    assert first[-1] is second[-1] is None


class ResidualBlock(nn.Module):
    """Mixes what blocks before it have left, a row a token, into its input; leaves its own. As Kimi-K3 does."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.score = nn.Linear(H, H).double(), nn.Linear(H, 1, bias=False).double()

    def forward(self, hidden_states, attention_mask=None, block_residual=None):
        flat_TH = hidden_states.view(-1, H)
        block_residual = torch.cat([block_residual, flat_TH[:, None]], 1)
        weights = self.score(block_residual).softmax(1)
        mixed = (weights * block_residual).sum(1).view_as(hidden_states)
        return hidden_states + self.linear(mixed.cumsum(1)).tanh(), block_residual


def run_residual(x, chunk_mbs, **settings):
    """Three blocks; output, what they left, and all gradients."""
    blocks = [ResidualBlock(seed) for seed in range(3)]
    if chunk_mbs:
        blocks = [chunked(block, chunk_mbs=chunk_mbs, **settings) for block in blocks]
    x = x.clone().requires_grad_()
    hidden, residual = x * 1, x.new_zeros(x.shape[:-1].numel(), 0, H)
    for block in blocks:
        hidden, residual = block(hidden, block_residual=residual)
    (hidden.square().sum() + (residual * torch.linspace(-1, 1, residual.numel()).view_as(residual)).sum()).backward()
    return [hidden.detach(), residual.detach(), x.grad, *(p.grad for block in blocks for p in block.parameters())]


@pytest.mark.parametrize("shape", [(B, S, H), (5, S, H), (3, 1, H), (B, B, H)])
@pytest.mark.parametrize("settings", [{}, {"chunk_infer": False}, {"chunk_kwarg_names": ["block_residual"]}])
def test_a_row_for_each_token_is_cut_by_the_tokens_of_a_sample(shape, settings):
    x = rand(*shape)
    for chunk_mbs in (1, 2, shape[0] - 1):
        torch.testing.assert_close(
            run_residual(x, chunk_mbs, **settings), run_residual(x, None), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("settings", [{"batch_dim": 1}, {}])
def test_rows_of_tokens_that_lie_otherwise_are_refused_by_name(settings):
    rows = B * S - (0 if settings else 1)
    with pytest.raises(CannotCut, match=rf"block_residual: \[{rows}, 2, 6\]: must have one row for each of the 28 tok"):
        chunked(ResidualBlock(0), **settings)(rand(B, S, H), block_residual=rand(rows, 2, H))


class PerTokenBlock(nn.Module):
    """Takes ids and a mask beside the hidden states, several streams wide. As Qwen4 does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.linear = nn.Embedding(9, 3 * H).double(), nn.Linear(3 * H, 3 * H).double()

    def forward(
        self, hidden_states, position_embeddings, attention_mask=None, conv_mask=None, cache=None, ple_input_ids=None
    ):
        hidden = hidden_states + self.embed(ple_input_ids) * position_embeddings[0].sum(-1, keepdim=True)
        if conv_mask is not None:
            hidden = hidden * conv_mask[..., None]
        return hidden + self.linear(hidden.cumsum(1)).tanh()


@pytest.mark.parametrize("padded", [True, False])
def test_ids_and_masks_of_tokens_are_cut_without_a_name(padded):
    x, ids = rand(B, S, 3 * H), torch.randint(9, (B, S))
    kwargs = {"conv_mask": torch.rand(B, S) > 0.3 if padded else None, "ple_input_ids": ids}
    embeddings = (rand(B, S, 2), rand(B, S, 2))
    expected = PerTokenBlock()(x, embeddings, **kwargs)
    for chunk_mbs in (1, 3):
        out = chunked(PerTokenBlock(), chunk_mbs=chunk_mbs)(x, embeddings, **kwargs)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def shares(hidden_states, shared_kv_states=None):
    """Writes what later blocks read, or reads it. As Gemma 4 does where its layers share keys."""
    if "full_attention" in shared_kv_states:
        return hidden_states + shared_kv_states["full_attention"]
    shared_kv_states["full_attention"] = hidden_states.square()
    return hidden_states


def test_what_a_block_left_for_later_ones_is_refused_where_it_is_read():
    """It would be that of the last micro-chunk for all of them."""
    chunk = ChunkMBS(ChunkMBSConfig(chunk_mbs=2))
    first, second = (chunk.wrap(f"layers.{number}", shares, shares) for number in range(2))
    kept = UserDict()
    hidden = first(rand(B, S, H), shared_kv_states=kept)
    with pytest.raises(
        CannotCut, match=r"^ChunkMBS, layers.1: shared_kv_states: UserDict with full_attention: a block would"
    ):
        second(hidden, shared_kv_states=kept)


def test_a_holder_that_nobody_writes_to_is_handed_on():
    def reads(hidden_states, table=None):
        return hidden_states * table.get("scale", 1)

    x = rand(B, S, H)
    assert torch.equal(ChunkMBS(ChunkMBSConfig()).wrap("layers.0", reads, reads)(x, table=UserDict()), x)
    chunk = ChunkMBS(ChunkMBSConfig(chunk_whole_names=["table"]))
    assert torch.equal(chunk.wrap("layers.0", reads, reads)(x, table=UserDict(scale=2)), 2 * x)
