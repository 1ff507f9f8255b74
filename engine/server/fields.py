"""What the bodies of all routes have in common: these fields and no others. Part 4."""

from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Fields(BaseModel):
    """A JSON object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _not_more_names_than_needed(cls, body: Any) -> Any:
        """Keep at most one name more than there are fields. One of the kept names is then unknown, so the
        body is refused, and the other names need no check.
        """
        return dict(islice(body.items(), len(cls.model_fields) + 1)) if isinstance(body, dict) else body
