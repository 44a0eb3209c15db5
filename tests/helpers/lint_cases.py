"""A yaml in which nothing is wrong, risky or wasteful, and ways to spoil it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "qwen3_5_35b"
WORLD = 4

# 16 experts, top 3: 2048 tokens a micro-chunk, 8 experts a rank and 4 chunks make 192 rows an expert
CLEAN = f"""\
parallel:
  fully_shard_parallel_size: auto
  fsdp_plan:
    apply_modules:
      - model.visual
      - model.language_model.layers.{{*}}
      - model.language_model.layers.{{*}}.mlp.experts
      - lm_head  # the last one
    hook_modules:
      - model.language_model.layers.{{*}}
  ulysses_parallel_size: 1
  expert_parallel_size: 2
  ep_plan:
    apply_modules:
      - model.language_model.layers.{{*}}.mlp.experts
    dispatcher: chunkmoe  # 分块
    moe_num_chunks: 4
data:
  dataset_param:
    basic_parameters: {{cutoff_len: 1024}}
  dataloader_param:
    drop_last: true
model:
  model_name_or_path: {EXAMPLE / "tiny"}
features:
  loss_cfg:
    router_aux_loss_offload: false
  recompute: true
  recompute_plan:
    apply_modules:
      - model.language_model.layers.{{*}}
  enable_activation_offload: true
  activation_offload_plan:
    apply_modules: [model.visual.blocks.{{*}}, "model.language_model.layers.{{*}}"]  # both
  enable_chunk_mbs: true
  chunkmbs_plan:
    apply_modules:
      - model.language_model.layers.{{*}}
    chunk_mbs: 2
  enable_ep_balance: false
training:
  micro_batch_size: 4
  gradient_accumulation_steps: 1
""".replace("[model.visual.blocks.{*}", '["model.visual.blocks.{*}"')


def spoilt(*changes):
    """CLEAN with each (old, new) put in once; the first must be there exactly as often as it is told apart."""
    text = CLEAN
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text
