"""Bindings of gin files with their places, and the dataclasses they build.

gin's own objects stop at `configs.loader`; everything here is about names and values, so every
refusal can say where the value was written.
"""

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from configs import schema
from configs.effects import inert_in_class
from configs.rules import ConfigError, default_values, did_you_mean, field_hints, show

logger = logging.getLogger(__name__)

TOP_CLASSES: tuple[type, ...] = (
    schema.TrainerArgs,
    schema.DatasetArgs,
    schema.BenchmarkDatasetArgs,
    schema.NetworkArgs,
    schema.OptimizerArgs,
    schema.TensorModelParallelArgs,
    schema.MixedPrecisionArgs,
    schema.RankingArgs,
    schema.RetrievalArgs,
)
"""Built once per run, without a scope."""

PART_CLASSES: tuple[type, ...] = (
    schema.FeatureArgs,
    schema.RandomDistribution,
    schema.EmbeddingArgs,
    schema.DynamicEmbeddingArgs,
)
"""Built wherever a value refers to them."""

CLASSES: dict[str, type] = {cls.__name__: cls for cls in (*TOP_CLASSES, *PART_CLASSES)}


@dataclasses.dataclass(frozen=True)
class Location:
    """Where something was written: a file and its line, or a command line argument."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Reference:
    """`@scope/Class()`; called is False without the parentheses."""

    scope: str
    class_name: str
    called: bool

    def __repr__(self) -> str:
        prefix = f"{self.scope}/" if self.scope else ""
        return f"@{prefix}{self.class_name}{'()' if self.called else ''}"


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%name`."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binding:
    """One `scope/Class.field = value`, or a macro's `name = value` (class_name is empty then)."""

    scope: str
    class_name: str
    field: str
    value: Any
    location: Location
    origin: tuple[int, ...]
    """Path of inclusions down to the file it stands in."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What it sets."""
        return (self.scope, self.class_name, self.field)

    @property
    def label(self) -> str:
        """What it sets, as a user writes it."""
        if not self.class_name:
            return self.field
        prefix = f"{self.scope}/" if self.scope else ""
        return f"{prefix}{self.class_name}.{self.field}"


class BindingTable:
    """The bindings that hold after includes and overrides, and what is built from them."""

    def __init__(self, bindings: dict[tuple[str, str, str], Binding], *, source: str) -> None:
        self._bindings = bindings
        self._source = source
        self._built: set[tuple[str, str]] = set()
        self._used_macros: set[str] = set()
        self._stack: list[Reference] = []

    def classes(self) -> set[str]:
        """Names of the classes with at least one binding."""
        return {binding.class_name for binding in self._bindings.values() if binding.class_name}

    def first(self, class_name: str) -> Binding:
        """The class's first binding."""
        return next(b for b in self._bindings.values() if b.class_name == class_name)

    def find(self, label: str) -> Binding | None:
        """The unscoped binding of "Class.field"."""
        class_name, _, field = label.partition(".")
        return self._bindings.get(("", class_name, field))

    def build(self, class_name: str) -> Any:
        """A top-level class from its unscoped bindings."""
        return self._build(Reference("", class_name, True), scope="", holder=None)

    def unused(self) -> Iterator[Binding]:
        """Bindings of classes and scopes that nothing built."""
        for binding in self._bindings.values():
            if binding.class_name and (binding.scope, binding.class_name) not in self._built:
                yield binding

    def unused_macros(self) -> Iterator[Binding]:
        """Macros no value reads."""
        for binding in self._bindings.values():
            if not binding.class_name and binding.field not in self._used_macros:
                yield binding

    def _build(self, reference: Reference, *, scope: str, holder: Binding | None) -> Any:
        cls = CLASSES[reference.class_name]
        bound = self._gather(reference.class_name, scope)
        self._stack.append(reference)
        values = {name: self._resolve(b.value, b, scope) for name, b in bound.items()}
        self._stack.pop()
        required = [name for name in field_hints(cls) if name not in default_values(cls)]
        missing = [name for name in required if name not in values]
        if missing:
            prefix = f"{scope}/" if scope else ""
            first, *others = (f"{prefix}{reference.class_name}.{name}" for name in missing)
            also = f" (and {', '.join(others)})" if others else ""
            scopes = {b.scope for b in self._bindings.values() if b.class_name == cls.__name__}
            near = did_you_mean(scope, scopes) if scope and scope not in scopes else ""
            raise ConfigError(
                f"{holder.location if holder else self._source}: {first} is required and not "
                f"set{also}; {near or f'add {first} = ...'}"
            )
        try:
            built = cls(**values)
        except ConfigError as error:
            raise self.located(error, bound, holder) from None
        for name, reason in inert_in_class(built).items():
            if name in bound and getattr(built, name) != default_values(cls).get(name):
                warn_inert(bound[name], reason)
        return built

    def _gather(self, class_name: str, scope: str) -> dict[str, Binding]:
        """The class's bindings in a scope: outer scopes hold where inner ones say nothing."""
        parts = scope.split("/") if scope else []
        bound: dict[str, Binding] = {}
        for depth in range(len(parts) + 1):
            partial = "/".join(parts[:depth])
            for binding in self._bindings.values():
                if binding.class_name == class_name and binding.scope == partial:
                    bound[binding.field] = binding
            self._built.add((partial, class_name))
        return bound

    def _resolve(
        self, value: Any, binding: Binding, scope: str, macros: tuple[str, ...] = ()
    ) -> Any:
        """The value with its macros and references replaced."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._resolve(item, binding, scope, macros) for item in value)
        if isinstance(value, dict):
            return {
                self._resolve(k, binding, scope, macros): self._resolve(v, binding, scope, macros)
                for k, v in value.items()
            }
        if isinstance(value, Macro):
            return self._resolve_macro(value, binding, scope, macros)
        if isinstance(value, Reference):
            return self._resolve_reference(value, binding, scope)
        return value

    def _resolve_macro(
        self, macro: Macro, binding: Binding, scope: str, macros: tuple[str, ...]
    ) -> Any:
        definition = self._bindings.get(("", "", macro.name))
        if definition is None:
            known = [b.field for b in self._bindings.values() if not b.class_name]
            raise ConfigError(
                f"{binding.location}: {binding.label} must read a macro that is set, got {macro}; "
                f"{did_you_mean(macro.name, known) or f'add a line {macro.name} = ...'}"
            )
        if macro.name in macros:
            raise ConfigError(
                f"{definition.location}: macro {macro.name} must not read itself, got "
                f"{show(definition.value)}; give it a value"
            )
        self._used_macros.add(macro.name)
        return self._resolve(definition.value, binding, scope, (*macros, macro.name))

    def _resolve_reference(self, reference: Reference, binding: Binding, scope: str) -> Any:
        names = [cls.__name__ for cls in PART_CLASSES]
        if reference.class_name not in names:
            raise ConfigError(
                f"{binding.location}: {binding.label} must refer to one of {', '.join(names)}, got "
                f"{reference}; {did_you_mean(reference.class_name, names) or 'correct the name'}"
            )
        if not reference.called:
            raise ConfigError(
                f"{binding.location}: {binding.label} must refer to a built object, got "
                f"{reference}; write {reference}()"
            )
        if reference in self._stack:
            raise ConfigError(
                f"{binding.location}: {binding.label} must not refer back to itself, got "
                f"{reference}; refer to another scope"
            )
        return self._build(reference, scope=reference.scope or scope, holder=binding)

    def located(
        self, error: ConfigError, bound: dict[str, Binding], holder: Binding | None = None
    ) -> ConfigError:
        """The error with the places of the fields it names; bound maps field -> binding."""
        places = []
        for label in error.fields:
            class_name, _, name = label.partition(".")
            binding = bound.get(name)
            if binding is None or binding.class_name != class_name:
                binding = self.find(label)
            if binding is not None and binding not in places:
                places.append(binding)
        if not places:
            return ConfigError(f"{holder.location if holder else self._source}: {error}")
        others = ", ".join(f"{b.label} at {b.location}" for b in places[1:])
        macro = self._macro_place(places[0].value)
        notes = "; ".join(note for note in (macro, others) if note)
        return ConfigError(f"{places[0].location}: {error}{f' ({notes})' if notes else ''}")

    def _macro_place(self, value: Any) -> str:
        if not isinstance(value, Macro):
            return ""
        return f"the value is {value} of {self._bindings[('', '', value.name)].location}"


def warn_inert(binding: Binding, reason: str) -> None:
    """One line about a field that is set and does nothing here."""
    logger.warning(
        "%s: %s = %s has no effect: %s",
        binding.location,
        binding.label,
        show(binding.value),
        reason,
    )
