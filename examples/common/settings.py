"""Settings of a run: fields of a dataclass, options of the command line, a file."""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax

from examples.common.command_line import wrap
from examples.common.logs import write_whole

METAVARS: dict[Any, str] = {int: "N", float: "X"}


class SettingError(ValueError):
    """Says which setting is wrong, and how to mend it.

    Args:
      name: The name of the setting.
      rule: The rule that it breaks, after "must".
      value: Its value.
    """

    def __init__(self, name: str, rule: str, value: Any):
        super().__init__(f"{name} must {rule}, got {value!r}")
        self.name = name
        self.rule = rule
        self.value = value

    @property
    def text(self) -> str:
        """The error in the words of the command line."""
        option = "--" + self.name.replace("_", "-")
        return f"argument {option}: must {self.rule}, got {self.value!r}"


def setting(default: Any, text: str, **checks: Any) -> Any:
    """Returns a field: default, help, and `least`, `most`, `choices` or `metavar`."""
    return dataclasses.field(default=default, metadata={"help": text, **checks})


def may_change(default: Any, text: str, **checks: Any) -> Any:
    """Returns a field in which a run that goes on may differ from its beginning."""
    return setting(default, text, may_change=True, **checks)


def check_ranges(config: Any) -> None:
    """Raises SettingError if a setting is out of its range."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        least, most, choices = map(field.metadata.get, ("least", "most", "choices"))
        if choices and value not in choices:
            raise SettingError(field.name, f"be one of {', '.join(choices)}", value)
        # Not `value < least`, which is false for nan.
        if least is not None and not value >= least:
            raise SettingError(field.name, f"be at least {least}", value)
        if most is not None and not value <= most:
            raise SettingError(field.name, f"be at most {most}", value)


def add_options(parser: Any, config: type) -> None:
    """Adds an option for each field of a dataclass; omitted options are not parsed."""
    for field in dataclasses.fields(config):
        text = field.metadata["help"]
        if choices := field.metadata.get("choices"):
            text += f": {', '.join(choices)}"
        metavar = field.metadata.get("metavar") or METAVARS.get(field.type, "NAME")
        kind: dict[str, Any] = {"metavar": metavar}
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            default=argparse.SUPPRESS,
            help=f"{text} (default: {field.default}).",
            **kind,
        )


def parse(config: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as their types.

    Args:
      config: The dataclass.
      options: Settings by name, as strings; flags are bool.

    Raises:
      SettingError: If one is no number, and must be.
    """
    types = {field.name: field.type for field in dataclasses.fields(config)}
    nouns = {int: "a whole number", float: "a number"}
    values = {}
    for name, text in options.items():
        kind = cast(type, types[name])
        try:
            values[name] = kind(text)
        except ValueError:
            raise SettingError(name, f"be {nouns[kind]}", text) from None
    return values


def keep(out: Path, config: Any, **facts: str) -> None:
    """Prints the settings, and saves them as `settings.json`.

    Args:
      out: The folder of the run. Its checkpoints are in folders named by their steps,
        below `checkpoints`.
      config: The settings.
      **facts: Other facts that must be the same when a run goes on.

    Raises:
      SettingError: If the folder holds a run whose settings are other ones, or cannot
        be written.
    """
    settings = dataclasses.asdict(config) | facts
    path = out / "settings.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        saved_steps = (x.name for x in (out / "checkpoints").glob("*"))
        has_checkpoint = any(map(str.isdecimal, saved_steps))  # not a partial one
        if has_checkpoint and path.exists():
            saved = json.loads(path.read_text())
            _check_same_run(out, saved, settings, _changeable(config))
        if jax.process_index() == 0:
            write_whole(path, json.dumps(settings, indent=2) + "\n")
    except OSError as error:
        rule = f"be a folder that can be written ({error.strerror})"
        raise SettingError("out", rule, str(out)) from None
    say("  ".join(f"{name}={value}" for name, value in settings.items()))


def _changeable(config: Any) -> set[str]:
    fields = dataclasses.fields(config)
    return {field.name for field in fields if field.metadata.get("may_change")}


def _check_same_run(
    out: Path, saved: dict[str, Any], settings: dict[str, Any], changeable: set[str]
) -> None:
    """Raises SettingError if settings differ that must not when a run goes on."""
    pairs = [
        f"{name} {saved.get(name)!r}, not {value!r}"
        for name, value in settings.items()
        if name not in changeable and saved.get(name) != value
    ]
    if pairs:
        rule = "be a new folder, or have the settings of its run: "
        raise SettingError("out", rule + "; ".join(pairs), str(out))


def say(text: str) -> None:
    """Prints a text, once for all processes; breaks long lines between words."""
    if jax.process_index() == 0:
        print(wrap(text), flush=True)
