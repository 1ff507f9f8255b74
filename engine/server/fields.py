"""The base class of the bodies of all routes. Part 4."""

from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Fields(BaseModel):
    """A JSON object with the fields of the subclass and no others: an unknown field is refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_surplus_names(cls, body: Any) -> Any:
        """Keep at most one name more than the class has fields. If there were more, one of the kept names is
        unknown, so the body is refused; checking thousands of further names would take long.
        """
        if not isinstance(body, dict):
            return body
        return dict(islice(body.items(), len(cls.model_fields) + 1))
