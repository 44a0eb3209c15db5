"""The rows that MindSpeed-MM's allgather has noted, where it runs in micro-chunks."""

import dataclasses
import types

from mindspeed_chunk.patches import row_counts
from mindspeed_chunk.patches.record import APPLIED, DRIFTED


def counting_module():
    """The host's `comm`, as far as the patch goes: it tells what it takes for the ranks' rows."""
    module = types.ModuleType("comm")
    module.EP_RANK_SEQ_LENS = None
    module._gather_along_first_dim = lambda local_tokens, ep_group, async_op=False: module.EP_RANK_SEQ_LENS
    module._reduce_scatter_along_first_dim = lambda full_tokens, ep_group, async_op=False: module.EP_RANK_SEQ_LENS
    return module


def test_rows_that_the_host_has_noted_follow_the_micro_chunk(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 1)
    module, patch = counting_module(), dataclasses.replace(row_counts.PATCH)
    before = dict(vars(module))
    patch.on_import(module)
    assert patch.state == APPLIED and dict(vars(module)) == before, "nobody has asked for it yet"
    row_counts.activate()
    row_counts.activate()
    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim
    assert gather([0] * 5, "group") is None
    module.EP_RANK_SEQ_LENS = [6, 10]
    assert gather([0] * 5, "group") == scatter([0] * 8, "group") == [3, 5]
    assert gather([0] * 20, "group") == scatter([0] * 32, "group", False) == [12, 20]
    assert gather([0] * 10, "group") == module.EP_RANK_SEQ_LENS == [6, 10]
    assert gather.__wrapped__ is before["_gather_along_first_dim"]
    patch.remove()
    assert dict(vars(module)) == before | {"EP_RANK_SEQ_LENS": [6, 10]}


def test_drifted_row_counts():
    module, patch = counting_module(), dataclasses.replace(row_counts.PATCH)
    module._gather_along_first_dim = lambda local_tokens, counts: None
    patch.on_import(module)
    assert patch.state == DRIFTED and "found _gather_along_first_dim(local_tokens, counts)" in str(patch)
