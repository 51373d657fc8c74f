"""A notebook's parameters as a checked record: the names and bounds that the runner enforces before anything runs."""

from typing import Any, Mapping, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from ..common import BadInput


class StudyParameters(BaseModel):
    """Base of every study's ``Parameters``. A field is a parameter of the notebook of the same number."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """Build from values; raises BadInput with one sentence a wrong value."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise BadInput(" ".join(_sentence(item) for item in error.errors())) from None

    @classmethod
    def from_notebook(cls, namespace: Mapping[str, Any]) -> Self:
        """Build from a notebook's ``globals()``, taking the fields' names only."""
        missing = [name for name in cls.model_fields if name not in namespace]
        if missing:
            raise BadInput(f"the parameters cell lacks {', '.join(missing)}: run it first, or add the line.")
        return cls.checked({name: namespace[name] for name in cls.model_fields})


def _sentence(item: dict) -> str:
    name = ".".join(str(part) for part in item["loc"]) or "parameters"
    cause = item.get("ctx", {}).get("error")
    if cause is not None:
        return f"{name} = {item['input']!r}: {cause}" if item["loc"] else str(cause)
    return f"{name} = {item['input']!r} cannot be used: {item['msg'][0].lower()}{item['msg'][1:]}."
