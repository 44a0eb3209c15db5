"""The `features` section of the yaml."""

from mindspeed_mm.fsdp.params.feature_plans import FeatureArguments  # noqa: F401
