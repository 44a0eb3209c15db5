"""Names of a model's modules, from its config folder: the model is built on the meta device, without weights."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

from mindspeed_chunk import model_config

MAX_MODULES = 10_000  # a second's work


class CannotBuild(Exception):
    """The reason, in one line."""


@contextlib.contextmanager
def _at_most(number: int) -> Iterator[None]:
    """Raises CannotBuild inside the block if more modules are made."""
    from torch.nn.modules.module import register_module_module_registration_hook

    made = itertools.count(1)

    def count(*registered: object) -> None:
        if next(made) > number:
            raise CannotBuild(f"the model has more than {number} modules")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


@functools.cache
def module_names(folder: Path) -> list[str]:
    """All names, as `named_modules` has them. Raises CannotBuild. Code that comes with the folder is not run."""
    try:
        model_config.read(folder)
    except model_config.BadConfig as error:
        raise CannotBuild(str(error)) from None
    try:
        import torch
        import transformers
    except ImportError as error:
        raise CannotBuild(f"{error.name} is not installed") from None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            # imports the model's module, which must not happen on the meta device
            cls = getattr(transformers, (config.architectures or [""])[0], None)
            if cls is None:
                raise CannotBuild(f"transformers {transformers.__version__} has no {config.architectures}")
            with _at_most(MAX_MODULES), torch.device("meta"):
                return [name for name, _ in cls(config).named_modules()]
    except CannotBuild:
        raise
    except Exception as error:  # a config that transformers cannot use fails in many ways
        raise CannotBuild(f"transformers: {(str(error).split(chr(10)) or [''])[0][:200]}") from None
