"""The `model` section of the yaml."""

from dataclasses import dataclass, field

from mindspeed_mm.fsdp.params.utils import allow_extra_fields


@allow_extra_fields
@dataclass
class ModelArguments:
    model_id: str | None = field(default=None)
    model_name_or_path: str | None = field(default=None)
