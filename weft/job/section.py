"""The base of every section of a job: frozen, closed to unknown keys, with error messages that name the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

from weft.job.errors import JobError
from weft.job.validation import describe_errors

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _JobErrors(ModelMetaclass):
    """Raises a JobError instead of pydantic's ValidationError, also for sections constructed in Python."""

    if not TYPE_CHECKING:  # type checkers should see the fields of each section

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*args, **fields)
            except ValidationError as error:
                raise JobError(describe_errors(error, cls, cls.job_type)) from None


class Section(BaseModel, metaclass=_JobErrors):
    """A part of a job: frozen, and closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )
    job_type: ClassVar[type[BaseModel] | None] = None
    """The whole job, for messages that name a field by its full path; set by weft/job/schema.py."""

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """A section from plain data; a JobError lists every mistake, one line each."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise JobError(describe_errors(error, cls, cls.job_type)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads `yes` and `on` as true, which Python would accept as 1."""
        types = _plain_types(cls.model_fields[info.field_name or ""].annotation)
        if {bool, Any}.isdisjoint(types) and {int, float} & types:
            items = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(item, bool) for item in items):
                raise PydanticKnownError("int_type" if int in types else "float_type")
        return value


def _plain_types(annotation: Any) -> set[Any]:
    """The types an annotation is made of; the members of a Literal count by their type."""
    if not (parts := get_args(annotation)):
        return {annotation}
    return {
        kind for part in parts for kind in (_plain_types(part) if not isinstance(part, int | str) else {type(part)})
    }
