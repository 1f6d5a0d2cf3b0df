"""Results as JSON and as Markdown tables."""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.systems import PLAIN, PLAIN_KERAS
from examples.common.command_line import OneLineParser

RESULTS = Path(__file__).with_name("results")
_PACKAGES = ["jax", "jaxlib", "optax", "flax", "jmp", "mixed_precision_for_JAX"]
_PACKAGES += ["keras", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch"]


def parser(name: str, text: str | None, arguments: str = "") -> argparse.ArgumentParser:
    """Returns the parser of a script, whose help is the docstring of the script."""
    return OneLineParser(f"python -m {name}", arguments, description=text)


def versions() -> dict[str, str]:
    """Returns the versions of Python and the packages."""
    numbers = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            numbers[package] = metadata.version(package)
    return numbers


def machine() -> dict[str, Any]:
    """Returns a description of the machine."""
    device = jax.devices()[0]
    kind = device.device_kind
    if device.platform == "cpu":
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
        kind = f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"
    return {"platform": device.platform, "device": kind, "system": platform.system()}


def about() -> dict[str, Any]:
    """Returns the first entries of results: the machine, the versions, the date."""
    date = datetime.date.today().isoformat()
    return {"machine": machine(), "versions": versions(), "date": date}


def load(path: Path) -> dict[str, Any]:
    """Reads results; returns an empty dictionary if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def save(path: Path, results: dict[str, Any]) -> None:
    """Writes results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def measure_parts(
    name: str, text: str | None, parts: dict[str, Callable[[], Any]], path: Path
) -> dict[str, Any]:
    """Measures the parts that the command line names, and returns all results.

    Args:
      name: The name of the script.
      text: The docstring of the script.
      parts: Functions that return rows, or None if a compiler is not installed.
      path: The results: by part, the machine, the versions and the rows.
    """
    options = parser(name, text, "[PART ...]")
    text = f"Measure these parts: {', '.join(parts)} (default: all)."
    # Python 3.11 looks for the empty list among the choices.
    choices = [*parts, []]
    options.add_argument("parts", nargs="*", choices=choices, metavar="PART", help=text)
    for part in options.parse_args().parts or parts:
        rows = parts[part]()
        if rows is None:
            print(f"{part}: skipped, as its compiler is not installed")
        else:
            save(path, load(path) | {part: {**about(), "rows": rows}})
    return load(path)


def read_csv(path: Path) -> np.ndarray:
    """Reads the logs of a training; an empty field is nan."""
    return np.genfromtxt(path, delimiter=",", names=True)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def by_workload(results: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the rows of results by workload and system."""
    workloads = {}
    for row in results["rows"]:
        workloads.setdefault(row["workload"], {})[row["system"]] = row
    return workloads


def _megabytes(number: float) -> str:
    return f"{number / 1e6:,.1f}"


def _ratios(systems: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Returns the ratios of a workload by system."""
    return {
        name: row["ratio"]
        for name, row in systems.items()
        if name not in (PLAIN, PLAIN_KERAS)
    }


def _ratio_table(
    title: str, columns: dict[str, dict[str, float]], names: Iterable[str] = ()
) -> str:
    """Returns a table of ratios: a row for each system, or for those in `names`."""
    rows = [
        [name, *(f"{r[name]:.2f}" if name in r else "" for r in columns.values())]
        for name in names or dict.fromkeys(itertools.chain(*columns.values()))
    ]
    return table([title, *columns], rows)


def timing_tables(results: dict[str, Any]) -> list[str]:
    """Returns a table of optimizer steps, and one of training steps.

    Each has a column per main workload.
    """
    tables = {}
    for systems in by_workload(results).values():
        column, given = (systems[PLAIN][key] for key in ("column", "given"))
        if column:
            title = f"{'optimizer' if given else 'training'} step / plain"
            tables.setdefault(title, {})[column] = _ratios(systems)
    return [_ratio_table(*titled) for titled in tables.items()]


def compiled_tables(results: dict[str, Any]) -> list[str]:
    """Returns a table of the compiled steps for each target."""
    tables = []
    for target, part in results.items():
        rows = []
        for row in part["rows"]:
            sizes = [_megabytes(row[key]) for key in ("temp_bytes", "copied_bytes")]
            rows.append([row["system"], f"{row['ratio']:.3f}", *sizes])
        header = [f"compiled for {target}", "bytes / plain", "temporary MB"]
        tables.append(table([*header, "copied MB"], rows))
    return tables


def compiling_table(results: dict[str, Any]) -> str:
    """Returns a table of the times to compile, a column per part: the CPU is last."""
    parts = sorted(results.items(), reverse=True)
    columns = {part: _ratios(entry["rows"]) for part, entry in parts}
    return _ratio_table("time to compile / plain", columns)


def replace_tables(page: str, tables: list[str]) -> str:
    """Returns a page with these tables in place of those with the same first title."""
    for new in tables:
        head = "\n" + new[: new.index(" |") + 2]
        if head in page:
            start = page.index(head) + 1
            page = page[:start] + new + page[page.index("\n\n", start) + 1 :]
    return page
