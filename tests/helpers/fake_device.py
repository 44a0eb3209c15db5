"""A device on which order matters, played on CPU tensors: streams, events, pinned memory and a wire that are late.

What is queued on the main stream runs at once. A copy on another stream, or a collective, fills its target with NaN
(integers: -1) and delivers only when something waits for it.

Beside that, every access to memory is checked as a race detector does it for threads. The host, each stream and the
wire are lines of work, each with a clock; whoever waits joins the other's clock to its own. Two accesses to one storage
of which one writes must be in order by these clocks, or a real device might have run them the other way round. Freeing
counts as writing, by the stream that the memory was allocated on: its next kernel may get the memory.
"""

import threading
import weakref
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_chunk import device
from mindspeed_chunk.dist import _ALL_GATHER

# operations that take a tensor for its shape only
_SHAPE_ONLY = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")


class Race(AssertionError):
    """Two accesses that nothing puts in order, or memory freed too early."""


class Line:
    """Work that runs in order; also what torch.cuda calls a stream."""

    def __init__(self, world, name):
        self.world, self.name, self.clock, self.late = world, name, {}, []

    def tick(self):
        self.clock[self] = self.clock.get(self, 0) + 1

    def join(self, clock):
        """Run behind all that `clock` has seen."""
        for line, time in list(clock.items()):
            self.clock[line] = max(self.clock.get(line, 0), time)
            while line.late and line.late[0][0] <= time:
                line.late.pop(0)[1]()

    def wait_stream(self, other):
        self.join(other.clock)

    def wait_event(self, event):
        self.join(event.clock)

    def record_event(self):
        return Event(self.world, dict(self.clock))


class Event:
    """A point of a line's work; also the handle of a collective."""

    def __init__(self, world, clock):
        self.world, self.clock = world, clock

    def synchronize(self):
        self.world.host.join(self.clock)

    def wait(self):
        self.world.current_stream().join(self.clock)


class _Accesses:
    """Of one storage: the last write, and the reads since, by line."""

    def __init__(self, owner, pinned):
        self.owner, self.pinned = owner, pinned
        self.write = None
        self.reads = {}

    def add(self, line, *, write, what):
        others = {**self.reads} if write else {}
        if self.write is not None:
            others.setdefault(self.write[0], self.write)
            others[self.write[0]] = max(others[self.write[0]], self.write, key=lambda access: access[1])
        for other, time, earlier in others.values():
            if line.clock.get(other, 0) < time:
                kind = "writes to" if write else "reads"
                raise Race(f"{what} on {line.name} {kind} what {earlier} on {other.name} uses, without a wait for it")
        access = (line, line.clock.get(line, 0), what)
        if write:
            self.write, self.reads = access, {}
        else:
            self.reads[line] = access


class World(TorchDispatchMode):
    """The device. Its methods are those of torch.cuda that the code uses, and its lines are public."""

    def __init__(self):
        super().__init__()
        self.host, self.main, self.wire = (Line(self, name) for name in ("the host", "the main stream", "the wire"))
        self.freed_early = []
        self._thread = threading.local()  # as torch.cuda has it: every thread starts on the main stream
        self._accesses = weakref.WeakKeyDictionary()
        self._exchange, self._gather = dist.all_to_all_single, getattr(dist, _ALL_GATHER)

    def Stream(self, device):
        return Line(self, "a side stream")

    def current_stream(self, device=None):
        return getattr(self._thread, "stream", self.main)

    @contextmanager
    def stream(self, stream):
        before, self._thread.stream = self.current_stream(), stream
        yield
        self._thread.stream = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if _has_memory(leaf)]
        pinned = bool(kwargs.pop("pin_memory", False))
        line = self.current_stream()
        if not func.is_view and name not in _SHAPE_ONLY:
            line.join(self.host.clock)  # the host launches it after what it has seen
            line.tick()
            if line is not self.main and tensors:
                assert name == "copy_", f"{name} on a side stream: only copies are known there"
                if not all(tensor.is_contiguous() for tensor in tensors):
                    raise Race("a copy on a side stream of what is not contiguous: a device would wait for it")
                line.join(line.clock)  # what was queued before on this stream is done by then
                return self._late(line, name, args[0], args[1], args[1].clone())
            written = _written(func, args, kwargs)
            for tensor in tensors:
                self._access(tensor, line, write=id(tensor) in written, what=name)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if _has_memory(leaf) and leaf.untyped_storage() not in self._accesses:
                accesses = self._of(leaf, pinned)
                if not name.startswith("empty") and name not in _SHAPE_ONLY:
                    accesses.add(line, write=True, what=name)
        return result

    def _of(self, tensor, pinned=False):
        storage = tensor.untyped_storage()
        if storage not in self._accesses:
            accesses = self._accesses[storage] = _Accesses(self.current_stream(), pinned)
            weakref.finalize(storage, self._freed, accesses).atexit = False
        return self._accesses[storage]

    def _access(self, tensor, line, *, write, what):
        accesses = self._of(tensor)
        # who computes with pinned memory on the main stream is the host itself
        line = self.host if accesses.pinned and line is self.main else line
        accesses.add(line, write=write, what=what)

    def _freed(self, accesses):
        if accesses.pinned:
            return  # the allocator of pinned memory waits for the copies by itself
        owner = accesses.owner
        owner.join(self.host.clock)
        for line, time, what in [*accesses.reads.values(), *filter(None, [accesses.write])]:
            if owner.clock.get(line, 0) < time:
                self.freed_early.append(f"memory of {owner.name} is freed while {what} on {line.name} uses it")

    def _late(self, line, what, target, source, content):
        """`target` becomes `content` when somebody waits for `line`. Holds neither `target` nor `source`."""
        self._access(source, line, write=False, what=what)
        self._access(target, line, write=True, what=what)
        storage, place = weakref.ref(target.untyped_storage()), (target.storage_offset(), target.shape, target.stride())

        def write(values):
            memory = storage()
            if memory is not None:
                # a tensor of its own, with a version counter of its own
                torch.empty(0, dtype=target_dtype).set_(memory, *place).copy_(values)

        target_dtype = target.dtype
        with _unseen():
            write(torch.tensor(float("nan") if target.is_floating_point() else -1).to(target.dtype))

        def deliver():
            with _unseen():
                write(content)

        line.late.append((line.clock[line], deliver))
        return target

    def all_to_all_single(self, target, source, target_splits, source_splits, group, async_op):
        assert async_op
        arrived = torch.empty_like(target)
        with _unseen():  # a clone: threads of gloo let go of what they have sent only some time later
            self._exchange(arrived, source.clone(), target_splits, source_splits, group=group)
        return self._collective("an all-to-all", target, source, arrived)

    def all_gather(self, target, source, group, async_op):
        assert async_op
        arrived = torch.empty_like(target)
        with _unseen():
            self._gather(arrived, source.clone(), group=group)
        return self._collective("a gather", target, source, arrived)

    def _collective(self, name, target, source, arrived):
        self.wire.join(self.current_stream().clock)
        self.wire.join(self.host.clock)
        self.wire.tick()
        self._late(self.wire, name, target, source, arrived)
        return Event(self, dict(self.wire.clock))

    def check(self):
        """Raise for what is found out after the fact: memory freed too early, collectives never waited for."""
        if self.freed_early:
            raise Race("; ".join(sorted(set(self.freed_early))))
        if self.wire.late:
            raise Race(f"{len(self.wire.late)} collectives were never waited for")


@contextmanager
def fake_device():
    """CPU tensors are on a device with streams while this is active."""
    world = World()
    device._lane.cache_clear()
    try:
        with (
            mock.patch.object(device, "accelerator", lambda _: world),
            mock.patch.object(dist, "all_to_all_single", world.all_to_all_single),
            mock.patch.object(dist, _ALL_GATHER, world.all_gather),
            world,
        ):
            yield world
    finally:
        device._lane.cache_clear()


def _unseen():
    return torch.utils._python_dispatch._disable_current_modes()


def _has_memory(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and leaf.numel() > 0


def _written(func, args, kwargs):
    """The ids of the tensors that an operation writes to."""
    arguments = func._schema.arguments
    named = {argument.name: value for argument, value in zip(arguments, args)} | kwargs
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return {id(leaf) for name in written for leaf in tree_leaves(named.get(name))}
