"""The base of every section of a job: frozen, closed to unknown keys, with error messages that name the field."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from textwrap import dedent
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, get_args

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, ValidationInfo, field_validator
from pydantic_core import CoreSchema, PydanticKnownError

from weft.job.errors import JobError
from weft.job.validation import describe_errors

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


MAX_INTEGER = 2**62
"""Limit of integers without a limit of their own: they must fit into 64 bits, with room for arithmetic."""


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

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
    job_type: ClassVar[type[BaseModel] | None] = None
    """The whole job, for messages that name a field by its full path; set by weft/job/schema.py."""

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """A section from plain data; a JobError lists every mistake, one line each."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise JobError(describe_errors(error, cls, cls.job_type)) from None

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Itself, as it is frozen: pydantic copies defaults, which took most of the time of reading a job."""
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema with each field's docstring as its description; reading sources at import would be slow."""
        made = handler(schema)
        properties = handler.resolve_ref_schema(made).get("properties", {})
        for name, text in field_docs(cls).items():
            properties.get(name, {}).setdefault("description", text)
        return made

    @field_validator("*", mode="before")
    @classmethod
    def _check_plain_values(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for numbers (YAML reads `yes` as true, Python would accept it as 1), huge integers, and
        text that cannot be written to a file or passed to the system."""
        field = cls.model_fields[info.field_name or ""]
        annotation: Any = field.annotation
        types = plain_types(annotation)
        has_limit = any(hasattr(limit, "le") or hasattr(limit, "lt") for limit in field.metadata)
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, bool) and {bool, Any}.isdisjoint(types) and {int, float} & types:
                raise PydanticKnownError("int_type" if int in types else "float_type")
            if isinstance(item, int) and Any not in types and not has_limit and abs(item) >= MAX_INTEGER:
                raise ValueError(f"must be below {MAX_INTEGER}")
            if isinstance(item, str) and not _is_writable(item):
                raise ValueError("must be text without NUL and invalid Unicode characters")
        return value


def limits(*fields: str, valid: Callable[[Any], bool], must: str) -> Any:
    """A validator of fields that are a number or text such as auto: `must` is the rest of the message."""

    def check(cls: type[Section], value: Any) -> Any:
        if not isinstance(value, str) and not valid(value):
            raise ValueError(f"must be {must}")
        return value

    return field_validator(*fields)(classmethod(check))


@functools.cache
def field_docs(section: type[Section]) -> dict[str, str]:
    """The docstrings below the fields of a section and of the sections it inherits from."""
    docs: dict[str, str] = {}
    for kind in reversed([k for k in section.__mro__ if issubclass(k, Section)]):
        body = cast(ast.ClassDef, ast.parse(dedent(inspect.getsource(kind))).body[0]).body
        for field, below in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(field.target, ast.Name):
                docs[field.target.id] = inspect.cleandoc(str(ast.literal_eval(below.value)))
    return docs


def _is_writable(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


@functools.cache
def plain_types(annotation: Any) -> frozenset[Any]:
    """The types an annotation is made of; the members of a Literal count by their type."""
    if not (parts := get_args(annotation)):
        return frozenset({annotation})
    found = (plain_types(part) if not isinstance(part, int | str) else {type(part)} for part in parts)
    return frozenset(kind for kinds in found for kind in kinds)
