"""Gin files -> ExperimentArgs, and back.

gin's parser reads the files; its registry is not used, so every binding keeps its file and line
and nothing is global. Bindings apply in the order they are read: an include stands where it is
written, what comes later wins, the command line comes last.
"""

import dataclasses
import logging
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from gin import config_parser

from configs.bindings import (
    CLASSES,
    TOP_CLASSES,
    Binding,
    BindingTable,
    Location,
    Macro,
    Reference,
    warn_inert,
)
from configs.effects import inert_in_experiment
from configs.operative import experiment_to_gin
from configs.rules import (
    ConfigError,
    default_values,
    did_you_mean,
    field_hints,
    shorten,
    show,
)
from configs.schema import ExperimentArgs

__all__ = ["CONFIGS", "ConfigError", "experiment_to_gin", "find_config", "load_experiment"]

logger = logging.getLogger(__name__)

CONFIGS = Path(__file__).resolve().parent
"""Where a file name is looked up after the place it was written in."""

_TASK_CLASS = {"ranking": "RankingArgs", "retrieval": "RetrievalArgs"}


def load_experiment(
    path: str | Path,
    *,
    bindings: Sequence[str] = (),
    task: Literal["ranking", "retrieval"],
) -> ExperimentArgs:
    """The checked experiment of a gin file.

    path: as given, else looked up in configs/. bindings: lines of gin that override the files, the
    last one wins. Warnings go to the log: equal duplicates, fields without effect, resolved
    sentinels.

    Raises ConfigError naming file, line, field, value, rule and way out.
    """
    file = find_config(path, beside=None)
    reader = _Reader()
    reader.read_file(file, display=str(path) if Path(path).exists() else str(file), origin=())
    for text in bindings:
        reader.read_override(text)
    table = BindingTable(reader.bindings, source=str(path))
    experiment = _build(table, reader, task=task, name=file.stem, source=str(path))
    _warn_inert(experiment, table)
    return experiment


def find_config(path: str | Path, *, beside: Path | None) -> Path:
    """The file a name stands for: as given (relative to `beside`), then in configs/.

    Raises ConfigError listing the places looked in and a near miss.
    """
    places = [Path(path) if beside is None else beside / path, CONFIGS / path]
    for place in places:
        if place.is_file():
            return place
    looked = " and ".join(dict.fromkeys(str(place.parent) for place in places))
    known = sorted(file.stem for folder in (places[0].parent, CONFIGS) for file in _gins(folder))
    kind = "a folder" if places[0].is_dir() else "no such file"
    raise ConfigError(
        f"{path}: must be a gin file, got {kind} in {looked}; "
        f"{did_you_mean(Path(path).stem, known) or 'give the path of a file'}"
    )


def _gins(folder: Path) -> Iterator[Path]:
    return folder.glob("*.gin") if folder.is_dir() else iter(())


class _Delegate(config_parser.ParserDelegate):
    """Keeps references and macros as names, to be resolved once all files are read."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, class_name = scoped_configurable_name.rpartition("/")
        return Reference(scope, class_name, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


class _Reader:
    """Reads files and overrides into one mapping of the bindings that hold."""

    def __init__(self) -> None:
        self.bindings: dict[tuple[str, str, str], Binding] = {}
        self._num_inclusions = 0
        self._open_files: list[Path] = []
        self._seen: set[tuple[Location, tuple[str, str, str]]] = set()

    def read_file(self, file: Path, *, display: str, origin: tuple[int, ...]) -> None:
        """Reads a file and what it includes; display is its name in messages."""
        resolved = file.resolve()
        if resolved in self._open_files:
            chain = " -> ".join(opened.name for opened in [*self._open_files, resolved])
            raise ConfigError(f"{display}: must not include itself, got {chain}; remove an include")
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{display}: must be a readable UTF-8 text, got {error}; check the file"
            ) from None
        self._open_files.append(resolved)
        self._read(text, Location(display), folder=file.parent, origin=origin)
        self._open_files.pop()

    def read_override(self, text: str) -> None:
        """Reads a --gin-binding."""
        self._read(text, Location(f"--gin-binding {text.strip()!r}"), folder=None, origin=())

    def _read(
        self, text: str, place: Location, *, folder: Path | None, origin: tuple[int, ...]
    ) -> None:
        self._num_inclusions += 1
        origin = (*origin, self._num_inclusions)
        in_this_file: dict[tuple[str, str, str], Binding] = {}
        for statement in _statements(text, place):
            line = None if folder is None else statement.location.line_num
            location = Location(place.file, line)
            if isinstance(statement, config_parser.IncludeStatement):
                self._include(statement.filename, location, folder, origin)
            elif isinstance(statement, config_parser.ImportStatement):
                raise ConfigError(
                    f"{location}: a config must not import code, got {statement.format()!r}; "
                    "remove the line: every class of a config is known"
                )
            elif isinstance(statement, config_parser.BindingStatement):
                binding = _named(_binding(statement, location, origin))
                _check_repetition(binding, in_this_file.setdefault(binding.key, binding))
                self._bind(binding)

    def _include(
        self, name: str, location: Location, folder: Path | None, origin: tuple[int, ...]
    ) -> None:
        if folder is None:
            raise ConfigError(
                f"{location}: must set one field, got an include; write the include in a file"
            )
        try:
            file = find_config(name, beside=folder)
        except ConfigError as error:
            raise ConfigError(f"{location}: include of {error}") from None
        self.read_file(file, display=str(file), origin=origin)

    def _bind(self, binding: Binding) -> None:
        earlier = self.bindings.pop(binding.key, None)
        if earlier is not None and repr(earlier.value) != repr(binding.value):
            own = binding.origin[: len(earlier.origin)] == earlier.origin
            again = (binding.location, binding.key) in self._seen
            twice_on_command_line = earlier.location.line is None
            if own or again or twice_on_command_line:
                logger.warning(
                    "%s: %s = %s replaces %s of %s because it is read later",
                    binding.location,
                    binding.label,
                    show(binding.value),
                    show(earlier.value),
                    earlier.location,
                )
        self._seen.add((binding.location, binding.key))
        self.bindings[binding.key] = binding


def _statements(text: str, place: Location) -> Iterator[Any]:
    """gin's statements of a text; every parsing failure becomes a ConfigError with its line."""
    in_file = not place.file.startswith("--")
    try:
        yield from config_parser.ConfigParser(text, _Delegate())
    except SyntaxError as error:
        line, reason = error.lineno, str(error.msg)
    except tokenize.TokenError as error:
        line, reason = error.args[1][0], "a bracket or a quote is not closed"
    except RecursionError:
        line, reason = None, "brackets are nested too deeply"
    except (ValueError, TypeError, AssertionError) as error:  # such as an unhashable dict key
        line, reason = None, str(error) or type(error).__name__
    else:
        return
    location = Location(place.file, line if in_file else None)
    raise ConfigError(f"{location}: must be gin, {_explain(reason)}")


def _explain(reason: str) -> str:
    """gin's complaint as value and way out."""
    token = re.search(r"Failed to parse token '(.*)'", reason, flags=re.DOTALL)
    if token is None:
        reason = " ".join(reason.split()).rstrip(".")
        return f"got a line that cannot be read ({reason}); write Class.field = value"
    word = shorten(token.group(1))
    literal = {"true": "True", "false": "False", "none": "None", "null": "None"}.get(word.lower())
    quoted = f"'{word}' in quotes" if word.isidentifier() else "a literal value"
    also = f"{literal} or " if literal and literal != word else ""
    return f"got the value {word}; write {also}{quoted}"


def _binding(
    statement: config_parser.BindingStatement, location: Location, origin: tuple[int, ...]
) -> Binding:
    """gin's statement as our binding; a macro has an empty class name."""
    scope, class_name, field = statement.scope, statement.selector, statement.arg_name
    if not field or (class_name, field) == ("macro", "value"):
        name = "/".join(part for part in (scope, class_name if not field else "") if part)
        scope, class_name, field = "", "", name
    return Binding(
        scope=scope,
        class_name=class_name,
        field=field,
        value=statement.value,
        location=location,
        origin=origin,
    )


def _named(binding: Binding) -> Binding:
    """The binding with a field's own name; raises ConfigError for a class or field not known."""
    if not binding.class_name:
        if binding.field in CLASSES:
            raise ConfigError(
                f"{binding.location}: {binding.field} must be set field by field, got "
                f"{binding.field} = {show(binding.value)}; write {binding.field}.field = value"
            )
        return binding
    cls = CLASSES.get(binding.class_name)
    if cls is None:
        known = f"known are {', '.join(CLASSES)}"
        last = binding.class_name.rpartition(".")[2]
        raise ConfigError(
            f"{binding.location}: {binding.label} must name a known class, got "
            f"{binding.class_name!r} (value {show(binding.value)}); "
            f"{did_you_mean(last, CLASSES) or known}"
        )
    fields = field_hints(cls)
    field = getattr(cls, "field_aliases", {}).get(binding.field, binding.field)
    if field not in fields:
        raise ConfigError(
            f"{binding.location}: {binding.label} must name a field of {binding.class_name}, got "
            f"{binding.field!r} (value {show(binding.value)}); {_field_hint(binding.field, cls)}"
        )
    return dataclasses.replace(binding, field=field)


def _field_hint(name: str, cls: type) -> str:
    owners = [other.__name__ for other in CLASSES.values() if name in field_hints(other)]
    near = did_you_mean(name, field_hints(cls))
    if owners and not near:
        return f"it is a field of {' and '.join(owners)}"
    return near or f"known are {', '.join(field_hints(cls))}"


def _check_repetition(binding: Binding, earlier: Binding) -> None:
    """Warns about an equal line of the same file; raises ConfigError for a contradicting one."""
    if earlier is binding:
        return
    if repr(earlier.value) != repr(binding.value):
        raise ConfigError(
            f"{binding.location}: {binding.label} must have one value per file, got "
            f"{show(binding.value)} here and {show(earlier.value)} at {earlier.location}; remove "
            "one of the lines"
        )
    logger.warning(
        "%s: %s repeats the equal line at %s", binding.location, binding.label, earlier.location
    )


def _build(
    table: BindingTable, reader: _Reader, *, task: str, name: str, source: str
) -> ExperimentArgs:
    dataset_class = _dataset_class(table, source)
    other_task = {"ranking": "retrieval", "retrieval": "ranking"}[task]
    idle_class = _TASK_CLASS[other_task]
    if idle_class in table.classes():
        binding = table.first(idle_class)
        raise ConfigError(
            f"{binding.location}: {binding.label} must not be set in a {task} run, got "
            f"{show(binding.value)}; nothing builds {idle_class} here: remove it or start "
            f"pretrain_gr_{other_task}.py"
        )
    parts = {
        cls.__name__: table.build(cls.__name__)
        for cls in TOP_CLASSES
        if cls.__name__ in (dataset_class, _TASK_CLASS[task])
        or cls.__name__ not in ("DatasetArgs", "BenchmarkDatasetArgs", *_TASK_CLASS.values())
    }
    _refuse_unused(table)
    trainer = parts["TrainerArgs"]
    if trainer.output_dir is None:
        trainer = dataclasses.replace(trainer, output_dir=f"runs/{name}")
    try:
        experiment = ExperimentArgs(
            trainer=trainer,
            dataset=parts[dataset_class],
            network=parts["NetworkArgs"],
            optimizer=parts["OptimizerArgs"],
            parallel=parts["TensorModelParallelArgs"],
            precision=parts["MixedPrecisionArgs"],
            ranking=parts.get("RankingArgs"),
            retrieval=parts.get("RetrievalArgs"),
            name=name,
        )
    except ConfigError as error:
        raise table.located(error, {}) from None
    return experiment


def _dataset_class(table: BindingTable, source: str) -> str:
    given = [name for name in ("DatasetArgs", "BenchmarkDatasetArgs") if name in table.classes()]
    if len(given) == 2:
        first, second = (table.first(name) for name in given)
        raise ConfigError(
            f"{second.location}: a run must have one data set, got {second.label} here and "
            f"{first.label} at {first.location}; remove all lines of one of the two classes"
        )
    if not given:
        raise ConfigError(
            f"{source}: DatasetArgs.dataset_name is required and not set; add "
            "DatasetArgs.dataset_name = ... or use BenchmarkDatasetArgs for synthetic data"
        )
    return given[0]


def _refuse_unused(table: BindingTable) -> None:
    for binding in table.unused():
        scoped = f"{binding.scope}/{binding.class_name}" if binding.scope else binding.class_name
        if CLASSES[binding.class_name] in TOP_CLASSES:
            way_out = f"write {binding.class_name}.{binding.field} without a scope"
        else:
            way_out = f"refer to it as @{scoped}() or remove it"
        raise ConfigError(
            f"{binding.location}: {binding.label} must be part of what the run builds, got "
            f"{show(binding.value)} for {scoped}, which nothing builds; {way_out}"
        )
    for binding in table.unused_macros():
        owners = [name for name, cls in CLASSES.items() if binding.field in field_hints(cls)]
        if owners:
            raise ConfigError(
                f"{binding.location}: {binding.field} must belong to a class, got "
                f"{binding.field} = {show(binding.value)}; write {owners[0]}.{binding.field}, or "
                f"read it somewhere as %{binding.field}"
            )
        logger.warning("%s: nothing reads the macro %s", binding.location, binding.field)


def _warn_inert(experiment: ExperimentArgs, table: BindingTable) -> None:
    """One line for each field that is set, differs from its default and does nothing here."""
    for label, reason in inert_in_experiment(experiment).items():
        binding = table.find(label)
        if binding is not None:
            default = default_values(CLASSES[binding.class_name]).get(binding.field)
            if binding.value != default:
                warn_inert(binding, reason)
    ends = (table.find("TrainerArgs.max_train_iters"), table.find("TrainerArgs.num_epochs"))
    if all(end is None or end.value is None for end in ends):
        logger.warning(
            "TrainerArgs.num_epochs = 1: neither max_train_iters nor num_epochs says when to stop"
        )
    scaling = table.find("NetworkArgs.scaling_seqlen")
    if scaling is not None and experiment.network.scaling_seqlen == "batch":
        logger.warning(
            "%s: NetworkArgs.scaling_seqlen = %s: scores depend on the longest user of the batch, "
            "so a user's output changes with its batch mates",
            scaling.location,
            show(scaling.value),
        )
