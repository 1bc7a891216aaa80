"""ExperimentArgs -> gin text that rebuilds it."""

import dataclasses
from typing import Any

from configs.rules import CheckedArgs
from configs.schema import ExperimentArgs


def experiment_to_gin(experiment: ExperimentArgs) -> str:
    """Every field of the run, defaults and resolved values included.

    Loading the text with the same task gives an equal ExperimentArgs, also when defaults change.
    Only resume and ckpt_load_dir are None in it: it says what ran, not how it was started.
    """
    trainer = dataclasses.replace(
        experiment.trainer,
        # The default folder follows from the file's name, which this text does not keep.
        output_dir=experiment.output_dir,
        resume=None,
        ckpt_load_dir=None,
    )
    named = dataclasses.replace(experiment, trainer=trainer)
    writer = _Writer()
    for field in dataclasses.fields(named):
        part = getattr(named, field.name)
        if isinstance(part, CheckedArgs):
            writer.add(part, scope="")
    return "\n".join(writer.blocks)


class _Writer:
    """One block of lines per object; parts come before what refers to them."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self._num_scopes = 0

    def add(self, part: Any, *, scope: str) -> None:
        prefix = f"{scope}/" if scope else ""
        class_name = type(part).__name__
        lines = [
            f"{prefix}{class_name}.{field.name} = {self._text(getattr(part, field.name))}\n"
            for field in dataclasses.fields(part)
        ]
        self.blocks.append("".join(lines))

    def _text(self, value: Any) -> str:
        if isinstance(value, CheckedArgs):
            self._num_scopes += 1
            scope = f"part_{self._num_scopes}"
            self.add(value, scope=scope)
            return f"@{scope}/{type(value).__name__}()"
        if isinstance(value, tuple):
            return f"[{', '.join(self._text(item) for item in value)}]"
        if isinstance(value, dict):
            items = (f"{key!r}: {self._text(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        return repr(value)
