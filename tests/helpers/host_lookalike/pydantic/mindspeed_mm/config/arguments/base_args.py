"""The pydantic base of all sections: extra keys are kept, assignments are validated."""

import warnings

from pydantic import BaseModel

# the host uses pydantic 1's way of configuring a model, and so does this
warnings.filterwarnings("ignore", message="Support for class-based `config`", category=DeprecationWarning)


class BaseArguments(BaseModel):
    class Config:
        extra = "allow"
        validate_assignment = True

    def to_dict(self):
        return self.model_dump()
