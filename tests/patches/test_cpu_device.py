"""What MindSpeed-MM lacks on a CPU: given only when asked for, in torch's own terms elsewhere, and taken back whole."""

import dataclasses
import sys
import types

import pytest
import torch
import torch.distributed as dist

from mindspeed_chunk import patches
from mindspeed_chunk.patches import settings
from mindspeed_chunk.patches.on_cpu import device
from mindspeed_chunk.patches.record import APPLIED, DRIFTED

HELPERS = (
    "create_stream",
    "create_event",
    "get_current_stream",
    "switch_to_specified_stream",
    "get_dist_comm_backend",
    "empty_cache",
    "reset_peak_memory_stats",
)
TORCH = ((torch, "histc"), (torch, "accelerator"), (dist, "all_gather_into_tensor"), (dist, "init_process_group"))


def host_device():
    """The host's device module, as far as the patch looks at it."""
    module = types.ModuleType("device")
    module.IS_CUDA_AVAILABLE, module.IS_NPU_AVAILABLE = True, True
    for name in HELPERS:
        setattr(module, name, lambda *args, **kwargs: pytest.fail("asks for an accelerator"))

    def set_accelerator_compatible(fallback_module=None):
        torch.accelerator = sys.modules["torch.accelerator"] = types.ModuleType("torch.accelerator")

    module.set_accelerator_compatible = set_accelerator_compatible
    return module


@pytest.fixture
def patch():
    patch = dataclasses.replace(device.PATCHES[0])
    yield patch
    patch.remove()


@pytest.mark.parametrize("value, warnings", [(None, 0), ("", 0), ("gpu", 1), ("cpu", 0)])
def test_nothing_is_imported_or_touched_unless_asked_for(monkeypatch, caplog, value, warnings):
    monkeypatch.delenv(settings.DEVICE, raising=False)
    if value is not None:
        monkeypatch.setenv(settings.DEVICE, value)
    monkeypatch.delitem(sys.modules, device.__name__)
    monkeypatch.setattr(patches, "_hooks", object())  # as after `install`
    monkeypatch.setattr(patches, "_checked", met := [])
    patches._warn.cache_clear()
    module = host_device()
    before = dict(vars(module)), [getattr(*where) for where in TORCH]
    patches._on_import(device.PATCHES[0].module, module)
    asked = value == "cpu"
    assert [patch.state for patch in met] == [APPLIED] * asked
    assert (device.__name__ in sys.modules) == asked
    assert ((dict(vars(module)), [getattr(*where) for where in TORCH]) == before) == (not asked)
    assert sum(settings.DEVICE in record.getMessage() for record in caplog.records) == warnings
    for patch in met:
        patch.remove()


def test_everything_is_taken_back(patch):
    module = host_device()
    before = dict(vars(module)), [getattr(*where) for where in TORCH], sys.modules["torch.accelerator"]
    patch.on_import(module)
    assert patch.state == APPLIED
    module.set_accelerator_compatible()
    assert all(getattr(*where) is not old for where, old in zip(TORCH, before[1]))
    patch.remove()
    assert (dict(vars(module)), [getattr(*where) for where in TORCH], sys.modules["torch.accelerator"]) == before


def test_a_module_without_the_helpers_is_named_and_left_alone(patch):
    module = host_device()
    del module.create_event
    before = dict(vars(module)), [getattr(*where) for where in TORCH]
    patch.on_import(module)
    assert patch.state == DRIFTED and "create_event" in patch.detail
    assert (dict(vars(module)), [getattr(*where) for where in TORCH]) == before


def test_helpers_of_the_host(patch):
    module = host_device()
    patch.on_import(module)
    assert not module.IS_NPU_AVAILABLE and not module.IS_CUDA_AVAILABLE
    assert module.get_dist_comm_backend() == module.get_dist_comm_backend(cpu=True) == "gloo"
    stream, event = module.create_stream(priority=1), module.create_event(enable_timing=True)
    with module.switch_to_specified_stream(stream):
        event.record()
        stream.wait_event(event)
        stream.wait_stream(module.get_current_stream())
    module.set_accelerator_compatible()
    torch.accelerator.set_device_index(3)
    assert torch.empty(1, device=torch.accelerator.current_device_index()).device.type == "cpu"


def test_counts_of_integers(patch):
    values = torch.rand(50)
    by_torch = torch.histc(values, bins=10, min=0, max=1)
    patch.on_import(host_device())
    counts = torch.histc(torch.tensor([[5, 0, 1], [5, 5, 1]]), bins=7, min=0, max=7)
    assert counts.tolist() == [1, 2, 0, 0, 0, 3, 0]
    assert torch.equal(torch.histc(values, bins=10, min=0, max=1), by_torch)
    with pytest.raises(RuntimeError):
        torch.histc(torch.tensor([1, 2]), bins=7, min=1, max=7)


def test_gather_into_rows(patch, monkeypatch):
    def gather(output, input, group=None, async_op=False):
        assert output.dim() == input.dim() == 1
        output.copy_(input.repeat(2))

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    patch.on_import(host_device())
    rows = torch.zeros(2, 3, dtype=torch.int64)
    dist.all_gather_into_tensor(rows, torch.tensor([1, 2, 3]))
    assert rows.tolist() == [[1, 2, 3], [1, 2, 3]]
    patch.remove()  # before monkeypatch takes back its own


def test_host_buffers_are_not_pinned():
    patch = dataclasses.replace(device.PATCHES[1])
    module = types.ModuleType("async_offload")
    module.torch = torch
    patch.on_import(module)
    assert module.torch.empty(2, 3, dtype=torch.int32, pin_memory=True, device="cpu").shape == (2, 3)
    assert module.torch.nn is torch.nn
    patch.remove()
    assert module.torch is torch
