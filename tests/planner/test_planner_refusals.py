"""What `mindspeed-chunk plan` refuses, in one line that names the limits, and what it answers in a second."""

import json
import math
import subprocess
import sys
import time

import pytest
import yaml

from launcher import HANG_S
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.planner import Link, load_device, load_model
from mindspeed_chunk.planner.numbers import billions, fixed
from mindspeed_chunk.tools import plan
from standalone_ranks import EXAMPLE

TINY = EXAMPLE / "tiny"
FEW = ("--model", "35b", "--nodes", "1", "--devices-per-node", "2", "--device", "h100")
DEVICE = {
    "memory_gb": 64, "flops_bf16": 376, "memory_gb_per_s": 1600, "intra_gb_per_s": 196, "inter_gb_per_s": 25,
}  # fmt: skip
BUSY = 4  # times as long as on an idle machine


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["plan", *map(str, words)])
    return plan.main()


@pytest.mark.parametrize(
    "nodes, devices, batch",
    [(1000, 8, 32_000), (500, 8, 16_000), (2048, 8, 192 * 16384), (1, 16384, 65536), (1890, 8, 15120 * 12)],
)
def test_thousands_of_devices_take_less_than_a_second(nodes, devices, batch, monkeypatch, capsys):
    start = time.process_time()
    words = ("--model", "397b", "--nodes", nodes, "--devices-per-node", devices, "--device", "ascend-910c")
    assert run(monkeypatch, *words, "--global-batch", batch, "--json") == 0
    assert time.process_time() - start < 1 * BUSY
    assert json.loads(capsys.readouterr().out)["job"]["nodes"] == nodes


@pytest.mark.parametrize(
    "words, told",
    [
        (("--nodes", 10**30), "at most 16384"),
        (("--nodes", "9" * 5000), "invalid int value"),
        (("--nodes", -1), "--nodes: -1: must be at least 1"),
        (("--nodes", 2000, "--devices-per-node", 9), "18000 devices, at most 16384"),
        (("--devices-per-node", 0), "--devices-per-node: 0: must be at least 1 and at most 16384"),
        (("--sequence", 10**9), "at most 100000000"),
        (("--global-batch", 0), "--global-batch: 0: must be at least 1"),
        (("--chunk-loss", -1), "--chunk-loss: -1: must be at least 0"),
        (("--imbalance", "nan"), "--imbalance: nan: must be at least 1"),
        (("--imbalance", "1e400"), "--imbalance: inf: must be at least 1"),
        (("--reserve", "nan"), "--reserve: nan: must be at least 0 and at most 0.99"),
        (("--device", "x" * 5000), "neither a file nor a device of the table"),
        (("--device", "x/" * 2500), "cannot be read"),
        (("--model", "x/" * 2500), "no folder with a config.json"),
        (("--html", "x/" * 2500), "cannot be written"),
        (("--model", "m[/b]"), "'m[/b]'"),
        (("--device", "\udcff\x1b[31m\n"), "\\udcff\\x1b[31m\\n"),
    ],
)
def test_an_option_beyond_its_limits_is_one_line(words, told, monkeypatch, capsys):
    try:
        code = run(monkeypatch, *FEW, *words)
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2 and not captured.out
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and len(captured.err) < 2500
    assert told in captured.err


@pytest.mark.parametrize("key", [*DEVICE, "call_us", "intra_latency_us"])
@pytest.mark.parametrize("value", [math.inf, math.nan, -1, 1e-320, 1e-300, 10**18, 1e300, True, "8", None, [1]])
def test_every_number_of_a_device_file_has_two_limits(key, value, tmp_path):
    file = tmp_path / "device.yaml"
    file.write_text(yaml.safe_dump({**DEVICE, key: value}))
    if key.endswith("_us") and value in (1e-320, 1e-300):
        assert load_device(str(file)).call < 1e-300
        return
    with pytest.raises(
        ConfigError, match=rf"{key}: .*: must be a number of at least [\d.e-]+ and at most \d+; "
    ) as told:
        load_device(str(file))
    assert "\n" not in str(told.value) and len(str(told.value)) < 500


@pytest.mark.parametrize(
    "table",
    [
        [[1000, -1], [2000, 1]], [[1000, math.nan], [2000, 1]], [[1000, 1], [2000, math.inf]], [[0, 1], [2000, 1]],
        [[2000, 1], [1000, 1]], [[1000, 1], [1000, 2]], [[1000, 1]], [], None, 5, [[1, 2, 3], [2, 3, 4]], "ab",
        [[n, 1] for n in range(1, 1002)],
    ],
)  # fmt: skip
def test_a_table_of_messages_is_checked(table, tmp_path):
    file = tmp_path / "device.yaml"
    file.write_text(yaml.safe_dump({**DEVICE, "inter_messages": table}))
    with pytest.raises(ConfigError, match="inter_messages.*must be") as told:
        load_device(str(file))
    assert "at most" in str(told.value) and len(str(told.value)) < 500


@pytest.mark.parametrize(
    "text, told",
    [
        ('name: "a\\uD800b"', "name: .*must be one line of text"),
        ('name: "a\\e[31m"', "name: .*must be one line of text"),
        ('name: "a\\nb"', "name: .*must be one line of text"),
        ("name: [a]", "name: .*must be one line of text"),
        (f"name: {'x' * 81}", "name: .*at most 80 characters"),
        ("source: {}", "source: .*must be one line of text"),
        ("call_us: !!timestamp x", "timestamp"),
        ('"a\\nb": 1', "unknown key"),
        (f"call_us: {'9' * 400}", "more than 64 bits"),
        ("[" * 3000, "nested levels"),
        ('{"a":' * 3000, "nested levels"),
    ],
)
def test_what_is_no_device_file_is_one_line(text, told, tmp_path):
    file = tmp_path / "device.yaml"
    file.write_text(text if text[0] in "[{" else yaml.safe_dump(DEVICE) + text)
    with pytest.raises(ConfigError, match=told) as caught:
        load_device(str(file))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_a_message_takes_time_however_small_it_is():
    """Also where the line through the first two goes below 0, and where a larger one was measured as faster."""
    link = Link(rate=1, measured=((1000.0, 1.0), (2000.0, 3.0), (4000.0, 2.5)))
    assert [link.seconds(n) for n in (0, 500, 1000, 1500, 2000, 4000)] == [0, 0.5, 1, 2, 3, 2.5]
    assert link.seconds(1e9) == 2.5
    steep = Link(rate=1, measured=((1000.0, 2.0), (2000.0, 3.0)))
    assert steep.seconds(500) == 1.5  # on the line, which is above the share


@pytest.mark.parametrize(
    "change, told",
    [
        ({"text_config": 5}, "text_config: 5: must be a mapping"),
        ({"vision_config": [1]}, "vision_config: .*must be a mapping"),
        ({"text_config": {"full_attention_interval": 0}}, "full_attention_interval: 0: must be an integer"),
        ({"text_config": {"full_attention_interval": 0.5}}, "full_attention_interval: 0.5"),
        ({"text_config": {"layer_types": 5}}, "layer_types: 5: must be a list of 40"),
        ({"text_config": {"layer_types": [[]] * 40}}, "layer_types: .*must be a list of 40"),
        ({"text_config": {"num_hidden_layers": 100_000}}, "num_hidden_layers is 100000, but must be at most 1000"),
        ({"vision_config": {"depth": 100_000}}, "depth is 100000, but must be at most 1000"),
        ({"text_config": {"vocab_size": 10**400}}, "vocab_size: .*at most 1000000000"),
        ({"text_config": {"hidden_size": math.inf}}, "hidden_size: inf: must be an integer"),
        ({"text_config": {"num_experts": 4}}, "num_experts_per_tok: 8: must be at most num_experts, 4"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: 'false': must be true or false"),
        ({"model_type": ["x" * 5000]}, "model_type"),
    ],
)
def test_a_size_that_no_model_has_is_one_line(change, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", **change}))
    with pytest.raises(ConfigError, match=told) as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_a_model_of_a_thousand_layers_is_planned_in_a_second(tmp_path, monkeypatch, capsys):
    text = {"num_hidden_layers": 1000, "num_experts": 512}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    start = time.process_time()
    run(monkeypatch, *FEW, "--model", tmp_path, "--nodes", 64, "--devices-per-node", 8)
    assert time.process_time() - start < 1 * BUSY


def test_words_of_the_user_are_no_markup(tmp_path, monkeypatch, capsys):
    """In the tables, in the page, in what is written of a device file."""
    folder = tmp_path / "m[red]x[b] :smile: $a$ <i>&"
    folder.mkdir()
    (folder / "config.json").write_text((TINY / "config.json").read_text())
    device, page = tmp_path / "device.yaml", tmp_path / "[b]page</script>.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    device.write_text(yaml.safe_dump({**DEVICE, "name": "[bold]d[/c]</script><b>", "source": "[/x]<script>"}))
    monkeypatch.setenv("COLUMNS", "500")
    assert run(monkeypatch, *FEW, "--model", folder, "--device", device, "--html", page.with_name("[b]page.html")) == 0
    out = capsys.readouterr().out
    assert f"{folder} on 1 x 2 [bold]d[/c]</script><b>\n" in out
    text = page.with_name("[b]page.html").read_text()
    assert "m[red]x[b] :smile: $a$ &lt;i&gt;&amp;" in text and "[bold]d[/c]&lt;/script&gt;&lt;b&gt;" in text
    assert "<script" not in text and "<i>&" not in text and "</script" not in text


def test_a_name_that_is_no_text_is_shown_with_escapes(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "m\udcff\n\x1b[31m"
    folder.mkdir()
    (folder / "config.json").write_text((TINY / "config.json").read_text())
    monkeypatch.setenv("COLUMNS", "500")
    assert run(monkeypatch, *FEW, "--model", folder, "--html", tmp_path / "page.html") == 0
    out = capsys.readouterr().out
    assert "m\\udcff\\n\\x1b[31m on 1 x 2 h100\n" in out
    assert "m\\udcff\\n\\x1b[31m" in (tmp_path / "page.html").read_text()


def test_what_is_more_than_nothing_is_not_shown_as_nothing(monkeypatch, capsys):
    assert [fixed(value, 1) for value in (0, 0.04, 0.06, 12.34, 3e-6)] == ["0.0", "0.04", "0.1", "12.3", "3e-06"]
    assert [billions(number) for number in (35_100_000_000, 123_456)] == ["35.1e9", "123456"]
    assert run(monkeypatch, *FEW, "--model", TINY, "--sequence", 64, "--all") == 0
    recommended = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("recommended"))
    _, gigabytes, _, seconds, link, _ = recommended.rsplit(maxsplit=5)
    assert float(gigabytes) > 0 and float(seconds) > 0 and float(link) > 0


@pytest.mark.parametrize("words", [("plan", *FEW), ("plan", *FEW, "--json"), ("lint", "--markdown")])
def test_a_full_disk_behind_the_output_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mindspeed_chunk.tools", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_S,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output cannot be written") and done.stderr.count("\n") == 1


def test_a_terminal_without_the_characters_gets_escapes(tmp_path):
    folder = tmp_path / "模型"
    folder.mkdir()
    (folder / "config.json").write_text((TINY / "config.json").read_text())
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_chunk.tools", "plan", *FEW, "--model", str(folder)],
        env={"PYTHONIOENCODING": "ascii", "COLUMNS": "200"}, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr
    assert "\\u6a21\\u578b on 1 x 2 h100\n" in done.stdout
