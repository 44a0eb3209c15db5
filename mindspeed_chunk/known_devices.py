"""The device table: known devices and machines, each number with its public source.

Rates are peak rates; a link's rate is that of one device in one direction.
"""

from __future__ import annotations

import dataclasses

from mindspeed_chunk.hardware import Device, Link

GIGA, TERA = 10**9, 10**12

_CLOUDMATRIX = "Serving Large Language Models on Huawei CloudMatrix384, arXiv:2506.12708, section 3"
_DIE = "one die, which is what a rank drives; a package has two of everything: 752 TFLOPS, 128 GB, 392 GB/s, 400 Gbit/s"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet (SXM): 80 GB, 3.35 TB/s, 1979 and 3958 TFLOPS with sparsity"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet (SXM): 141 GB, 4.8 TB/s, 1979 and 3958 TFLOPS with sparsity"
_NVLINK = "NVIDIA H100 and H200 data sheets: NVLink 900 GB/s, which is both directions together"
_CONNECTX = "NVIDIA DGX H100/H200 data sheet: eight ConnectX-7 of 400 Gbit/s for eight GPUs"
_DENSE = "NVIDIA H100 data sheet's footnote: dense rates are half of those with sparsity"


def _hopper(name: str, memory: int, memory_rate: float, source: str) -> Device:
    return Device(
        name=name,
        memory=memory * GIGA,
        flops={"bf16": 989.5 * TERA, "fp8": 1979 * TERA},
        memory_rate=memory_rate * TERA,
        intra=Link(rate=450 * GIGA),
        inter=Link(rate=50 * GIGA),
        product=f"NVIDIA DGX {name.upper()}",
        per_node=8,
        sources=(source, _DENSE, _NVLINK, _CONNECTX),
    )


# 1.6 TB/s per die: its four memory stacks. Inside a node the UB plane, between nodes the RDMA plane.
_ASCEND_910C = Device(
    name="ascend-910c",
    memory=64 * GIGA,
    flops={"bf16": 376 * TERA},
    memory_rate=1.6 * TERA,
    intra=Link(rate=196 * GIGA),
    inter=Link(rate=25 * GIGA),
    product="nodes of Ascend 910C, connected by RDMA alone",
    per_node=16,
    sources=(_CLOUDMATRIX, _DIE, "no fp8: its 8-bit matrix format is int8 (same paper)"),
)
DEVICES: dict[str, Device] = {
    "ascend-910c": _ASCEND_910C,
    # all nodes are in one supernode, which the UB plane connects at the same rate as inside a node (same paper)
    "ascend-910c-supernode": dataclasses.replace(
        _ASCEND_910C, name="ascend-910c-supernode", inter=_ASCEND_910C.intra, product="Atlas 900 A3 SuperPoD"
    ),
    "h100": _hopper("h100", 80, 3.35, _H100),
    "h200": _hopper("h200", 141, 4.8, _H200),
}
# other names under which users know them
ALIASES = {
    "910c": "ascend-910c",
    "ascend910_93": "ascend-910c",
    "a3": "ascend-910c-supernode",
    "atlas-a3": "ascend-910c-supernode",
    "atlas-900-a3": "ascend-910c-supernode",
}
