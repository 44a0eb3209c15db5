"""A device for commands, played on CPU tensors in a whole process: its module in torch, its kernels, its profiler.

Its streams do everything at once, its allocator counts storages, and the trace of its profiler has a kernel for each
operation, connected as the profilers of torch and torch_npu do it. `environment` makes all processes of a command play.
"""

import contextlib
import functools
import itertools
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import torch

VARIABLE = "PLAYED_DEVICE"
HELPERS = Path(__file__).parent
CYCLES_PER_S = 1e10
COMPUTE, WIRE = 7, 20  # streams of kernels
ON_WIRE = "played: on a side stream"


def environment(kind, devices, wheel_folder=""):
    """For a command that must find that many devices; with kind "npu" the back end runs the wheel's ops."""
    path = os.pathsep.join(map(str, [HELPERS / "played", HELPERS, HELPERS.parent]))
    return {**os.environ, "PYTHONPATH": path, VARIABLE: f"{kind}|{devices}|{wheel_folder}"}


class Stream:
    def wait_stream(self, other):
        assert isinstance(other, Stream)

    def wait_event(self, event):
        assert isinstance(event, Event)

    def record_event(self):
        return Event()


class Event:
    def synchronize(self):
        pass


class Module:
    """What torch.cuda and torch.npu have, as far as the package uses it."""

    def __init__(self, kind, devices):
        from mindspeed_chunk.tools.measure import LiveBytes

        self.kind, self.devices, self.main, self.device = kind, devices, Stream(), None
        self.live = LiveBytes()
        self.live.__enter__()

    def device_count(self):
        return self.devices

    def set_device(self, number):
        assert 0 <= number < self.devices
        self.device = number

    def current_device(self):
        return self.device or 0

    def get_device_name(self):
        return f"played {self.kind}"

    def get_device_properties(self, number):
        return SimpleNamespace(total_memory=2**34)

    def synchronize(self, device=None):
        pass

    def Stream(self, device):
        return Stream()

    def current_stream(self, device=None):
        return self.main

    @contextlib.contextmanager
    def stream(self, stream):
        with torch.profiler.record_function(ON_WIRE):
            yield

    def _sleep(self, cycles):
        time.sleep(cycles / CYCLES_PER_S)

    def memory_allocated(self, device):
        return self.live.now

    def max_memory_allocated(self, device):
        return self.live.peak

    def reset_peak_memory_stats(self, device):
        self.live.peak = self.live.now

    def set_sync_debug_mode(self, mode):
        assert mode in ("default", "error")

    def get_rng_state(self, device):
        return torch.get_rng_state()

    def set_rng_state(self, state, device):
        torch.set_rng_state(state)


def install():
    """Play the device that the environment names, to the end of this process."""
    kind, devices, folder = os.environ[VARIABLE].split("|")
    from mindspeed_chunk import device, ops
    from mindspeed_chunk.tools import devices as seam

    if kind == "npu":
        from ascend import rig

        back_end = rig.install(Path(folder))
        _play_npu_profiler()
    else:
        import cuda_on_cpu
        from mindspeed_chunk.ops import cuda as back_end

        cuda_on_cpu.cuda_ops().__enter__()
        torch.profiler.profile = CudaProfile
    module = Module(kind, int(devices))
    empty = torch.empty
    torch.empty = functools.wraps(empty)(lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    device.accelerator = lambda place: module
    ops.resolve = lambda name, place: back_end
    seam._module, seam.here = lambda kind: module, lambda kind: torch.device("cpu")
    seam.COLLECTIVES[kind] = "gloo"


_Profile = torch.profiler.profile


class CudaProfile(_Profile):
    def __init__(self, activities):
        assert activities == [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        super().__init__(activities=activities[:1])

    def export_chrome_trace(self, path):
        super().export_chrome_trace(path)
        content = json.loads(Path(path).read_text())
        for number, (op, kernel) in enumerate(kernels(content["traceEvents"])):
            arrow = {"id": number, "cat": "ac2g", "name": "ac2g"}
            content["traceEvents"] += [{**kernel, "cat": "kernel"}, {**_place(op), **arrow, "ph": "s"}]
            content["traceEvents"].append({**_place(kernel), **arrow, "ph": "f", "bp": "e"})
        Path(path).write_text(json.dumps(content))


def _place(event):
    return {name: event[name] for name in ("pid", "tid", "ts")}


def _play_npu_profiler():
    """torch_npu's profiler writes to the folder of its handler; its own code makes the events."""
    from torch_npu import profiler
    from torch_npu.profiler.analysis.prof_common_func._trace_event_manager import TraceEventManager as Events

    @contextlib.contextmanager
    def profile(activities, on_trace_ready, experimental_config):
        assert activities == [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
        assert isinstance(experimental_config, profiler._ExperimentalConfig)
        out = on_trace_ready / "host_1_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
        out.mkdir(parents=True)
        with _Profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
            yield
        recorded.export_chrome_trace(str(out / "draft.json"))
        found, draft = [], json.loads((out / "draft.json").read_text())["traceEvents"]
        for each in draft:
            if each.get("cat") in ("cpu_op", "user_annotation"):
                found.append(Events.create_x_event(_in_ns(each), "cpu_op"))
        for op, kernel in kernels(draft):
            found.append(Events.create_x_event(_in_ns(kernel), "kernel"))
            found += Events.create_torch_to_npu_flow(_in_ns(op), _in_ns(kernel))
        (out / "trace_view.json").write_text(json.dumps(found))

    profiler.profile, profiler.tensorboard_trace_handler = profile, Path


def _in_ns(event):
    times = {name: round(1e3 * event[name]) for name in ("ts", "dur")}
    return SimpleNamespace(name=event["name"], pid=event["pid"], tid=event["tid"], args={}, **times)


def kernels(events):
    """(operation, its kernel) for every operation that calls no other: its time again, on the stream that it is for."""
    ops = [each for each in events if each.get("ph") == "X" and each.get("cat") == "cpu_op"]
    side = [each for each in events if each.get("name") == ON_WIRE and each["ph"] == "X"]
    busy_until = {}
    for op, following in itertools.zip_longest(ops := sorted(ops, key=lambda op: op["ts"]), ops[1:]):
        exchange = op["name"].startswith("c10d::alltoall")
        if not exchange and following is not None and following["ts"] < op["ts"] + op["dur"]:
            continue
        aside = any(each["ts"] <= op["ts"] <= each["ts"] + each["dur"] for each in side)
        stream = WIRE if exchange or aside else COMPUTE
        start = max(op["ts"] + 1, busy_until.get(stream, 0))
        busy_until[stream] = start + op["dur"] + 1
        yield op, {"ph": "X", "name": op["name"], "pid": 0, "tid": stream, "ts": start, "dur": op["dur"], "args": {}}
