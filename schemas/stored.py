"""Records that are kept or sent as JSON, whole, and read back only as what they are."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import InputError


class Frozen(BaseModel):
    """Never changed; takes no field that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Stored(Frozen):
    """What is an object in the store, or a message's value, by itself.

    Attributes:
        what: is named in the error.
        refusal: the class of that error.
    """

    what: ClassVar[str]
    refusal: ClassVar[type[InputError]] = InputError

    def to_bytes(self) -> bytes:
        """As it is stored or sent."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `to_bytes` gave; raises `refusal` where it is something else."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise cls.refusal(f"not {cls.what}: {error.errors()[0]['msg']}") from error
