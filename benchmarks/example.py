"""What the benchmarks of the embedded trainer share: the tiny example, and tables."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch.distributed as dist

from mindspeed_chunk.output import Table, terminal, wide_console
from mindspeed_chunk.standalone.config import load_config
from mindspeed_chunk.standalone.prepare import prepare
from mindspeed_chunk.standalone.train import Trainer

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "qwen3_5_35b"
CHUNK_MBS = ("features.enable_chunk_mbs=true", "features.enable_activation_offload=true")
# the balance loss is not linear in the batch, so accumulation has another one than the whole batch
LINEAR = ("features.loss_cfg.router_aux_loss_coef=0",)


def batch(size, accumulation=1):
    return (f"training.micro_batch_size={size}", f"training.gradient_accumulation_steps={accumulation}")


def sequence(length):
    return (f"data.dataset_param.basic_parameters.cutoff_len={length}",)


def trainer(*overrides: str) -> Trainer:
    model = f"model.model_name_or_path={EXAMPLE / 'tiny'}"
    config, _ = load_config(str(EXAMPLE / "tiny.yaml"), [model, *overrides], dist.get_world_size())
    return Trainer(prepare(config))


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    wide_console().print(terminal(Table(title, columns, list(rows))))
