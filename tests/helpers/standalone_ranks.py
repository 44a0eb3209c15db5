"""What the tests of the embedded trainer run on ranks, and the tiny configuration they run it with."""

import contextlib
import io
from pathlib import Path

import torch.distributed as dist

from mindspeed_chunk.standalone.config import load_config

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "qwen3_5_35b"
YAML = str(EXAMPLE / "tiny.yaml")
# the example names its model by a path relative to the checkout, and tests run anywhere
MODEL = f"model.model_name_or_path={EXAMPLE / 'tiny'}"


def read(*overrides, world_size=2):
    """The tiny configuration with some keys set."""
    config, _ = load_config(YAML, [MODEL, *overrides], world_size)
    return config


def trainer(*overrides):
    from mindspeed_chunk.standalone.prepare import prepare
    from mindspeed_chunk.standalone.train import Trainer

    return Trainer(prepare(read(*overrides, world_size=dist.get_world_size())))


def curves(rank, world_size, runs, steps):
    """Train once for each list of overrides in `runs` {name: overrides}. Returns {name: [(loss, grad norm), ...]}."""
    result = {}
    for name, overrides in runs.items():
        this = trainer(*overrides)
        result[name] = [(losses["loss"], norm) for losses, norm in map(this.step, range(steps))]
    return result


def gradients(rank, world_size, runs):
    """First-step gradients for each list of overrides: {name: {"losses": ..., "grads": {parameter: whole tensor}}}.

    Experts' gradients are those of this rank's experts.
    """
    result = {}
    for name, overrides in runs.items():
        this = trainer(*overrides)
        losses = this.backward(0)
        grads = {key: p.grad.full_tensor() for key, p in this.model.named_parameters() if p.grad is not None}
        result[name] = {"losses": losses, "grads": grads}
    return result


def user_errors(rank, world_size, cases):
    """Run the command line with each list of arguments in `cases` {name: arguments}: {name: (exit code, stderr)}."""
    from mindspeed_chunk.standalone import __main__ as command_line

    command_line.GRACE_S = 0
    result = {}
    for name, arguments in cases.items():
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            code = command_line.main(arguments)
        result[name] = (code, stderr.getvalue())
    return result
