"""Dataclasses from nested mappings, and the decorator that lets them take keys they do not know."""

import functools
import logging
import types
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from mindspeed_mm.fsdp.log import print_rank

logger = logging.getLogger(__name__)


def allow_extra_fields(cls):
    original = cls.__init__
    known = {field.name for field in fields(cls)}

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        extra = {key: kwargs.pop(key) for key in list(kwargs) if key not in known}
        original(self, *args, **kwargs)
        self._extra_fields = extra
        for key, value in extra.items():
            print_rank(logger.warning, f"Field '{key}' is not defined in {cls.__name__}. Adding as dynamic attribute.")
            setattr(self, key, types.SimpleNamespace(**value) if isinstance(value, dict) else value)

    cls.__init__ = __init__
    return cls


def instantiate_dataclass(dataclass_type: type, data: dict[str, Any]) -> Any:
    hints = get_type_hints(dataclass_type)
    values = {}
    for key, value in data.items():
        nested = is_dataclass(hints.get(key)) and isinstance(value, dict)
        values[key] = instantiate_dataclass(hints[key], value) if nested else value
    return dataclass_type(**values)
