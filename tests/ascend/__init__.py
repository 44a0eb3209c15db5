"""The NPU back end on CPU tensors, against the real torch_npu wheel.

`wheel` makes the wheel importable where there is no CANN, `kernels` does on a CPU what the documentation says that each
op does, and refuses what it says that the op refuses, `rig` puts the two together in a process. The wheel checks the
arguments of every call against its schemas, and the shapes against its meta kernels.
"""
