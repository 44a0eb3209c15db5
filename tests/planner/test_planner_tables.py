"""The report's renderings: the terminal's tables on 80 columns, the page's, and what they say."""

import html
import io

import pytest
from rich.console import Console

from mindspeed_chunk.planner import tables
from mindspeed_chunk.planner.compare.recipes import RECIPES
from mindspeed_chunk.planner.device import load_device
from mindspeed_chunk.planner.model import load_model
from mindspeed_chunk.planner.page import page
from mindspeed_chunk.planner.report import make_report
from mindspeed_chunk.planner.setting import Job
from mindspeed_chunk.tools import plan

WIDTH = 80


@pytest.fixture(scope="module")
def reports():
    """One where EP=1 is best, one where it is not, and one where nothing fits."""
    found = {}
    for name, model, device in (
        ("gathered", "35b", "ascend-910c"),
        ("exchanged", "122b", "ascend-910c-supernode"),
        ("none fits", "397b", "h100"),
    ):
        job = Job(
            model=load_model(model), device=load_device(device), nodes=8, devices_per_node=8,
            recipe=RECIPES["bf16-fsdp2"], global_batch=256,
        )  # fmt: skip
        found[name] = make_report(job)
    return found


def test_every_layout_is_shown_with_its_own_best_setting(reports):
    """The table and the reasons tell the same ratios: one has not the other's batch and number of chunks."""
    for name, least in (("gathered", 3), ("exchanged", 1)):
        best, why = reports[name]["recommendation"]["best"], reports[name]["recommendation"]["why"]
        told = next(line for line in why if line.startswith("Step time of the best fitting"))
        fastest = {}
        for each in reports[name]["layouts"]:
            if each["role"] == "other" and each["setting"]["backend"] == "fsdp2":
                ep = each["setting"]["layout"]["ep"]
                fastest.setdefault(ep, each["step"])
        fastest.pop(best["setting"]["layout"]["ep"], None)
        assert len(fastest) >= least
        for ep, step in fastest.items():
            assert f"EP={ep} {step / best['step']:.2f}" in told
    chunks = {each["setting"]["num_chunks"] for each in reports["gathered"]["layouts"]}
    assert len(chunks) > 1 and all(each["brief"] for each in reports["gathered"]["layouts"] if "problem" not in each)


def test_an_assumption_behind_ep_1_is_told(reports):
    told = {
        name: any("assumed" in line for line in report["recommendation"]["why"]) for name, report in reports.items()
    }
    assert told == {"gathered": True, "exchanged": False, "none fits": False}
    assert reports["gathered"]["recommendation"]["best"]["setting"]["layout"]["ep"] == 1
    assert reports["exchanged"]["recommendation"]["best"]["setting"]["layout"]["ep"] > 1


def test_what_does_not_fit_is_not_called_best(reports):
    found = reports["none fits"]["recommendation"]
    assert (found["fits"], found["best"]) == (False, None)
    assert found["least_memory"]["peak"] > reports["none fits"]["job"]["budget"]
    text = page(reports["none fits"])
    assert "The recommended setting" not in text and "Least memory; it does not fit" in text
    assert "The recommended setting" in page(reports["gathered"])


def test_the_pages_layouts_have_a_role_and_a_setting(reports):
    text = page(reports["gathered"])
    layouts = text[text.index("<h2>Layouts") : text.index("<h2>Traffic")]
    assert "<th>role</th>" in layouts and "<th>batch, recompute, N, keep</th>" in layouts
    for each in reports["gathered"]["layouts"]:
        assert f'data-label="role">{each["role"]}</td>' in layouts


def test_the_page_shows_the_terminals_tables(reports):
    report = reports["gathered"]
    text = page(report)
    shown = (tables.settings(report["recommendation"]), tables.layouts(report["layouts"]), *tables.details(report))
    for table in shown:
        assert all(f">{html.escape(cell)}</td>" in text for row in table.rows for cell in row), table.title
    assert len(shown) == 8 == text.count("<table>")


@pytest.mark.parametrize("name", ["gathered", "exchanged", "none fits"])
def test_tables_fit_on_80_columns_with_whole_words(name, reports):
    report = reports[name]
    shown = [tables.settings(report["recommendation"]), tables.layouts(report["layouts"]), *tables.details(report)]
    shown += tables.chunks(report["chunks"], everything=True)
    headings = [heading for table in shown for heading in table.columns]
    console = Console(width=WIDTH, file=io.StringIO())
    plan.print_report(report, console, everything=True)
    text = console.file.getvalue()
    lines = text.split("for the yaml")[0].splitlines()
    assert max(map(len, lines)) <= WIDTH and "\N{HORIZONTAL ELLIPSIS}" not in text
    assert all(table.title.split()[0] in text for table in shown)
    assert len(headings) > 40 and not {word for heading in headings for word in heading.split()} - set(text.split())


def test_rank_groups_are_shown_as_text(reports):
    shown = "\n".join(map(str, (table.rows for table in tables.details(reports["gathered"]))))
    assert "'tp', '8', '8', '0-7, 8-15, 16-23'" in shown
    assert "'pp', '4', '16', '(0 16 32 48), (1 17 33 49), (2 18 34 50)'" in shown
