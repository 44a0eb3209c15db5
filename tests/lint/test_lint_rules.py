"""Seeded mistakes: each is found, by its rule, in its line, and nothing is found in the yaml without it."""

from pathlib import Path

import pytest

from lint_cases import CLEAN, EXAMPLE, ROOT, WORLD, spoilt
from mindspeed_chunk import lint
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.lint import report
from mindspeed_chunk.lint.document import Document
from mindspeed_chunk.lint.rules_keys import letters_apart
from mindspeed_chunk.moe.checks import check_op_replay

MOE, MBS = "parallel.ep_plan", "features.chunkmbs_plan"
CHUNKS, LAYERS = "moe_num_chunks: 4", "model.language_model.layers"
DISPATCHER, REPLAY = "dispatcher: chunkmoe", "features.recompute_plan.op_replay_scopes"


def add(where, *lines):
    """Further lines behind one that is there, as deep as they say."""
    return (where + "\n", "\n".join([where, *lines]) + "\n")


def scopes(*names):
    """A recompute plan's first lines: one scope of op replay for each of the names."""
    lines = [f"      - {{name: each, apply_modules: ['{name}']}}" for name in names]
    return "\n".join(["  recompute_plan:", "    op_replay_scopes:", *lines]) + "\n"


# name: (rule, path, part of the line, changes)
SEEDS = {
    "negative": ("chunk-moe-settings", f"{MOE}.moe_num_chunks", "must be an integer >= 0",
                 [(CHUNKS, f"{CHUNKS[:-1]}-4")]),
    "misspelt chunks": ("chunk-moe-settings", f"{MOE}.moe_num_chunk", "nearest one is moe_num_chunks",
                        [(CHUNKS, "moe_num_chunk: 4")]),
    "schedule": ("chunk-moe-settings", f"{MOE}.chunk_moe_schedule", "must be one of rolling, pair",
                 [add(CHUNKS, "    chunk_moe_schedule: roling")]),
    "keep": ("chunk-moe-settings", f"{MOE}.chunk_moe_keep", "contradicts",
             [add(CHUNKS, "    chunk_moe_keep: input", "    chunk_moe_recompute: true")]),
    "back end": ("chunk-moe-settings", f"{MOE}.chunk_moe_backend", "must be one of auto",
                 [add(CHUNKS, "    chunk_moe_backend: gpu")]),
    "dispatcher": ("dispatcher-name", f"{MOE}.dispatcher", "nearest one is chunkmoe",
                   [(DISPATCHER, "dispatcher: chunkmo")]),
    "EP balance": ("chunk-moe-neighbour", "features.enable_ep_balance", "use alltoall",
                   [("enable_ep_balance: false", "enable_ep_balance: true")]),
    "op replay": ("chunk-moe-neighbour", REPLAY, "use alltoall",
                  [("  recompute_plan:\n", scopes(f"{LAYERS}.{{*}}.self_attn", f"{LAYERS}.{{0-3}}.mlp"))]),
    "op replay without names": ("chunk-moe-neighbour", REPLAY, "must be a scope with apply_modules",
                                [("  recompute_plan:\n", "  recompute_plan:\n    op_replay_scopes: [attention]\n")]),
    "packed by name": ("chunk-mbs-packed", f"{MBS}.chunk_kwarg_names", "its rows are packed and are not samples",
                       [add("    chunk_mbs: 2", "    chunk_kwarg_names: [attention_mask, deepstack_visual_embeds]")]),
    "quantisation": ("chunk-moe-neighbour", "training.quantization_plan.recipe_name", "use alltoall",
                     [add("training:", "  quantization_plan: {recipe_name: mxfp8}")]),
    "LoRA": ("chunk-moe-neighbour", "training.lora.target_modules", "remove the experts from it",
             [add("training:", "  lora: {enable: true, target_modules: [mlp.experts.gate_up_proj]}")]),
    "no experts": ("experts-named", f"{MOE}.apply_modules", "need the modules that contain the experts",
                   [(f"  ep_plan:\n    apply_modules:\n      - {LAYERS}.{{*}}.mlp.experts\n", "  ep_plan:\n")]),
    "EP and ranks": ("ep-size", "parallel.expert_parallel_size", "number of ranks, 4",
                     [("expert_parallel_size: 2", "expert_parallel_size: 8")]),
    "EP and experts": ("ep-size", "parallel.expert_parallel_size", "number of experts, 16",
                       [("expert_parallel_size: 2", "expert_parallel_size: 3")]),
    "EP 0": ("ep-size", "parallel.expert_parallel_size", ">= 1",
             [("expert_parallel_size: 2", "expert_parallel_size: 0")]),
    "auto and a number": ("chunk-moe-settings", f"{MOE}.moe_num_chunks", "contradicts chunk_moe_auto: true",
                          [(CHUNKS, "moe_num_chunks: 2\n    chunk_moe_auto: true\n    chunk_moe_keep: rows")]),
    "auto and a size": ("chunk-moe-settings", f"{MOE}.moe_chunk_size", "contradicts chunk_moe_auto: true",
                        [(CHUNKS, "chunk_moe_auto: true\n    moe_chunk_size: 64")]),
    "pair and look-ahead": ("chunk-moe-settings", f"{MOE}.chunk_moe_lookahead", "with chunk_moe_schedule: pair",
                            [add(CHUNKS, "    chunk_moe_schedule: pair", "    chunk_moe_lookahead: 2")]),
    "most rows and a size": ("chunk-moe-settings", f"{MOE}.chunk_moe_max_rows", "no meaning with moe_chunk_size",
                             [(CHUNKS, "chunk_moe_max_rows: 9\n    moe_chunk_size: 512")]),
    "misspelt look-ahead": ("chunk-moe-settings", f"{MOE}.chunk_moe_look_ahead", "nearest one is chunk_moe_lookahead",
                            [add(CHUNKS, "    chunk_moe_look_ahead: 2")]),
    "rows below 0": ("chunk-moe-settings", f"{MOE}.chunk_moe_max_rows", "must be an integer >= 0",
                     [add(CHUNKS, "    chunk_moe_max_rows: -1")]),
    "EP 1": ("chunk-moe-off", "parallel.expert_parallel_size", "no effect",
             [("expert_parallel_size: 2", "expert_parallel_size: 1")]),
    "EP and nodes": ("ep-crosses-nodes", "parallel.expert_parallel_size", "number of devices with fast links",
                     [("expert_parallel_size: 2", "expert_parallel_size: 16")]),
    "unused keys": ("chunk-keys-unused", f"{MOE}.moe_num_chunks", "set it to chunkmoe",
                    [(DISPATCHER, "dispatcher: alltoall")]),
    "both sizes": ("both-sizes", f"{MOE}.moe_chunk_size", "both set", [add(CHUNKS, "    moe_chunk_size: 512")]),
    "two chunks": ("two-chunks-for-memory", f"{MOE}.moe_num_chunks", "the peak falls only a little",
                   [(CHUNKS, "moe_num_chunks: 2\n    chunk_moe_recompute: true")]),
    "look-ahead for memory": ("two-chunks-for-memory", f"{MOE}.moe_num_chunks", "but 4 chunks are resident at once",
                              [add(CHUNKS, "    chunk_moe_keep: rows", "    chunk_moe_lookahead: 3")]),
    "skip unread": ("skip-unread-unused", f"{MOE}.chunk_moe_skip_unread", "acts in the recompute",
                    [add(CHUNKS, "    chunk_moe_skip_unread: true"), ("  recompute: true", "  recompute: false")]),
    "few rows": ("few-rows", f"{MOE}.moe_num_chunks", "at most 96 rows", [(CHUNKS, "moe_num_chunks: 8")]),
    "a size as a number": ("empty-chunks", f"{MOE}.moe_num_chunks", "more chunks than the 2048 tokens",
                           [(CHUNKS, "moe_num_chunks: 100000")]),
    "few rows by size": ("few-rows", f"{MOE}.moe_chunk_size", "at most 24 rows", [(CHUNKS, "moe_chunk_size: 64")]),
    "one chunk": ("one-chunk", f"{MOE}.moe_num_chunks", "no all-to-all runs while", [(CHUNKS, "moe_num_chunks: 1")]),
    "one chunk by size": ("one-chunk", f"{MOE}.moe_chunk_size", "one chunk", [(CHUNKS, "moe_chunk_size: 2048")]),
    "no number of chunks": ("one-chunk", f"{MOE}.moe_num_chunks", "'not set': one chunk", [(f"    {CHUNKS}\n", "")]),
    "tensor parallel": ("tensor-parallel", "parallel.tensor_parallel_size", "refuses to start",
                        [("ulysses_parallel_size: 1", "tensor_parallel_size: 2")]),
    "Ulysses and heads": ("ulysses-heads", "parallel.ulysses_parallel_size", "model's linear_num_key_heads, 2",
                          [("ulysses_parallel_size: 1", "ulysses_parallel_size: 4")]),
    "Ulysses and attention": ("ulysses-attention", "model.attn_implementation", "attend only to those on the same",
                              [("ulysses_parallel_size: 1", "ulysses_parallel_size: 2"), (CHUNKS, "moe_num_chunks: 2"),
                               add("model:", "  model_id: qwen3_5_moe", "  attn_implementation: sdpa")]),
    "chunk size": ("chunk-size-collective", f"{MOE}.moe_chunk_size", "one more collective",
                   [(CHUNKS, "moe_chunk_size: 512")]),
    "a row per expert": ("dispatch-bytes", f"{MOE}.chunk_moe_dispatch", "times the bytes of per_rank with uniform",
                         [add(CHUNKS, "    chunk_moe_dispatch: per_expert")]),
    "launches": ("launch-bound", f"{MOE}.moe_num_chunks", "waits for its host to launch 4 chunks of 2048 tokens",
                 [(f"{EXAMPLE / 'tiny'}", f"{Path(__file__).parent / 'wide'}")]),
    "allgather": ("allgather-traffic", f"{MOE}.dispatcher", "on all 4 ranks",
                  [(DISPATCHER, "dispatcher: allgather"), ("expert_parallel_size: 2", "expert_parallel_size: 4")]),
    "misspelt dispatcher": ("misspelt-key", f"{MOE}.dispatchr", "nearest one is dispatcher",
                            [("dispatcher:", "dispatchr:")]),
    "misspelt switch": ("misspelt-key", "features.enable_chunk_mb", "is enable_chunk_mbs",
                        [("enable_chunk_mbs:", "enable_chunk_mb:")]),
    "misspelt section": ("misspelt-key", "feature", "is features", [("features:", "feature:")]),
    "misspelt steps": ("misspelt-key", "training.gradient_acumulation_steps", "is gradient_accumulation_steps",
                       [("gradient_accumulation_steps: 1", "gradient_acumulation_steps: 4")]),
    "misspelt batch": ("misspelt-key", "training.micro_batchsize", "is micro_batch_size",
                       [("micro_batch_size:", "micro_batchsize:")]),
    "misspelt iterations": ("misspelt-key", "training.train_iter", "is train_iters",
                            [add("training:", "  train_iter: 9")]),
    "misspelt last batch": ("misspelt-key", "data.dataloader_param.droplast", "is drop_last",
                            [("drop_last:", "droplast:")]),
    "misspelt length": ("misspelt-key", "data.dataset_param.basic_parameters.cutof_len", "is cutoff_len",
                        [("cutoff_len:", "cutof_len:")]),
    "misspelt parameters": ("misspelt-key", "data.dataset_param.basic_parameter", "is basic_parameters",
                            [("basic_parameters:", "basic_parameter:")]),
    "misspelt model": ("misspelt-key", "model.model_name_or_pth", "is model_name_or_path",
                       [("model_name_or_path:", "model_name_or_pth:")]),
    "misspelt loss": ("misspelt-key", "features.loss_cfg.router_aux_loss_ofload", "is router_aux_loss_offload",
                      [("router_aux_loss_offload:", "router_aux_loss_ofload:")]),
    "misspelt LoRA": ("misspelt-key", "training.lora.target_module", "is target_modules",
                      [add("training:", "  lora: {enable: true, target_module: [q_proj]}")]),
    "misplaced chunks": ("misplaced-key", "parallel.moe_num_chunks", f"belongs under {MOE}",
                         [(f"    {CHUNKS}\n", f"  {CHUNKS}\n")]),
    "misplaced plan": ("misplaced-key", "parallel.enable_chunk_mbs", "belongs under features",
                       [("  enable_chunk_mbs: true\n", ""),
                        add("  expert_parallel_size: 2", "  enable_chunk_mbs: true")]),
    "micro batch": ("positive-size", "training.micro_batch_size", ">= 1",
                    [("micro_batch_size: 4", "micro_batch_size: 0")]),
    "Ulysses": ("world-split", "parallel.ulysses_parallel_size", "must divide the number of ranks, 4",
                [("ulysses_parallel_size: 1", "ulysses_parallel_size: 3")]),
    "shards": ("world-split", "parallel.fully_shard_parallel_size", "write auto",
               [("fully_shard_parallel_size: auto", "fully_shard_parallel_size: 3")]),
    "data parallel": ("world-split", "parallel.data_parallel_size", "with 4 ranks it is 4",
                      [add("  ulysses_parallel_size: 1", "  data_parallel_size: 2")]),
    "global batch": ("global-batch", "training.global_batch_size", "uses 16, 4 x 4",
                     [add("training:", "  global_batch_size: 64")]),
    "accumulation": ("accumulation-gathers", "training.gradient_accumulation_steps", "gathers once",
                     [("accumulation_steps: 1", "accumulation_steps: 4"), ("chunk_mbs: true", "chunk_mbs: false")]),
    "chunk 0": ("chunk-mbs-settings", f"{MBS}.chunk_mbs", "must be an integer >= 1",
                [("chunk_mbs: 2", "chunk_mbs: 0")]),
    "unknown MBS key": ("chunk-mbs-settings", f"{MBS}.chunk_mb", "nearest one is chunk_mbs",
                        [("chunk_mbs: 2", "chunk_mb: 2")]),
    "no blocks": ("chunk-mbs-settings", f"{MBS}.apply_modules", "names of the blocks",
                  [(f"chunkmbs_plan:\n    apply_modules:\n      - {LAYERS}.{{*}}\n", "chunkmbs_plan:\n")]),
    "not recomputed": ("chunk-mbs-covered", f"{MBS}.apply_modules", "recompute_plan.apply_modules, too",
                       [(f"recompute_plan:\n    apply_modules:\n      - {LAYERS}.{{*}}",
                         f"recompute_plan:\n    apply_modules:\n      - {LAYERS}.{{0-2}}.mlp")]),
    "not offloaded": ("chunk-mbs-covered", f"{MBS}.apply_modules", "offload_plan.apply_modules, too",
                      [(f', "{LAYERS}.{{*}}"', "")]),
    "no recompute": ("chunk-mbs-memory", "features.recompute", "saves little memory",
                     [("  recompute: true", "  recompute: false")]),
    "no hooks": ("chunk-mbs-hooks", "parallel.fsdp_plan.hook_modules", "gathered once per micro-chunk",
                 [(f"    hook_modules:\n      - {LAYERS}.{{*}}\n", "")]),
    "offloaded loss": ("chunk-mbs-loss", "features.loss_cfg.router_aux_loss_offload", "set it to false",
                       [("aux_loss_offload: false", "aux_loss_offload: true")]),
    "chunk layer": ("chunk-mbs-neighbour", "features.enable_chunk_layer", "turn it off",
                    [add("features:", "  enable_chunk_layer: true")]),
    "chunk of a batch": ("chunk-mbs-size", f"{MBS}.chunk_mbs", "no effect", [("chunk_mbs: 2", "chunk_mbs: 4")]),
    "uneven": ("chunk-mbs-uneven", "training.micro_batch_size", "the last micro-chunk has 1",
               [("micro_batch_size: 4", "micro_batch_size: 5")]),
    "uneven validation": ("chunk-mbs-uneven", "training.val_micro_batch_size", "does not divide",
                          [add("training:", "  val_micro_batch_size: 3")]),
    "last batch": ("chunk-mbs-last-batch", "data.dataloader_param.drop_last", "the same number",
                   [("drop_last: true", "drop_last: false")]),
    "batch dimension": ("chunk-mbs-settings", f"{MBS}.batch_dim", "must be 0 or 1",
                        [add("    chunk_mbs: 2", "    batch_dim: 2")]),
    "wildcard": ("wildcard", "parallel.fsdp_plan.apply_modules", "{a} is not a wildcard",
                 [("- lm_head", "- lm_head.{a}")]),
    "no such module": ("unmatched-name", "parallel.fsdp_plan.apply_modules", "nearest one is lm_head",
                       [("- lm_head", "- lm_heat")]),
    "nested blocks": ("chunk-mbs-order", f"{MBS}.apply_modules", "inside other modules of the list",
                      [(f"chunkmbs_plan:\n    apply_modules:\n      - {LAYERS}.{{*}}\n",
                        f"chunkmbs_plan:\n    apply_modules:\n      - {LAYERS}.{{*}}\n      - {LAYERS}.{{*}}.mlp\n")]),
    "no model": ("model-not-checked", "model.model_name_or_path", "were not checked", [("/tiny", "/none")]),
}  # fmt: skip


def find(text):
    return lint.check(Document(text, str(EXAMPLE / "seeded.yaml")), WORLD)


@pytest.fixture(scope="module")
def clean():
    return find(CLEAN)


def test_nothing_is_found_where_nothing_is_wrong(clean):
    assert clean == []
    assert len(SEEDS) >= 25


@pytest.mark.parametrize("name", SEEDS)
def test_a_seeded_mistake_is_found(name, clean):
    rule, path, part, changes = SEEDS[name]
    text = spoilt(*changes)
    found = [each for each in find(text) if each.rule == rule and each.path == path and part in each.message]
    assert len(found) == 1, find(text)
    assert "\n" not in found[0].message
    assert not [finding for finding in clean if finding.rule == rule]
    line = text.splitlines()[found[0].line - 1]
    keys = path.split(".")
    if rule in ("wildcard", "unmatched-name"):
        assert line == f"      {changes[0][1]}  # the last one", "not the line of the item"
    elif Document(text, "seeded").find(path) is not None:
        assert f" {keys[-1]}:" in f" {line}" or f"{{{keys[-1]}:" in line


def test_one_mistake_is_told_once():
    """A wildcard that cannot be read stands in the way of other rules, too."""
    text = spoilt((f"hook_modules:\n      - {LAYERS}.{{*}}", f"hook_modules:\n      - {LAYERS}.{{x}}"))
    assert [finding.rule for finding in find(text)] == ["wildcard"]


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("micro_batch_size: 4", "training.micro_batch_size"),
        ("gradient_accumulation_steps: 1", "training.gradient_accumulation_steps"),
        ("ulysses_parallel_size: 1", "parallel.ulysses_parallel_size"),
        ("expert_parallel_size: 2", "parallel.expert_parallel_size"),
        ("chunk_mbs: 2", f"{MBS}.chunk_mbs"),
    ],
)
def test_a_value_below_1_is_one_error_and_nothing_that_follows_from_it(setting, path, value):
    key = setting.partition(":")[0]
    plain = [add("training:", "  global_batch_size: 16"), (setting, f"{key}: {value}")]
    without = [*plain, ("  enable_chunk_mbs: true", "  enable_chunk_mbs: false")]
    for changes in (plain,) if key == "chunk_mbs" else (plain, without):
        assert [(finding.severity, finding.path) for finding in find(spoilt(*changes))] == [("error", path)]


@pytest.mark.parametrize("steps", [1, 4])
def test_a_micro_batch_below_1_says_nothing_of_accumulation(steps):
    text = spoilt(
        ("micro_batch_size: 4", "micro_batch_size: 0"),
        ("accumulation_steps: 1", f"accumulation_steps: {steps}"),
        ("  enable_chunk_mbs: true", "  enable_chunk_mbs: false"),
    )
    assert [finding.rule for finding in find(text)] == ["positive-size"]


@pytest.mark.parametrize(
    "keys",
    [
        "chunk_moe_auto: true\n    chunk_moe_keep: rows",
        "chunk_moe_auto: true\n    chunk_moe_max_rows: 64\n    chunk_moe_lookahead: 2",
        "moe_num_chunks: 4\n    chunk_moe_max_rows: 64\n    chunk_moe_overlap_shared_expert: true",
        "moe_num_chunks: 4\n    chunk_moe_keep: rows\n    chunk_moe_lookahead: 2",
    ],
)
def test_chunks_that_are_chosen_or_ahead_are_right(keys):
    assert find(spoilt((CHUNKS, keys))) == []


def test_contradictions_of_an_automatic_number_are_all_that_is_told():
    keys = "moe_num_chunks: 2\n    moe_chunk_size: 8\n    chunk_moe_auto: true\n    chunk_moe_keep: input"
    assert [(finding.rule, finding.path) for finding in find(spoilt((CHUNKS, keys)))] == [
        ("chunk-moe-settings", f"{MOE}.moe_num_chunks"), ("chunk-moe-settings", f"{MOE}.moe_chunk_size"),
    ]  # fmt: skip


def test_keys_of_models_and_data_sets_are_left_alone():
    more = "  num_layers: 3\n  mtp_layers: 1\n  trust_remote_codes: x\n"
    assert (
        find(spoilt(("model:\n", f"model:\n{more}"), ("  dataset_param:\n", "  dataset_param:\n    attrs: 1\n"))) == []
    )


def test_a_key_near_to_two_is_told_with_both_and_not_corrected():
    (found,) = find(spoilt(add("training:", "  adam_beta: 0.9")))
    assert found.message.endswith("the nearest ones are adam_beta1, adam_beta2") and found.edits == ()


@pytest.mark.parametrize(
    ("key", "letters", "corrected"), [("grad_accumulation_steps", 4, False), ("gradient_acumulation_step", 2, True)]
)
def test_a_key_that_is_further_than_two_letters_is_told_and_not_corrected(key, letters, corrected):
    assert letters_apart(key, "gradient_accumulation_steps") == letters
    (found,) = find(spoilt(("gradient_accumulation_steps:", f"{key}:")))
    assert "nearest one is gradient_accumulation_steps" in found.message and bool(found.edits) == corrected


@pytest.mark.parametrize("name", ["two chunks", "look-ahead for memory", "skip unread", "EP and nodes"])
def test_what_has_several_right_answers_is_not_corrected(name):
    rule, _, _, changes = SEEDS[name]
    assert [finding.edits for finding in find(spoilt(*changes)) if finding.rule == rule] == [()]


def test_a_fast_domain_larger_than_a_node_is_no_warning():
    text = spoilt(("expert_parallel_size: 2", "expert_parallel_size: 16"))
    found = lint.check(Document(text, str(EXAMPLE / "seeded.yaml")), 16, devices_per_node=16)
    assert "ep-crosses-nodes" not in {finding.rule for finding in found}


def test_op_replay_of_attention_and_of_a_vision_tower_is_no_mistake():
    """With activations that are stashed, as MindSpeed-MM's yamls for GLM-5.3 and MiniMax-M3 have it."""
    text = spoilt(
        ("  recompute_plan:\n", scopes(f"{LAYERS}.{{*}}.self_attn", "model.visual.blocks.{*}")),
        ("  activation_offload_plan:\n", "  activation_offload_plan:\n    impl: stash\n"),
    )
    assert not find(text)


def replayed(scopes):
    return {"features.recompute": True, REPLAY: scopes, f"{MOE}.apply_modules": ["layers.{*}"]}


@pytest.mark.parametrize("scopes", [5, "attention", ["attention"], [{"apply_modules": "x"}], [{"apply_modules": [5]}]])
def test_scopes_of_op_replay_that_are_none_are_one_line(scopes):
    with pytest.raises(ConfigError, match=f"^{REPLAY}: .*: must be a scope with apply_modules; ") as error:
        check_op_replay(replayed(scopes).get)
    assert "\n" not in str(error.value)


def test_no_scopes_of_op_replay_and_scopes_without_modules_are_fine():
    for scopes in (None, [], [{}], [{"name": "x", "apply_modules": []}]):
        check_op_replay(replayed(scopes).get)


def test_every_rule_has_a_seed():
    assert {rule.id for rule in lint.RULES} == {seed[0] for seed in SEEDS.values()}
    assert len({rule.id for rule in lint.RULES}) == len(lint.RULES)


def test_all_mistakes_of_one_plan_are_told_at_once():
    text = spoilt((CHUNKS, "moe_num_chunks: -1\n    chunk_moe_schedule: x\n    moe_size: 3"))
    assert [finding.path.rpartition(".")[2] for finding in find(text)] == [
        "moe_num_chunks", "chunk_moe_schedule", "moe_size",
    ]  # fmt: skip


def test_what_needs_ranks_is_not_checked_without_them():
    text = spoilt(add("  ulysses_parallel_size: 1", "  data_parallel_size: 3"))
    assert lint.check(Document(text, str(EXAMPLE / "seeded.yaml"))) == []


def test_recompute_of_an_older_host_stands_under_parallel():
    old = spoilt(
        ("  recompute: true\n  recompute_plan:", "  other_plan:"),
        ("  enable_activation_offload: true\n", ""),
        ("  ulysses_parallel_size: 1", f"  recompute: true\n  recompute_plan: {{apply_modules: ['{LAYERS}.{{*}}']}}"),
        ("model:\n", f"model:\n  activation_offload_plan: {{apply_modules: ['{LAYERS}.{{*}}']}}\n"),
    )
    assert find(old) == []
    plan = f"offload_plan: {{apply_modules: ['{LAYERS}."
    other = old.replace(f"{plan}{{*}}", f"{plan}{{1-3}}")
    (found,) = [each for each in find(other) if each.rule == "chunk-mbs-covered"]
    assert "model.activation_offload_plan.apply_modules, too" in found.message


def test_the_table_in_the_documentation_is_that_of_the_code():
    text = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
    assert report.markdown() in text, "put the output of `mindspeed-chunk lint --markdown` into docs/lint.md"
