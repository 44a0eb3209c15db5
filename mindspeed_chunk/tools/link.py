"""Several "hosts" on one machine: one network namespace per rank, joined by links of a chosen rate.

On a CPU this shows communication hidden behind computation: the link needs time, and the processor is free. Two
namespaces are joined directly, more of them by a bridge. Every namespace sends, and with a bridge also receives, at the
chosen rate. Needs root, `ip` and `tc` (Debian's iproute2).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mindspeed_chunk.config import ConfigError

# which ends of links the ranks can limit: "namespace/device,..."
ENDS = "MINDSPEED_CHUNK_LINK_ENDS"
_BURST = "1mb"
_LATENCY = "100ms"
# tc's words: bits in powers of 1000
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}


class LinkError(ConfigError):
    """The link cannot be made on this machine; the message says why."""


@contextmanager
def limited_link(rate: str, ranks: int = 2) -> Iterator[list[tuple[list[str], dict[str, str]]]]:
    """One namespace per rank, and links between them, while the block runs.

    Args:
        rate: in the units of `tc`, such as "1gbit".

    Yields:
        For each rank, the words to put before its command, and its additions to the environment.

    Raises:
        LinkError: without root, `ip` or `tc`, or if the kernel refuses.
    """
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise LinkError("--link needs root, ip and tc (Debian package iproute2); without it the link is not limited")
    bits_per_second(rate)
    _sweep()
    tag = f"mc{os.getpid()}"
    names = [f"{tag}n{rank}" for rank in range(ranks)]
    hub = f"{tag}hub"
    try:
        ends = _join_two(names) if ranks == 2 else _join_many(names, hub)
        for number, name in enumerate(names, start=1):
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"{name}v")
            _run("ip", "-n", name, "link", "set", f"{name}v", "up")
        _limit(ends, rate)
        shared = {"MASTER_ADDR": "10.77.0.1", ENDS: ",".join("/".join(end) for end in ends)}
        yield [(["ip", "netns", "exec", name], {"GLOO_SOCKET_IFNAME": f"{name}v", **shared}) for name in names]
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def set_rate(rate: str | None) -> None:
    """Change the rate of all links, or remove the limit. Called on one of the ranks that `limited_link` started."""
    _limit([tuple(end.split("/")) for end in os.environ[ENDS].split(",")], rate)


def bits_per_second(rate: str) -> float:
    """The value of a rate in the units of `tc`.

    Raises:
        LinkError: naming the units.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?bit)", rate.lower())
    if match is None:
        raise LinkError(f"--link {rate}: must be a number and one of {', '.join(_UNITS)}, such as 1gbit")
    return float(match[1]) * _UNITS[match[2]]


def _sweep() -> None:
    """Delete the namespaces of killed processes, which could not; one may have had this process's number."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name, process in re.findall(r"^(mc(\d+)(?:n\d+|hub))\b", listed, re.MULTILINE):
        if int(process) == os.getpid() or not os.path.exists(f"/proc/{process}"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _join_two(names: list[str]) -> list[tuple[str, str]]:
    for name in names:
        _run("ip", "netns", "add", name)
    ends = [(name, f"{name}v") for name in names]
    _add_link(*ends)
    return ends


def _join_many(names: list[str], hub: str) -> list[tuple[str, str]]:
    """The bridge is in a separate namespace; its ports limit what a rank receives."""
    _run("ip", "netns", "add", hub)
    _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", hub, "link", "set", "bridge", "up")
    ends = []
    for name in names:
        _run("ip", "netns", "add", name)
        pair = [(name, f"{name}v"), (hub, f"{name}p")]
        _add_link(*pair)
        _run("ip", "-n", hub, "link", "set", f"{name}p", "master", "bridge", "up")
        ends += pair
    return ends


def _add_link(one: tuple[str, str], other: tuple[str, str]) -> None:
    """Both ends are made inside their namespaces and deleted with them, so none can be left over on the machine."""
    (here, device), (there, peer) = one, other
    _run("ip", "link", "add", device, "netns", here, "type", "veth", "peer", "name", peer, "netns", there)


def _limit(ends: Sequence[tuple[str, ...]], rate: str | None) -> None:
    for name, device in ends:
        if rate is None:
            _run("tc", "-n", name, "qdisc", "del", "dev", device, "root")
        else:
            # a token bucket, not netem, which not every kernel has
            shape = ("tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY)
            _run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *shape)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"--link: `{' '.join(command)}` failed: {done.stderr.strip()}")
