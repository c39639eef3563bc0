"""Types of the parts of a request that all dialects share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

Text = Annotated[str, StringConstraints(max_length=10_000_000)]


class LooseModel(BaseModel):
    """Part of a request. Unknown fields in it are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
