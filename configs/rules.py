"""Field types of the schema and the check that holds a value against them.

A field's annotation is its whole rule: `PositiveInt`, `Literal[...]`, `tuple[PositiveInt, ...]`,
`X | None`. `CheckedArgs.__post_init__` conforms every field to it once, so a dataclass built in
code is as strict as one built from a gin file.
"""

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

_INT64_LIMIT = 2**63


class ConfigError(ValueError):
    """A setting that cannot be used. The message names field, value, rule and way out.

    `fields` lists the settings involved ("TrainerArgs.seed"), the one to change first; the loader
    turns them into files and lines.
    """

    def __init__(self, message: str, *fields: str) -> None:
        super().__init__(message)
        self.fields = fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """Bounds of a number; None = unbounded on that side."""

    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = ((">=", self.low), (">", self.above), ("<=", self.high), ("<", self.below))
        return " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)


@dataclasses.dataclass(frozen=True)
class NonEmpty:
    """The list or text must hold something."""


@dataclasses.dataclass(frozen=True)
class InModuleName:
    """The text becomes part of a module's name, and so of the names in checkpoints."""

    def holds(self, value: str) -> bool:
        return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", value) is not None

    def __str__(self) -> str:
        return "of letters, digits, _ and - (not first)"


@dataclasses.dataclass(frozen=True)
class Spellings:
    """Values users already have in their files -> the value this code knows (None for absent)."""

    known: tuple[tuple[Any, Any], ...]

    def translate(self, value: Any) -> Any:
        for spelling, meaning in self.known:
            if type(spelling) is type(value) and spelling == value:
                return meaning
        return value


PositiveInt = Annotated[int, Range(low=1)]
NonNegativeInt = Annotated[int, Range(low=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(low=0)]
Fraction = Annotated[float, Range(low=0, high=1)]
BelowOne = Annotated[float, Range(low=0, below=1)]
Name = Annotated[str, NonEmpty()]
ModuleName = Annotated[str, InModuleName()]
OptionalPath = Annotated[str | None, Spellings((("", None),))]
OptionalSize = Annotated[int | None, Spellings(((-1, None),)), Range(low=1)]


class MismatchError(Exception):
    """A value that does not fit its annotation; str() is the way out, possibly empty."""


class CheckedArgs:
    """Base of the schema's dataclasses: conforms every field to its annotation."""

    def __post_init__(self) -> None:
        class_name = type(self).__name__
        defaults = default_values(type(self))
        for field, hint in field_hints(type(self)).items():
            value = getattr(self, field)
            try:
                conformed = conform(value, hint)
            except MismatchError as mismatch:
                default = f"remove it for the default {show(defaults.get(field))}"
                way_out = str(mismatch) or (default if field in defaults else "change it")
                raise ConfigError(
                    f"{class_name}.{field} must be {describe(hint)}, got {show(value)}; {way_out}",
                    f"{class_name}.{field}",
                ) from None
            object.__setattr__(self, field, conformed)


def field_hints(cls: type) -> dict[str, Any]:
    """Field name -> annotation with its marks, in declaration order."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def default_values(cls: type) -> dict[str, Any]:
    """Field name -> default of every field that need not be given."""
    return {
        field.name: field.default
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING
    }


def conform(value: Any, hint: Any) -> Any:
    """The value in the form the schema stores (tuples, floats, canonical names).

    Raises MismatchError when it does not fit.
    """
    origin = get_origin(hint)
    if origin is Annotated:
        base, *marks = get_args(hint)
        return _conform_marked(value, base, marks)
    if origin in (Union, types.UnionType):
        return _conform_union(value, get_args(hint))
    if origin is Literal:
        return _conform_choice(value, get_args(hint))
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise MismatchError(
                f"write [{value!r}]" if isinstance(value, (str, int, float)) else ""
            )
        return tuple(conform(item, get_args(hint)[0]) for item in value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise MismatchError("")
        key_hint, item_hint = get_args(hint)
        return {conform(k, key_hint): conform(v, item_hint) for k, v in value.items()}
    return _conform_scalar(value, hint)


def _conform_marked(value: Any, base: Any, marks: list[Any]) -> Any:
    for mark in marks:
        if isinstance(mark, Spellings):
            value = mark.translate(value)
    value = conform(value, base)
    for mark in marks:
        if isinstance(mark, Range) and isinstance(value, (int, float)) and not mark.holds(value):
            raise MismatchError("")
        if isinstance(mark, NonEmpty) and value is not None and len(value) == 0:
            raise MismatchError("give at least one entry" if value == () else "give a name")
        if isinstance(mark, InModuleName) and not mark.holds(value):
            raise MismatchError(f"rename {show(value)}, for example to {_module_name(value)!r}")
    return value


def _conform_union(value: Any, members: tuple[Any, ...]) -> Any:
    if value is None and types.NoneType in members:
        return None
    reasons = []
    for member in members:
        if member is not types.NoneType:
            try:
                return conform(value, member)
            except MismatchError as mismatch:
                reasons.append(str(mismatch))
    raise MismatchError(next((reason for reason in reasons if reason), ""))


def _conform_choice(value: Any, choices: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        for choice in choices:
            if choice.casefold() == value.casefold():
                return choice
        raise MismatchError(did_you_mean(value, choices))
    raise MismatchError("")


def _conform_scalar(value: Any, kind: type) -> Any:
    if kind is types.NoneType:
        if value is not None:
            raise MismatchError("")
        return None
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < _INT64_LIMIT else math.inf
    fits = type(value) is kind if kind in (int, float, bool, str) else isinstance(value, kind)
    if not fits:
        raise MismatchError(_way_out(value, kind))
    if kind is float and not math.isfinite(value):
        raise MismatchError("give a finite number")
    if kind is int and abs(value) >= _INT64_LIMIT:
        raise MismatchError("it does not fit in 64 bits")
    return value


def _module_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", text).lstrip("-") or "name"


def _way_out(value: Any, kind: type) -> str:
    if isinstance(value, bool):
        return f"write {'a number' if kind in (int, float) else 'text in quotes'}"
    if isinstance(value, str):
        quoted_number = kind in (int, float) and value.lstrip("-").replace(".", "", 1).isdigit()
        quoted_truth = kind is bool and value.lower() in ("true", "false")
        if quoted_number or quoted_truth:
            return f"write {value.capitalize() if quoted_truth else value} without quotes"
    if kind is int and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind is bool and value in (0, 1):
        return f"write {bool(value)}"
    return ""


def describe(hint: Any) -> str:
    """The rule of an annotation in words: `an integer >= 1 or None`."""
    origin = get_origin(hint)
    if origin is Annotated:
        base, *marks = get_args(hint)
        bounds = "".join(f" {mark}" for mark in marks if isinstance(mark, (Range, InModuleName)))
        words = describe(base)
        if bounds and words.endswith(" or None"):
            words = f"{words.removesuffix(' or None')}{bounds} or None"
        else:
            words += bounds
        return f"a non-empty {words.removeprefix('a ')}" if NonEmpty() in marks else words
    if origin in (Union, types.UnionType):
        return " or ".join(describe(member) for member in get_args(hint))
    if origin is Literal:
        choices = [repr(choice) for choice in get_args(hint)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if origin is tuple:
        return f"a list with each entry {describe(get_args(hint)[0])}"
    if origin is dict:
        return f"a dictionary from name to {describe(get_args(hint)[1])}"
    words_of = {int: "an integer", float: "a number", bool: "True or False", str: "a text"}
    if hint is types.NoneType:
        return "None"
    return words_of.get(hint, f"a reference such as @some_name/{hint.__name__}()")


def show(value: Any) -> str:
    """The value as a user would write it, with its kind where that is the point."""
    if isinstance(value, CheckedArgs):
        return f"@{type(value).__name__}()"
    is_list = isinstance(value, (list, tuple))
    text = f"[{', '.join(show(item) for item in value)}]" if is_list else repr(value)
    return shorten(text)


def shorten(text: str) -> str:
    """A text short enough to be part of a message."""
    return text if len(text) <= 120 else f"{text[:117]}..."


def did_you_mean(name: str, known: Iterable[Any]) -> str:
    """`did you mean 'native'?` for a near miss, else an empty text."""
    by_folded = {str(candidate).casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return f"did you mean {by_folded[close[0]]!r}?" if close else ""
