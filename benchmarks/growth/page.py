"""The tables and the figure of `docs/guide/growth.md`."""

import re
import textwrap
from typing import Any

from benchmarks import report
from benchmarks.growth.compiling import BARE
from benchmarks.systems import PLAIN, PLAIN_KERAS
from benchmarks.workloads import written

RESULTS = report.RESULTS / "growth.json"
DOCS = report.RESULTS.parents[1] / "docs"
PAGE, FIGURE = DOCS / "guide" / "growth.md", DOCS / "growth.png"
Rows = list[dict[str, Any]]


def _digits(number: float, count: int = 2) -> str:
    """Returns a number with this many significant digits, without an exponent."""
    return f"{float(f'{number:.{count}g}'):,g}"


def _megabytes(number: float) -> str:
    return _digits(number / 1e6, 3)


def _by_system(rows: Rows) -> dict[str, Rows]:
    """Returns rows by the name of their system."""
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(report.call_of(row["system"]), []).append(row)
    return found


def _compiled(found: dict[str, Any], optimizer: str) -> Rows:
    return [row for row in found["compile"] if row["optimizer"] == optimizer]


def _ratio_table(title: str, rows: Rows, *keys: str) -> str:
    """Returns compile times relative to plain Optax: a row for each system, ours first.

    Args:
      title: The title of the first column.
      rows: The measured rows.
      *keys: The entries of a row that make the title of its column.
    """

    def column(row):
        return ", ".join(str(row[key]) for key in keys)

    columns = list(dict.fromkeys(map(column, rows)))
    systems = {
        name: {column(row): row for row in its}
        for name, its in _by_system(rows).items()
        if name != PLAIN_KERAS
    }
    plain = systems.pop(PLAIN)
    cells = [["plain, seconds", *(_digits(plain[x]["seconds"]) for x in columns)]]
    for name in sorted(systems, key=lambda x: not x.startswith((*report.OURS, BARE))):
        its = systems[name]
        ratios = [f"{its[x]['ratio']:.3g}" if x in its else "" for x in columns]
        cells.append([name, *ratios])
    return report.table([title, *columns], cells)


def compile_tables(found: dict[str, Any]) -> list[str]:
    """Returns the times to compile: for a CPU, for accelerators, and with a scan."""
    title = "{}: compile time / plain, by leaves"
    adam, sgd = (_compiled(found, optimizer) for optimizer in ("adam", "sgd"))
    return [
        _ratio_table(title.format("Adam"), adam, "leaves"),
        _ratio_table(title.format("SGD"), sgd, "leaves"),
        _ratio_table(
            "Adam: compile time / plain, by target and leaves",
            found["accelerators"],
            "target",
            "leaves",
        ),
        _ratio_table(
            "scanned transformer: compile time / plain", found["scanned"], "target"
        ),
    ]


def times_table(found: dict[str, Any]) -> str:
    """Returns the times of a step on a CPU, by parameters and leaves."""
    cells = []
    for _, *rows in zip(*_by_system(found["times"]).values(), strict=True):
        one, *_ = rows
        ratios = [f"{row['ratio']:.2f}" for row in rows]
        size = [written(one["parameters"]), str(one["leaves"])]
        cells.append([*size, _digits(1e3 * one["plain_s"], 3), *ratios])
    header = ["parameters, CPU", "leaves", "plain, ms"]
    header += ["apply_gradients, time / plain", "update, time / plain"]
    return report.table(header, cells)


def sizes_table(found: dict[str, Any]) -> str:
    """Returns the bytes of a step on a TPU, by parameters and leaves."""
    cells = []
    for plain, *rows in zip(*_by_system(found["sizes"]).values(), strict=True):
        ratios = [f"{row['bytes'] / plain['bytes']:.3g}" for row in rows]
        size = [written(plain["parameters"]), str(plain["leaves"])]
        cells.append([*size, _megabytes(plain["bytes"]), *ratios])
    header = ["parameters, TPU v5e", "leaves", "plain, MB"]
    header += ["apply_gradients, bytes / plain", "update, bytes / plain"]
    return report.table(header, cells)


def _listed(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _collectives(row: dict[str, Any]) -> list[str]:
    return [
        "plain" if row["system"] == PLAIN else report.call_of(row["system"]),
        _listed(row["arrays"]),
        _megabytes(row["array_bytes"]),
        _listed(row["small"]),
        str(row["small_bytes"]),
    ]


COLLECTIVES = (
    "step",
    "collectives of arrays",
    "their MB",
    "collectives of scalars",
    "their bytes",
)


def chips_table(found: dict[str, Any]) -> str:
    """Returns the collectives of a sharded step, and what a chip moves."""
    cells = []
    for row in found["chips"]:
        slices = f" in {row['slices']} slices" if row["slices"] > 1 else ""
        chips, moved = f"{row['chips']}{slices}", _megabytes(row["bytes"])
        cells.append([chips, *_collectives(row), moved])
    return report.table(["chips", *COLLECTIVES, "MB moved by a chip"], cells)


def simulated_table(found: dict[str, Any]) -> str:
    """Returns the collectives and the time of a step on simulated devices."""
    cells = []
    for row in found["simulated"]:
        ratio = "" if row["system"] == PLAIN else f"{row['ratio']:.2f}"
        cells.append([str(row["devices"]), *_collectives(row), ratio])
    return report.table(["simulated devices", *COLLECTIVES, "time / plain"], cells)


def options_table(found: dict[str, Any]) -> str:
    """Returns what options add: bytes on a TPU, compile time on a CPU."""
    cells = []
    for row in found["options"]:
        ratios = [ours / theirs for theirs, ours in (row["bytes"], row["seconds"])]
        cells.append([row["option"], *(f"{ratio:.3g}" for ratio in ratios)])
        cells[-1].append(_digits(row["seconds"][1]))
    header = [
        "option",
        "bytes / plain, TPU v5e",
        "compile time / plain, CPU",
        "seconds",
    ]
    return report.table(header, cells)


def diagnostics_tables(found: dict[str, Any]) -> list[str]:
    """Returns the time of a first call by leaves, and what a trace costs by layers."""
    calls: dict[str, list[str]] = {}
    for row in found["diagnostics"]:
        calls.setdefault(row["call"], []).append(_digits(row["seconds"]))
    leaves = dict.fromkeys(str(row["leaves"]) for row in found["diagnostics"])
    cells = [[name, *seconds] for name, seconds in calls.items()]
    first = report.table(["first call, seconds, by leaves", *leaves], cells)
    names = ("compile", "time", "memory")
    cells = [
        [
            str(row["layers"]),
            str(row["operations"]),
            _digits(row["compile_s"]),
            *(f"{row[name]:.1f}" for name in names),
        ]
        for row in found["trace"]
    ]
    header = ["layers", "operations", "seconds to compile"]
    header += [f"{x} / step" for x in ("compile time", "time", "memory")]
    return [first, report.table(header, cells)]


def tables(found: dict[str, Any]) -> list[str]:
    """Returns all tables of the page."""
    return [
        *compile_tables(found),
        times_table(found),
        sizes_table(found),
        chips_table(found),
        simulated_table(found),
        options_table(found),
        *diagnostics_tables(found),
    ]


def versions(found: dict[str, Any]) -> str:
    """Returns the line of the page that tells the machine and the versions."""
    packages = ("jax", "optax", "libtpu", "flax", "jmp", "keras")
    named = ", ".join(f"{x} {found['versions'][x]}" for x in packages)
    mpx = found["versions"]["mixed_precision_for_JAX"]
    python = found["versions"]["python"]
    return f"{found['machine']['device']}; Python {python}, {named}, mpx {mpx}."


def plot(found: dict[str, Any]) -> Any:
    """Draws the time to compile by leaves, and the bytes by parameters."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 6.6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    _plot_compile(above, _by_system(_compiled(found, "adam")))
    theirs, ours, _ = _by_system(found["sizes"]).values()
    points = sorted(
        (plain["parameters"], scaled["bytes"] / plain["bytes"])
        for plain, scaled in zip(theirs, ours, strict=True)
        if plain["leaves"] == 20
    )
    below.plot(*zip(*points, strict=True), marker="o", color="#0072B2")
    below.axhline(1, color="black", linewidth=1)
    below.set(xscale="log", ylim=(0.95, 1.4), xlabel="parameters, in 20 leaves")
    below.set_title("Bytes of Adam's step on a TPU, relative to plain Optax")
    for axes in (above, below):
        axes.title.set_fontsize("medium")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _plot_compile(axes: Any, systems: dict[str, Rows]) -> None:
    colors = {
        PLAIN: "#7F7F7F",
        BARE: "#009E73",
        "apply_gradients": "#0072B2",
        "flax DynamicScale": "#CC79A7",
        "jmp": "#D55E00",
    }
    for name, color in colors.items():
        x, y = zip(
            *((row["leaves"], row["seconds"]) for row in systems[name]), strict=True
        )
        axes.plot(x, y, marker="o", color=color, label=name)
    axes.set(xscale="log", yscale="log", xlabel="leaves", ylabel="seconds")
    axes.set_xticks(leaves := [row["leaves"] for row in systems[PLAIN]], leaves)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)
    axes.set_title("Time to compile Adam's step for a CPU")


def refresh(page: str, found: dict[str, Any]) -> str:
    """Returns the page with its tables, machine and versions written anew."""
    about = textwrap.fill(versions(found), 100)
    page = re.sub(r"(?m)(?:^.+\n)+?(?=^\(\[script\])", f"{about}\n", page, count=1)
    return report.replace_tables(page, tables(found))


def write(found: dict[str, Any]) -> None:
    """Writes the tables into the page, and the figure."""
    PAGE.write_text(refresh(PAGE.read_text(), found))
    plot(found).savefig(FIGURE, dpi=120)
