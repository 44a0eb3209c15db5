"""The plan's report on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mindspeed_chunk.planner.numbers import billions, fixed

GB = 1e9


def print_report(report: dict[str, Any], console: Console, *, everything: bool) -> None:
    """The recommendation, its reasons and yaml; with `everything` all tables."""
    _print_job(report["job"], console)
    recommendation = report["recommendation"]
    heading = "recommended" if recommendation["fits"] else "least memory, does not fit"
    settings = [recommendation["best"] or recommendation["least_memory"], *recommendation["runners_up"]]
    console.print(_settings([heading, *["runner-up"] * len(recommendation["runners_up"])], settings))
    for sentence in recommendation["why"]:
        console.print(f"- {sentence}", highlight=False)
    console.print(_layouts(report["layouts"]))
    for table in _chunks(report["chunks"], everything):
        console.print(table)
    if everything:
        console.print(_traffic(report["layouts"][:3]))
        for make in (_precision, _batch, _activations, _sequence):
            key = make.__name__.removeprefix("_")
            console.print(make(report[key]))
    if report["yaml"]:
        console.print("\nfor the yaml of MindSpeed-MM:\n", highlight=False)
        console.print(report["yaml"], highlight=False, soft_wrap=True)


def _print_job(job: dict[str, Any], console: Console) -> None:
    console.print(
        f"{job['model']}: {billions(job['parameters'])} parameters, {billions(job['active_parameters'])} a token; "
        f"{job['nodes']} x {job['devices_per_node']} {job['device']} of {fixed(job['memory'] / GB, 0)} GB; "
        f"{job['global_batch']} samples of {job['sequence']} tokens a step, {job['recipe']}",
        highlight=False,
    )
    console.print(
        "Times are at the device's peak rates, unless its file has measured ones: compare them.", highlight=False
    )


def _table(title: str, columns: Iterable[str], wrapped: Iterable[str] = ()) -> Table:
    """A table that fits on 80 columns: headings have a line a word, and only the `wrapped` columns may be narrowed."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
    )
    for number, column in enumerate(columns):
        wraps = column in wrapped
        heading = column if wraps else column.replace(" ", "\n")
        table.add_column(heading, justify="right" if number and not wraps else "left", no_wrap=not wraps)
    return table


def _settings(names: list[str], settings: list[dict[str, Any]]) -> Table:
    table = _table("settings", ("", "setting", "GB", "host GB", "step s"), wrapped=["setting"])
    for name, each in zip(names, settings):
        table.add_row(
            name, each["title"], fixed(each["peak"] / GB, 1), fixed(each["host"] / GB, 1), fixed(each["step"], 3)
        )
    return table


def _layouts(found: list[dict[str, Any]]) -> Table:
    wrapped = ("layout", "role", "batch, recompute, N, keep", "across nodes")
    columns = (*wrapped[:3], "GB", "step s", wrapped[3])
    table = _table("layouts, each with its own best setting", columns, wrapped)
    for each in found:
        layout = each["title"].split(",")[0]
        if "problem" in each:
            table.add_row(layout, each["role"], each["problem"], "", "", "")
            continue
        across = " ".join(kind for kind, inside in each["inside_node"].items() if not inside)
        table.add_row(layout, each["role"], each["brief"], fixed(each["peak"] / GB, 1), fixed(each["step"], 3), across)
    return table


def _traffic(found: list[dict[str, Any]]) -> Table:
    columns = ("layout", "group", "kind", "ranks", "calls", "GB", "link s")
    table = _table("traffic of a rank in a step", columns)
    for each in found:
        for sent in each.get("traffic", ()):
            sizes = (str(sent["ranks"]), str(sent["calls"]), fixed(sent["nbytes"] / GB, 2), fixed(sent["seconds"], 3))
            table.add_row(each["title"].split(",")[0], sent["group"], sent["kind"], *sizes)
    return table


def _chunks(found: list[dict[str, Any]], everything: bool) -> Iterator[Table]:
    """A table for each schedule and memory mode; without `everything`, for the first of them."""
    ways = list(dict.fromkeys((each["schedule"], each["keep"]) for each in found))
    columns = ["N", "expert rows", "resident tokens", "sent GB", "kept GB", "peak GB"]
    columns += ["forward ms", "backward ms", "exposed ms"]
    for schedule, keep in ways if everything else ways[:1]:
        table = _table(f"one MoE layer, EP={found[0]['ep']}, {schedule}, keep {keep}", columns)
        for each in found:
            if (each["schedule"], each["keep"]) == (schedule, keep):
                table.add_row(
                    str(each["num_chunks"]),
                    str(each["rows_per_expert"]),
                    str(each["resident_tokens"]),
                    *(fixed(each[key] / GB, 3) for key in ("sent", "kept", "peak")),
                    *(fixed(each[key] * 1e3, 2) for key in ("forward", "backward", "exposed")),
                )
        yield table


def _precision(found: list[dict[str, Any]]) -> Table:
    columns = (
        "recipe",
        "weight",
        "master",
        "grad",
        "Adam",
        "kept",
        "gathered",
        "rank GB",
        "runs here",
        "scaled loss",
    )
    table = _table("bytes a parameter", columns)
    for each in found:
        sizes = (str(each[key]) for key in ("weight", "master", "grad", "moments", "kept", "gathered"))
        possible = "yes" if each["possible"] else "no"
        scaling = "yes" if each["loss_scaling"] else ""
        table.add_row(each["name"], *sizes, fixed(each["rank"] / GB, 2), possible, scaling)
    return table


def _batch(found: list[dict[str, Any]]) -> Table:
    columns = ("samples as", "gathers", "GB", "reduce-scatters", "GB", "peak GB", "step s")
    table = _table("gradient accumulation and ChunkMBS", columns)
    for each in found:
        table.add_row(
            each["name"],
            str(each["gathers"]),
            fixed(each["gathers_bytes"] / GB, 1),
            str(each["reduce_scatters"]),
            fixed(each["reduce_scatters_bytes"] / GB, 1),
            fixed(each["peak"] / GB, 1),
            fixed(each["step"], 3),
        )
    return table


def _activations(found: list[dict[str, Any]]) -> Table:
    table = _table("activations", ("policy", "kept GB", "at work GB", "host GB", "forward work again"))
    for each in found:
        sizes = (fixed(each[key] / GB, 2) for key in ("kept", "working", "host"))
        table.add_row(each["policy"], *sizes, f"{each['again']:.0%}")
    return table


def _sequence(found: list[dict[str, Any]]) -> Table:
    columns = ("way", "ranks", "tokens a rank", "calls a sample", "GB a sample", "limit")
    table = _table("context parallel", columns, wrapped=["limit"])
    for each in found:
        calls = sum(sent["calls"] for sent in each["traffic"])
        nbytes = sum(sent["nbytes"] for sent in each["traffic"])
        limit = each["problem"] or ""
        table.add_row(
            each["context"], str(each["ranks"]), str(each["tokens"]), str(calls), fixed(nbytes / GB, 2), limit
        )
    return table
