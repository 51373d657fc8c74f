"""Parameters that every study of a served model has: which model, how its FFN is cut, and on which device."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ..common import resolve_device
from ..engine.experts import SPLITS
from .parameters import StudyParameters


def _known(device: str) -> str:
    resolve_device(device)
    return device


Device = Annotated[str, AfterValidator(_known)]


class ServedModel(StudyParameters):
    """The first parameters of such a study's notebook."""

    model: str
    ffn: Literal["moe", "dense"]
    experts: int = Field(ge=2)
    top_k: int = Field(ge=1)
    expert_split: Literal[SPLITS]

    @model_validator(mode="after")
    def _experts_used(self) -> Self:
        if self.ffn == "moe" and self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k} does not fit {self.experts} experts: give 1 ... {self.experts}.")
        return self
