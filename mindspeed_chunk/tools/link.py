"""Two "hosts" on one machine: network namespaces joined by a link of a chosen rate.

On a CPU this is the way to see communication hidden behind computation: the wire takes time, the processor is free.
Needs root, `ip` and `tc` (Debian's iproute2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_BURST = "1mb"
_LATENCY = "100ms"


class LinkError(RuntimeError):
    """The link cannot be had on this machine; the message says why."""


@contextmanager
def limited_link(rate: str) -> Iterator[list[tuple[list[str], dict[str, str]]]]:
    """Two namespaces and a link between them while the block runs.

    Args:
        rate: what `tc` takes, such as "1gbit".

    Yields:
        For each of the two ranks, the words to put before its command, and its additions to the environment.

    Raises:
        LinkError: without root, `ip` or `tc`, or where the kernel refuses.
    """
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise LinkError("--link needs root, ip and tc (Debian package iproute2); without it the link is not limited")
    tag = f"mc{os.getpid()}"
    names = [f"{tag}a", f"{tag}b"]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "link", "add", f"{names[0]}v", "type", "veth", "peer", "name", f"{names[1]}v")
        for number, name in enumerate(names, start=1):
            _run("ip", "link", "set", f"{name}v", "netns", name)
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"{name}v")
            _run("ip", "-n", name, "link", "set", f"{name}v", "up")
            # a token bucket, not netem, which not every kernel has
            shape = ("root", "tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY)
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", f"{name}v", *shape)
        yield [
            (["ip", "netns", "exec", name], {"GLOO_SOCKET_IFNAME": f"{name}v", "MASTER_ADDR": "10.77.0.1"})
            for name in names
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"--link: `{' '.join(command)}` failed: {done.stderr.strip()}")
