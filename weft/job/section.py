"""What every section of a job is: frozen, closed to unknown keys, and clear about mistakes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

from weft.job.errors import JobError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _Spoken(ModelMetaclass):
    """Makes sections whose mistakes are told in a person's words, also when they are made in Python."""

    if not TYPE_CHECKING:  # a checker shall see the fields of each section

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*args, **fields)
            except ValidationError as error:
                raise _told(error, cls) from None


def _told(error: ValidationError, section: type[BaseModel]) -> JobError:
    from weft.job.validation import in_words  # it knows every section, and so comes after them

    return JobError(in_words(error, section))


class Section(BaseModel, metaclass=_Spoken):
    """A part of a job: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """From plain data; a JobError names every mistake, one line each."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _told(error, cls) from None

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads yes and on as true, which Python takes for 1."""
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if {bool, Any}.isdisjoint(kinds) and {int, float} & kinds:
            items = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(item, bool) for item in items):
                raise PydanticKnownError("int_type" if int in kinds else "float_type")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The plain types an annotation is made of; a number that stands for itself counts as one."""
    if not (parts := get_args(annotation)):
        return {annotation}
    return {kind for part in parts for kind in (_kinds(part) if not isinstance(part, int | str) else {type(part)})}
