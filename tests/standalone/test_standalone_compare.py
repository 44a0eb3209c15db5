"""The table of several runs and the counts in it."""

import json
import re

import pytest

from mindspeed_chunk.observe import Event
from mindspeed_chunk.standalone import compare
from mindspeed_chunk.standalone.log import traffic_per_layer


def write(path, losses, per_layer=None):
    records = [{"iteration": n + 1, "loss": loss, "elapsed_ms": 100.0 + n} for n, loss in enumerate(losses)]
    if per_layer:
        records[1]["per_layer"] = per_layer
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_events_fall_to_forward_recompute_and_backward():
    def layer(*kinds):
        return [Event("layer", "begin"), *(Event(kind, "x") for kind in kinds), Event("layer", "end")]

    one_micro_batch = [
        Event("phase", "forward"),
        *layer("all_gather", "host_copy", "all_to_all", "all_to_all", "action"),
        *layer("all_gather", "host_copy", "all_to_all", "all_to_all"),
        Event("phase", "backward"),
        *layer("all_gather", "host_copy", "all_to_all", "all_to_all"),
        Event("all_to_all", "x"),
        Event("all_to_all", "x"),
        *layer("all_gather", "host_copy", "all_to_all", "all_to_all"),
        Event("all_to_all", "x"),
        Event("all_to_all", "x"),
    ]
    forward = {"all_gather": 1, "host_copy": 1, "all_to_all": 2}
    expected = {"forward": forward, "recompute": forward, "backward": {"all_to_all": 2}}
    assert traffic_per_layer(one_micro_batch * 3, num_calls=2 * 3) == expected


def test_table_and_plot(tmp_path, capsys):
    counts = {"forward": {"all_to_all": 4, "host_copy": 1}, "recompute": {}, "backward": {"all_to_all": 4}}
    files = [
        write(tmp_path / "base.jsonl", [4.0, 3.0, 2.0]),
        write(tmp_path / "other.jsonl", [4.0, 3.0003, 2.0], counts),
    ]
    assert compare.main([*files, "--plot", str(tmp_path / "new" / "loss.png")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (base,) = (line for line in lines if "base" in line)
    (other,) = (line for line in lines if "other" in line)
    cells = re.split(r"\s{2,}", other.strip())
    assert cells == ["other", "4.0000", "2.0000", "1.0e-04", "102", "8 (4+0+4)", "1 (1+0+0)"]
    assert base.split().count("-") == 3
    assert (tmp_path / "new" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_differences_to_a_loss_of_nothing(tmp_path, capsys):
    nan, inf = float("nan"), float("inf")
    assert compare.largest_difference([0.0, 2.0], [0.0, 1.0]) == 1.0
    assert compare.largest_difference([1.0, 2.0], [0.0, 1.0]) == inf
    assert str(compare.largest_difference([1.0, nan, 2.0], [1.0, 1.0, 1.0])) == "nan"
    assert str(compare.largest_difference([1.0, 2.0], [nan, 1.0])) == "nan"
    files = [write(tmp_path / "base.jsonl", [0.0, nan]), write(tmp_path / "other.jsonl", [1.0, 1.0])]
    assert compare.main(files) == 0 and "nan" in capsys.readouterr().out


def test_runs_named_alike_are_told_apart_and_names_are_no_markup(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    files = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        files.append(write(tmp_path / folder / "metrics.jsonl", [4.0, 3.0]))
    files.append(write(tmp_path / "$x^{$[red]r[bold] :smile:.jsonl", [4.0, 3.0]))
    assert compare.main([*files, "--plot", str(tmp_path / "loss.png")]) == 0
    out = capsys.readouterr().out
    assert files[0] in out and files[1] in out and "$x^{$[red]r[bold] :smile: " in out


GOOD = {"iteration": 1, "loss": 1.0, "elapsed_ms": 1.0}


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "no json\n",
        "[" * 3000,
        "[1]\n",
        "5\n",
        '{"iteration": 1, "elapsed_ms": 1}\n',
        *(json.dumps({**GOOD, key: value}) for key in GOOD for value in (None, "1", True, [1], 10**400)),
        *(json.dumps({**GOOD, "per_layer": value}) for value in (5, [], {}, {"forward": {}}, {"forward": 1})),
        json.dumps({**GOOD, "per_layer": {phase: {"all_to_all": "4"} for phase in compare.PHASES}}),
        json.dumps(GOOD) + "\n{",
        json.dumps(GOOD) + "\n\n",
        "\0",
    ],
)
def test_unreadable_metrics_are_one_line(content, tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    assert compare.main([str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {path}: ") and captured.err.count("\n") == 1
