"""The report's tables, as data: the terminal and the page show the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mindspeed_chunk.output import Table
from mindspeed_chunk.planner.numbers import billions, fixed

GB = 1e9
_SHOWN_GROUPS, _SHOWN_RANKS = 3, 8
_Report = dict[str, Any]
_Cell = Callable[[_Report], object]


def job_lines(job: _Report) -> tuple[str, ...]:
    """What the report is for, with which sizes, and what its times are."""
    lines = [
        f"{job['model']} on {job['nodes']} x {job['devices_per_node']} {job['device']}",
        f"{billions(job['parameters'])} parameters, {billions(job['active_parameters'])} per token; "
        f"{fixed(job['memory'] / GB, 0)} GB per device, of which {fixed(job['budget'] / GB, 1)} GB may be used; "
        f"{job['global_batch']} samples of {job['sequence']} tokens per step; {job['recipe']}",
    ]
    per_node = job["product_per_node"]
    if job["product"]:
        lines.append(f"The machine: {job['product']}, {per_node} devices per node.")
    if per_node and job["nodes"] > 1 and job["devices_per_node"] != per_node:
        lines.append(f"--devices-per-node {job['devices_per_node']} is another machine: its nodes have {per_node}.")
    return (*lines, "Times are at the device's peak rates, unless its file has measured ones: compare them.")


def given(estimate: _Report, budget: int) -> Iterator[Table]:
    """The estimate of a yaml as it is: its memory and its step, part by part."""
    name, busy = _busiest(estimate["links"])
    memory = [*estimate["memory"].items(), ("together", estimate["peak"]), ("may be used", budget)]
    seconds = [*estimate["seconds"].items(), ("together", estimate["step"]), (f"link {name}", busy)]
    yield Table("memory of a rank", ("part", "GB"), [(name, fixed(n / GB, 3)) for name, n in memory])
    yield Table("one step", ("part", "s"), [(name, fixed(n, 3)) for name, n in seconds])


def settings(recommendation: _Report) -> Table:
    fits, others = recommendation["fits"], recommendation["runners_up"]
    roles = ["recommended" if fits else "least memory, does not fit", *["runner-up"] * len(others)]
    estimates = [recommendation["best"] or recommendation["least_memory"], *others]
    return Table.of(
        "the recommended setting and the next ones" if fits else "least memory; it does not fit",
        [{"role": role, **each} for role, each in zip(roles, estimates)],
        ("", "role"),
        ("setting", "title"),
        ("GB", _gb("peak")),
        ("host GB", _gb("host")),
        ("step s", _seconds("step")),
        ("busiest link s", _busiest_link),
        wrapped=["setting"],
    )


def layouts(entries: list[_Report], *, wide: bool = False) -> Table:
    """Args:
    wide: also the kinds of groups that are inside a node; 80 columns are too narrow for them.
    """
    return Table.of(
        "layouts, each with its own best setting",
        entries,
        ("layout", _layout),
        ("role", "role"),
        ("batch, recompute, N, keep", lambda each: each.get("problem") or each["brief"]),
        ("GB", _gb("peak")),
        ("step s", _seconds("step")),
        *([("inside a node", _kinds(inside_node=True))] if wide else []),
        ("across nodes", _kinds(inside_node=False)),
        wrapped=("layout", "role", "batch, recompute, N, keep", "inside a node", "across nodes"),
    )


def chunks(entries: list[_Report], *, everything: bool) -> Iterator[Table]:
    """A table for each schedule and memory mode; without `everything`, for the first of them."""
    ways = list(dict.fromkeys((each["schedule"], each["keep"]) for each in entries))
    for schedule, keep in ways if everything else ways[:1]:
        yield Table.of(
            f"one MoE layer, EP={entries[0]['ep']}, {schedule}, keep {keep}",
            [each for each in entries if (each["schedule"], each["keep"]) == (schedule, keep)],
            ("N", "num_chunks"),
            ("expert rows", "rows_per_expert"),
            ("resident tokens", "resident_tokens"),
            *((f"{key} GB", _gb(key, 3)) for key in ("sent", "kept", "peak")),
            *((f"{key} ms", _shown(key, 1e-3, 2)) for key in ("forward", "backward", "exposed")),
        )


def details(report: _Report) -> Iterator[Table]:
    """What is behind the recommendation."""
    yield Table.of(
        "traffic of a rank in a step",
        [{**sent, "title": each["title"]} for each in report["layouts"][:3] for sent in each.get("traffic", ())],
        ("layout", _layout),
        *((key, key) for key in ("group", "kind", "ranks", "calls")),
        ("GB", _gb("nbytes", 2)),
        ("link s", _seconds("seconds")),
    )
    yield Table.of(
        "rank groups",
        [
            {"title": each["title"], "kind": kind, "groups": groups}
            for each in report["layouts"][:3]
            for kind, groups in each.get("groups", {}).items()
        ],
        ("layout", _layout),
        ("group", "kind"),
        ("ranks", lambda each: len(each["groups"][0])),
        ("groups", lambda each: len(each["groups"])),
        ("the first ones", lambda each: ", ".join(map(_ranks, each["groups"][:_SHOWN_GROUPS]))),
        wrapped=("layout", "the first ones"),
    )
    yield Table.of(
        "bytes per parameter",
        report["precision"],
        ("recipe", "name"),
        *((key, key) for key in ("weight", "master", "grad")),
        ("Adam", "moments"),
        *((key, key) for key in ("kept", "gathered")),
        ("rank GB", _gb("rank", 2)),
        ("runs here", lambda each: "yes" if each["possible"] else "no"),
        ("scaled loss", lambda each: "yes" if each["loss_scaling"] else ""),
    )
    yield Table.of(
        "gradient accumulation and ChunkMBS",
        report["batch"],
        ("samples as", "name"),
        ("gathers", "gathers"),
        ("GB", _gb("gathers_bytes")),
        ("reduce-scatters", "reduce_scatters"),
        ("GB", _gb("reduce_scatters_bytes")),
        ("peak GB", _gb("peak")),
        ("step s", _seconds("step")),
    )
    yield Table.of(
        "activations",
        report["activations"],
        ("policy", "policy"),
        ("kept GB", _gb("kept", 2)),
        ("at work GB", _gb("working", 2)),
        ("host GB", _gb("host", 2)),
        ("forward work again", lambda each: f"{each['again']:.0%}"),
    )
    yield Table.of(
        "context parallel",
        report["sequence"],
        ("way", "context"),
        ("ranks", "ranks"),
        ("tokens per rank", "tokens"),
        ("calls per sample", lambda each: sum(sent["calls"] for sent in each["traffic"])),
        ("GB per sample", lambda each: fixed(sum(sent["nbytes"] for sent in each["traffic"]) / GB, 2)),
        ("limit", lambda each: each["problem"] or ""),
        wrapped=["limit"],
    )


def _shown(key: str, unit: float, digits: int) -> _Cell:
    """Nothing for a layout that has a problem, and so no numbers."""
    return lambda each: fixed(each[key] / unit, digits) if key in each else ""


def _gb(key: str, digits: int = 1) -> _Cell:
    return _shown(key, GB, digits)


def _seconds(key: str) -> _Cell:
    return _shown(key, 1, 3)


def _ranks(group: list[int]) -> str:
    """Such as `0-7` or `(0 8 16 24)`."""
    if len(group) > 1 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    shown = " ".join(map(str, group[:_SHOWN_RANKS]))
    return f"({shown} ...)" if len(group) > _SHOWN_RANKS else f"({shown})"


def _busiest(links: dict[str, float]) -> tuple[str, float]:
    return max(links.items(), key=lambda link: link[1])


def _busiest_link(each: _Report) -> str:
    name, seconds = _busiest(each["links"])
    return f"{fixed(seconds, 3)} {name}"


def _layout(each: _Report) -> str:
    return each["title"].split(",")[0]


def _kinds(*, inside_node: bool) -> _Cell:
    return lambda each: " ".join(kind for kind, here in each.get("inside_node", {}).items() if here is inside_node)
