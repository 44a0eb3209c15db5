"""`mindspeed-chunk plan CONFIG.yaml`: the estimate of a yaml as it is."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from json_records import assert_record
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.planner import given, load_device
from mindspeed_chunk.planner.estimate import Estimator
from mindspeed_chunk.planner.fragments import fragments
from mindspeed_chunk.planner.layout import Layout
from mindspeed_chunk.planner.setting import Setting
from mindspeed_chunk.tools import plan

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples" / "qwen3_5_35b").glob("*.yaml"))
NPU = ROOT / "examples" / "qwen3_5_35b" / "qwen3_5_35b_npu.yaml"
A3 = {"nodes": 2, "devices_per_node": 16, "device": load_device("ascend-910c"), "model": "35b"}


def changed(tmp_path, *, remove=(), base=NPU, **values):
    """The yaml with `{"dotted__key": value}` put in."""
    config = yaml.safe_load(base.read_text(encoding="utf-8"))
    for name, value in [*values.items(), *((name, None) for name in remove)]:
        *parents, last = name.split("__")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
        if value is None:
            del section[last]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def test_the_example_for_npus_is_read_as_it_is():
    found = given.read(NPU, **A3)
    assert found.setting == Setting(
        layout=Layout(ep=8, dp=32), micro_batch=4, accumulation=1, chunk_mbs=2, policy="offload", num_chunks=2
    )
    job = found.job
    assert (job.sequence, job.global_batch, job.recipe.name, job.train_vision) == (16384, 128, "bf16-fsdp2", True)
    assert found.notes == []
    estimate = Estimator(job)(found.setting)
    assert estimate.peak < job.budget and estimate.step >= max(estimate.links) > 0


def test_the_baselines_of_the_example_are_what_is_computed(tmp_path):
    """Steps and memory of one node and of two, and steps with short samples, as the table has them."""
    text = (ROOT / "examples" / "qwen3_5_35b" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| EP=(\d+), (.*?) \|(.*)\| \|$", text, flags=re.M)
    assert len(rows) == 5
    for ep, what, shown in rows:
        chunks = re.search(r"N=(\d)", what)
        values = {
            "parallel__expert_parallel_size": int(ep),
            "parallel__ep_plan__dispatcher": "chunkmoe" if chunks else "alltoall",
            "parallel__ep_plan__moe_num_chunks": int(chunks[1]) if chunks else None,
        }
        computed = []
        for nodes, tokens in ((1, 16384), (2, 16384), (2, 4096)):
            length = {"data__dataset_param__basic_parameters__cutoff_len": tokens}
            machine = A3 | {"nodes": nodes, "device": load_device("a3")}
            read = given.read(changed(tmp_path, **values, **length), **machine)
            estimate = Estimator(read.job)(read.setting)
            computed += [f"{estimate.step:.2f} s", f"{estimate.peak / 1e9:.1f} GB"]
        assert [cell.strip() for cell in shown.split("|")] == computed[:-1]


NOTES = {
    "parallel__fully_shard_parallel_size": 8,
    "parallel__fsdp_plan__reduce_dtype": "bf16",
    "parallel__ep_plan__chunk_moe_lookahead": 3,
    "parallel__ep_plan__chunk_moe_overlap_shared_expert": True,
    "training__optimizer": "muon",
    "model__freeze": ["model.language_model"],
    "features__recompute_plan__apply_modules": ["model.language_model.layers.{0-9}"],
    "features__enable_chunk_mbs": False,
}


@pytest.mark.parametrize("key", NOTES)
def test_what_is_not_estimated_is_named(key, tmp_path):
    """Not one value that changes a run and not the numbers passes in silence."""
    (note,) = given.read(changed(tmp_path, **{key: NOTES[key]}), **A3).notes or [""]
    assert (key.replace("__", ".") in note) == (key != "features__enable_chunk_mbs")


KEYS = {
    "parallel__ep_plan__moe_num_chunks": (8, ("num_chunks", 8)),
    "parallel__ep_plan__chunk_moe_keep": ("rows", ("keep", "rows")),
    "parallel__ep_plan__chunk_moe_schedule": ("pair", ("schedule", "pair")),
    "parallel__ep_plan__chunk_moe_dispatch": ("per_expert", ("dispatch", "per_expert")),
    "parallel__ep_plan__dispatcher": ("alltoall", ("dispatch", "per_expert")),
    "parallel__ulysses_parallel_size": (2, ("layout", Layout(cp=2, ep=8, dp=16))),
    "features__enable_chunk_mbs": (False, ("chunk_mbs", 0)),
    "features__enable_activation_offload": (False, ("policy", "full")),
    "features__recompute": (False, ("policy", "none")),
    "training__gradient_accumulation_steps": (3, ("accumulation", 3)),
}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_read(key, tmp_path):
    value, (attribute, expected) = KEYS[key]
    assert getattr(given.read(NPU, **A3).setting, attribute) != expected
    assert getattr(given.read(changed(tmp_path, **{key: value}), **A3).setting, attribute) == expected


def test_other_words_for_what_is_estimated_are_no_notes(tmp_path):
    path = changed(tmp_path, parallel__fully_shard_parallel_size=32, parallel__fsdp_plan__reduce_dtype="float32")
    assert given.read(path, **A3).notes == []


def test_a_chunk_size_is_a_number_of_chunks(tmp_path):
    path = changed(tmp_path, remove=["parallel__ep_plan__moe_num_chunks"], parallel__ep_plan__moe_chunk_size=8192)
    assert given.read(path, **A3).setting.num_chunks == 4  # of 2 samples of 16384 tokens


@pytest.mark.parametrize(
    "values, error",
    [
        ({"parallel__tensor_parallel_size": 2}, "parallel.tensor_parallel_size: 2: the planner has no estimate for it"),
        ({"parallel__ulysses_parallel_size": 3}, "parallel.ulysses_parallel_size: 3: must divide the number of ranks"),
        ({"parallel__expert_parallel_size": 3}, "parallel.expert_parallel_size: 3: must divide the number of ranks"),
        ({"parallel__ep_plan__moe_num_chunks": 10**6}, "moe_num_chunks: 1000000: makes 1000000 chunks"),
        ({"parallel__ep_plan__moe_num_chunks": "two"}, "moe_num_chunks: 'two': must be an integer >= 0"),
        ({"parallel__fsdp_plan__param_dtype": "fp32"}, "param_dtype: 'fp32': ascend-910c has no matrix unit for fp32"),
        ({"parallel__fsdp_plan__param_dtype": "fp16"}, "param_dtype: 'fp16': must be one of bf16"),
        ({"model__freeze": 5}, "model.freeze: 5: must be a list of names"),
        ({"features__chunkmbs_plan__chunk_mbs": 3}, "chunk_mbs: 3: does not divide training.micro_batch_size, 4"),
        ({"features__enable_chunk_loss": "maybe"}, "features.enable_chunk_loss: 'maybe': must be a boolean"),
        ({"data__dataset_param__basic_parameters__cutoff_len": 10**12}, "at most 100000000 tokens can be estimated"),
        ({"training__micro_batch_size": 0}, "training.micro_batch_size: 0: must be an integer >= 1"),
    ],
)
def test_what_cannot_be_estimated_is_one_line(values, error, tmp_path):
    with pytest.raises(ConfigError) as refused:
        given.read(changed(tmp_path, **values), **A3)
    assert error in str(refused.value) and "\n" not in str(refused.value)


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["plan", *map(str, words)])
    return plan.main()


FLEET = ("--nodes", "2", "--devices-per-node", "16", "--device", "ascend-910c")


def test_the_command_reports_the_yaml_and_what_would_be_faster(monkeypatch, capsys, tmp_path):
    page = tmp_path / "plan.html"
    assert run(monkeypatch, NPU, "--model", "35b", *FLEET, "--html", page) == 0
    shown = capsys.readouterr().out
    assert "the yaml: EP=8 DP=32, batch 4, micro-chunks of 2, recompute offload, N=2" in shown
    assert "memory of a rank" in shown and "may be used" in shown and "- Faster: " in shown
    assert "The yaml: EP=8 DP=32" in page.read_text()
    assert run(monkeypatch, NPU, "--model", "35b", *FLEET, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert_record("plan", record)
    assert record["given"]["step"] == pytest.approx(sum(record["given"]["seconds"].values()))


def test_a_yaml_that_does_not_fit_is_told_what_would(monkeypatch, capsys, tmp_path):
    path = changed(tmp_path, features__recompute=False, features__enable_activation_offload=False)
    assert run(monkeypatch, path, "--model", "35b", *FLEET) == 1
    assert "It does not fit: the largest part is activations" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [("--sequence", "4096"), ("--precision", "fp32"), ("--freeze-vision",)])
def test_an_option_that_the_yaml_has_is_refused(words, monkeypatch, capsys):
    assert run(monkeypatch, NPU, "--model", "35b", *FLEET, *words) == 2
    assert f"error: {words[0]}: not with CONFIG.yaml, which has it" in capsys.readouterr().err


def test_neither_a_model_nor_a_yaml(monkeypatch, capsys):
    assert run(monkeypatch, *FLEET) == 2
    assert capsys.readouterr().err == "error: --model: is missing; give it, or CONFIG.yaml\n"


def test_a_machine_has_one_name_for_its_nodes_and_links(monkeypatch, capsys):
    assert load_device("A3") is load_device("atlas-900-a3") is load_device("ascend-910c-supernode")
    assert load_device("ascend910_93") is load_device("910C") is load_device("ascend-910c")
    shown = {}
    for devices in ("16", "8"):
        run(monkeypatch, "--model", "35b", "--nodes", "2", "--devices-per-node", devices, "--device", "a3")
        shown[devices] = " ".join(capsys.readouterr().out.split())
        assert "The machine: Atlas 900 A3 SuperPoD, 16 devices per node." in shown[devices]
    assert "is another machine" not in shown["16"]
    assert "--devices-per-node 8 is another machine: its nodes have 16." in shown["8"]


def test_what_was_only_counted_is_not_recommended_and_its_gain_is_named(monkeypatch, capsys):
    words = ("--model", "35b", "--nodes", "2", "--devices-per-node", "16", "--device", "a3", "--sequence", "16384")
    assert run(monkeypatch, *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)["recommendation"]
    policies = [each["setting"]["policy"] for each in (found["best"], *found["runners_up"])]
    assert "none" in policies and policies.index("none") > max(i for i, name in enumerate(policies) if name != "none")
    assert any(line.startswith("Without recompute, ") and "not measured" in line for line in found["why"])


def test_the_search_can_be_narrowed(monkeypatch, capsys):
    for words, key, value in ((("--ep", "8"), "ep", 8), (("--ulysses", "2"), "cp", 2)):
        assert run(monkeypatch, "--model", "35b", *FLEET, *words, "--json") == 0
        record = json.loads(capsys.readouterr().out)
        assert record["recommendation"]["best"]["setting"]["layout"][key] == value
    narrow = ("--ep", "8", "--num-chunks", "4", "--micro-batch", "2")
    assert run(monkeypatch, "--model", "35b", *FLEET, *narrow, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    for each in (record["recommendation"]["best"], *record["recommendation"]["runners_up"]):
        assert (each["setting"]["num_chunks"], each["setting"]["micro_batch"]) == (4, 2)
    content = yaml.safe_load(record["yaml"])
    assert content["parallel"]["expert_parallel_size"] == 8 and content["training"]["micro_batch_size"] == 2


def test_a_search_that_is_too_narrow_is_one_line(monkeypatch, capsys):
    assert run(monkeypatch, "--model", "35b", *FLEET, "--ep", "5") == 2
    assert capsys.readouterr().err == (
        "error: --ep 5: none of the settings that are tried for 32 ranks and 128 samples has that (chunks: 1, 2, 4, 8, "
        "and with EP=1 one); change it\n"
    )


def test_the_yaml_keeps_what_the_stock_file_has():
    """Lists replace those of the stock file, and Ulysses needs the attention that its comment names."""
    setting = Setting(layout=Layout(cp=2, dp=16), policy="offload")
    content = yaml.safe_load(fragments(given.read(NPU, **A3).job, setting))
    blocks = ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]
    for plan_of in ("recompute_plan", "activation_offload_plan"):
        assert content["features"][plan_of]["apply_modules"] == blocks
    assert content["model"] == {"attn_implementation": "flash_attention_2"}


def stock():
    home = os.environ.get("MINDSPEED_MM_HOME")
    return sorted((Path(home) / "examples").rglob("*.yaml")) if home else []


@pytest.mark.parametrize("path", [*EXAMPLES, *stock()], ids=lambda path: path.stem)
def test_every_yaml_has_an_estimate_or_one_line(path, monkeypatch, capsys):
    """The project's own, and the stock ones where MINDSPEED_MM_HOME is set."""
    monkeypatch.chdir(ROOT)
    code = run(monkeypatch, path, *FLEET, "--json")
    out, error = capsys.readouterr()
    if code == 2:
        assert error.startswith("error: ") and error.count("\n") == 1 and not out
    else:
        assert json.loads(out)["given"]["step"] > 0 and not error


@pytest.mark.parametrize("text", ["", "- a\n", "a\n"])
def test_what_is_no_mapping_is_named_by_its_file(text, tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"empty\.yaml: .*must be a mapping, as a yaml of MindSpeed-MM is"):
        given.read(path, **A3)


def test_stock_yamls_have_an_answer_or_one_line(monkeypatch, capsys):
    """Those of other models are estimated with the sizes of the 35B."""
    home = os.environ.get("MINDSPEED_MM_HOME")
    if not home:
        pytest.skip("MINDSPEED_MM_HOME is not set: no stock yamls to read")
    answered = []
    for path in sorted(Path(home, "examples").rglob("*.yaml")):
        machine = ["--nodes", "2", "--devices-per-node", "16", "--device", "a3", "--model", "35b"]
        monkeypatch.setattr(sys, "argv", ["plan", str(path), *machine])
        code = plan.main()
        out, err = capsys.readouterr()
        assert code in (0, 1) and not err or code == 2 and not out and err.startswith("error: "), (path, err)
        assert err.count("\n") == (code == 2), err
        if code != 2:
            answered.append(path.parent.name)
    assert "qwen3_5" in answered
