"""The table of several runs and the counts in it."""

import json

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
    cells = [cell.strip() for cell in other.strip("│").split("│")]
    assert cells == ["other", "4.0000", "2.0000", "1.0e-04", "102", "8 (4+0+4)", "1 (1+0+0)"]
    assert base.count(" - ") == 3
    assert (tmp_path / "new" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", [None, "", "no json\n"])
def test_unreadable_metrics_are_one_line(content, tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    assert compare.main([str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {path}: ") and captured.err.count("\n") == 1
