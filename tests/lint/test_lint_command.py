"""`mindspeed-chunk lint` as it is called: exit codes, JSON, corrected copies, yamls of this project and of hosts."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from json_records import assert_record
from launcher import HANG_S
from lint_cases import CLEAN, EXAMPLE, ROOT, spoilt
from mindspeed_chunk import keys, lint
from mindspeed_chunk.lint.document import Document, Unreadable
from mindspeed_chunk.tools import lint as command

MISSPELT = spoilt(("enable_chunk_mbs:", "enable_chunk_mb:"))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Calls the command on a text; returns its exit code, output and error output."""

    def call(text, *options):
        path = tmp_path / "config.yaml"
        if text is not None:
            path.write_text(text, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["mindspeed-chunk", str(path), *options])
        try:
            code = command.main()
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        if "--json" in options:
            assert_record("lint" if code != 2 else "lint, unreadable", json.loads(out))
        return code, out, err

    return call


def test_exit_codes(run):
    assert run(CLEAN)[0] == 0
    code, told, _ = run(spoilt(("moe_num_chunks: 4", "moe_num_chunks: 8")))
    assert code == 0 and ": note: " in told, "notes alone are no reason to stop"
    assert run(MISSPELT)[0] == 1
    assert run(spoilt(("moe_num_chunks: 4", "moe_num_chunks: -4")))[0] == 1


def test_a_line_names_file_line_severity_path_value_and_rule(run, tmp_path):
    _, told, _ = run(MISSPELT, "--world", "4")
    line = MISSPELT.splitlines().index("  enable_chunk_mb: true") + 1
    assert told.splitlines() == [
        f"{tmp_path}/config.yaml:{line}: warning: features.enable_chunk_mb: True: unknown key; the nearest "
        "one is enable_chunk_mbs [misspelt-key]",
        f"{tmp_path}/config.yaml: 0 errors, 1 warning, 0 notes",
        f"{tmp_path}/config.yaml: global batch on 4 ranks: 16 = 4 x 4 data-parallel x 1 accumulated",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            spoilt(("moe_num_chunks: 4", "chunk_moe_overlap_shared_expert: 1")),
            "chunk_moe_overlap_shared_expert: 1: must be a boolean",
        ),
        (None, "cannot be read: No such file"),
        (CLEAN.replace("  recompute: true", "\trecompute: true"), "a tab"),
        (CLEAN + "training: {}\n", "training: given twice"),
        (spoilt(("micro_batch_size: 4", "micro_batch_size: four")), "micro_batch_size: 'four': must be an integer"),
        (spoilt(("moe_num_chunks: 4", "moe_num_chunks: two")), "moe_num_chunks: 'two': must be an integer"),
        (spoilt(("recompute: true", "recompute: 7")), "features.recompute: 7: must be a boolean"),
        ("parallel: [1]\ntraining: {}\n", "parallel: [1]: must be a mapping"),
        ("dataset_param: {a: 1}\n", "not a yaml of MindSpeed-MM's FSDP2 trainer"),
        ("just text\n", "must be a mapping"),
    ],
)
def test_bad_input_is_one_line_and_2(run, text, told):
    code, out, err = run(text)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and told in err and err.count("\n") == 1
    code, out, err = run(text, "--json")
    assert code == 2 and err == "" and told in json.loads(out)["error"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--world", "0"], "argument --world: '0': must be an integer >= 1"),
        (["--world", "four"], "argument --world: 'four': must be an integer >= 1"),
        (["--no-such"], "unrecognized arguments: --no-such"),
        (["--no\nsuch"], "unrecognized arguments: --no such"),
        (["--world"], "argument --world: expected one argument"),
        (["--devices-per-node", "-1"], "argument --devices-per-node: "),
    ],
)
def test_bad_usage_is_one_line_and_2(run, options, told):
    code, out, err = run(CLEAN, *options)
    assert code == 2 and out == "" and err.startswith(f"error: {told}") and err.count("\n") == 1


def test_a_call_without_a_file_is_one_line_and_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mindspeed-chunk"])
    with pytest.raises(SystemExit, match="^2$"):
        command.main()
    assert capsys.readouterr().err == "error: give CONFIG.yaml; mindspeed-chunk lint --help lists the options\n"


@pytest.mark.parametrize("key", ["micro_batch_size: 4", "gradient_accumulation_steps: 1", "ulysses_parallel_size: 1"])
def test_no_global_batch_is_reckoned_from_a_value_below_1(run, key):
    text = spoilt((key, f"{key[:-1]}0"))
    code, out, _ = run(text, "--world", "4")
    assert code == 1 and "global batch" not in out and len(out.splitlines()) == 2
    assert "global_batch" not in json.loads(run(text, "--world", "4", "--json")[1])


def test_json(run):
    code, out, _ = run(MISSPELT, "--json", "--world", "8")
    told = json.loads(out)
    (found,) = told["findings"]
    assert code == 1 and told["counts"] == {"error": 0, "warning": 1, "note": 0} and told["global_batch"] == 32
    assert found["rule"] == "misspelt-key" and found["path"] == "features.enable_chunk_mb" and found["fixable"]


def test_a_copy_is_corrected_and_the_original_is_not(run, tmp_path):
    code, out, _ = run(MISSPELT, "--fix")
    copy = tmp_path / "config.fixed.yaml"
    assert code == 1 and (tmp_path / "config.yaml").read_text(encoding="utf-8") == MISSPELT
    assert copy.read_text(encoding="utf-8") == CLEAN
    assert "-  enable_chunk_mb: true\n+  enable_chunk_mbs: true\n" in out
    assert out.endswith(f"{copy}: 0 errors, 0 warnings, 0 notes\n")
    copy.unlink()
    assert "no file was written" in run(CLEAN, "--fix")[1] and not copy.exists()


def test_a_key_whose_right_name_would_have_a_value_of_a_wrong_type_is_not_corrected(run, tmp_path):
    code, out, err = run(
        spoilt(("moe_num_chunks: 4", 'moe_num_chunk: "4"'), ("hook_modules:", "hook_module:")), "--fix"
    )
    assert code == 1 and err == "" and "the nearest one is moe_num_chunks" in out
    copy = (tmp_path / "config.fixed.yaml").read_text(encoding="utf-8")
    assert 'moe_num_chunk: "4"' in copy and "hook_modules:" in copy


def test_the_original_is_written_only_by_its_name(run, tmp_path):
    path = tmp_path / "config.yaml"
    assert json.loads(run(MISSPELT, "--json", "--fix", str(path))[1])["fixed"] == str(path)
    assert path.read_text(encoding="utf-8") == CLEAN
    assert run(MISSPELT, "--fix", str(tmp_path / "none" / "x.yaml"))[0] == 2


def test_the_command_is_registered_and_imports_no_torch_without_a_model(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(spoilt(("/tiny", "/none")), encoding="utf-8")
    program = (
        "import sys; from mindspeed_chunk.tools.__main__ import main; "
        f"sys.argv = ['mindspeed-chunk', 'lint', {str(path)!r}]; code = main(); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0 and done.stdout.endswith("False\n"), done.stderr


def test_the_sample_in_the_documents_is_what_is_printed(run, tmp_path):
    text = (EXAMPLE / "qwen3_5_35b_npu.yaml").read_text(encoding="utf-8")
    text = text.replace("moe_num_chunks: 2", "moe_num_chunk: 2").replace("    chunk_mbs: 2", "    chunk_mbs: 4")
    _, told, _ = run(text, "--world", "16")
    shown = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert f"--world 16\n{told.replace(f'{tmp_path}/', '')}```" in shown


@pytest.mark.parametrize("path", sorted(EXAMPLE.glob("*.yaml")), ids=lambda path: path.name)
def test_our_examples_have_neither_errors_nor_warnings(path):
    for world in (None, 2 if "tiny" in path.name else 16):
        assert not [each for each in lint.check(Document.read(path), world) if each.severity != "note"]


def test_stock_yamls_have_no_errors():
    home = os.environ.get("MINDSPEED_MM_HOME")
    if not home:
        pytest.skip("MINDSPEED_MM_HOME is not set: no stock yamls to read")
    paths = sorted(Path(home, "examples").rglob("*.yaml"))
    if not paths:
        pytest.skip(f"{home} has no yamls in examples")
    checked = 0
    for path in paths:
        try:
            found = lint.check(Document.read(path))
        except Unreadable as error:
            assert "\n" not in str(error)
            if "not a yaml of MindSpeed-MM's FSDP2 trainer" not in str(error):
                with pytest.raises(yaml.YAMLError):  # then it cannot be read by the host either
                    yaml.safe_load(path.read_text(encoding="utf-8"))
            continue
        checked += 1
        assert not [each for each in found if each.severity == "error" or each.rule == "misspelt-key"], path
    assert checked


# Where MindSpeed-MM has the typed sections, by the section of the yaml.
TYPED = {
    "": ("params/argument.py", "Arguments"),
    "parallel": ("params/parallel_args.py", "ParallelArguments"),
    "parallel.fsdp_plan": ("params/parallel_args.py", "FSDPPlanConfig"),
    "model": ("params/model_args.py", "ModelArguments"),
    "data": ("params/data_args.py", "DataArguments"),
    "data.dataset_param": ("params/data_args.py", "DataSetArguments"),
    "data.dataset_param.basic_parameters": ("data/data_utils/func_utils/convert.py", "DataArguments"),
    "data.dataloader_param": ("params/data_args.py", "DataloaderArguments"),
    "features": ("params/feature_args.py", "FeatureArguments"),
    "features.loss_cfg": ("params/feature_args.py", "LossArguments"),
    "features.recompute_plan": ("params/feature_args.py", "RecomputePlanConfig"),
    "features.activation_offload_plan": ("params/feature_args.py", "ActivationOffloadPlanConfig"),
    "features.chunkmbs_plan": ("params/feature_args.py", "ChunkMbsPlanConfig"),
    "training": ("params/training_args.py", "TrainingArguments"),
    "training.quantization_plan": ("params/training_args.py", "QuantizeConfig"),
    "training.lora": ("params/lora_args.py", "LoraArguments"),
}


@pytest.mark.parametrize("section", TYPED)
def test_every_key_of_a_typed_section_is_known(section):
    path, name = TYPED[section]
    source = Path(os.environ.get("MINDSPEED_MM_HOME", "none"), "mindspeed_mm", "fsdp", path)
    if not source.is_file():
        pytest.skip("MINDSPEED_MM_HOME is no tree with this section")
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    (body,) = [node.body for node in classes if node.name == name] or [[]]
    fields = {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    assert fields <= keys.at(section).keys()
