"""The tables and the figure of `docs/guide/growth.md`.

`python -m benchmarks.growth_page` writes them from the committed results.
"""

from typing import Any

from benchmarks import report
from benchmarks.systems import PLAIN

RESULTS = report.RESULTS / "growth.json"
DOCS = report.RESULTS.parents[1] / "docs"
PAGE, FIGURE = DOCS / "guide" / "growth.md", DOCS / "growth.png"
Rows = list[dict[str, Any]]


def _megabytes(number: float) -> str:
    """Returns three digits."""
    return f"{float(f'{number / 1e6:.3g}'):,g}"


def _by_system(rows: Rows) -> dict[str, Rows]:
    """Returns rows by the name of their system."""
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(report.call_of(row["system"]), []).append(row)
    return found


def _compiled(found: dict[str, Any], optimizer: str) -> dict[str, Rows]:
    rows = [row for row in found["compile"] if row["optimizer"] == optimizer]
    return _by_system(rows)


def compile_table(found: dict[str, Any], optimizer: str) -> str:
    """Returns the times to compile for a CPU, by leaves."""
    systems = _compiled(found, optimizer)
    leaves = [row["leaves"] for row in systems[PLAIN]]
    cells = [["plain, seconds", *(f"{row['seconds']:.2g}" for row in systems[PLAIN])]]
    others = [name for name in systems if name != PLAIN and "no scaling" not in name]
    for name in sorted(others, key=lambda x: not x.startswith((*report.OURS, "bare"))):
        ratios = [f"{row['ratio']:.3g}" for row in systems[name]]
        cells.append([name, *ratios, *[""] * (len(leaves) - len(ratios))])
    title = "SGD" if optimizer == "sgd" else optimizer.title()
    header = [f"{title}: compile time / plain, by leaves", *map(str, leaves)]
    return report.table(header, cells)


def sizes_table(found: dict[str, Any]) -> str:
    """Returns bytes and compile times on a TPU, by parameters and leaves."""
    theirs, *ours = _by_system(found["sizes"]).values()
    cells = []
    for plain, *rows in zip(theirs, *ours, strict=True):
        count = f"{plain['parameters']:.0e}".replace("e+0", "e")
        cells.append(
            [
                count,
                str(plain["leaves"]),
                _megabytes(plain["bytes"]),
                *(f"{row['bytes'] / plain['bytes']:.3g}" for row in rows),
                f"{plain['seconds']:.2g}",
                *(f"{row['seconds'] / plain['seconds']:.2g}" for row in rows),
            ]
        )
    calls = ("apply_gradients", "update")
    header = ["parameters", "leaves", "plain, MB", *(f"{x}, bytes" for x in calls)]
    header += ["plain, seconds", *(f"{x}, compile time" for x in calls)]
    return report.table(header, cells)


def _listed(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def chips_table(found: dict[str, Any]) -> str:
    """Returns the collectives of a sharded step, and what a chip moves."""
    cells = []
    for row in found["chips"]:
        slices = f" in {row['slices']} slices" if row["slices"] > 1 else ""
        cells.append(
            [
                f"{row['chips']}{slices}",
                "plain" if row["system"] == PLAIN else report.call_of(row["system"]),
                _listed(row["arrays"]),
                _megabytes(row["array_bytes"]),
                _listed(row["small"]),
                str(row["small_bytes"]),
                _megabytes(row["bytes"]),
            ]
        )
    header = ["chips", "step", "collectives of arrays", "their MB"]
    header += ["collectives of scalars", "their bytes", "MB moved by a chip"]
    return report.table(header, cells)


def options_table(found: dict[str, Any]) -> str:
    """Returns what options add: bytes on a TPU, compile time on a CPU."""
    cells = []
    for row in found["options"]:
        ratios = [ours / theirs for theirs, ours in (row["bytes"], row["seconds"])]
        cells.append([row["option"], *(f"{ratio:.3g}" for ratio in ratios)])
        cells[-1].append(f"{row['seconds'][1]:.2g}")
    header = [
        "option",
        "bytes / plain, TPU v5e",
        "compile time / plain, CPU",
        "seconds",
    ]
    return report.table(header, cells)


def tables(found: dict[str, Any]) -> list[str]:
    """Returns all tables of the page."""
    compiled = [compile_table(found, optimizer) for optimizer in ("adam", "sgd")]
    return [*compiled, sizes_table(found), chips_table(found), options_table(found)]


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
    _plot_compile(above, _compiled(found, "adam"))
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
        "bare check and branch": "#009E73",
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
    """Returns the page with its tables written anew."""
    return report.replace_tables(page, tables(found))


def write(found: dict[str, Any]) -> None:
    """Writes the tables into the page, and the figure."""
    PAGE.write_text(refresh(PAGE.read_text(), found))
    plot(found).savefig(FIGURE, dpi=120)


if __name__ == "__main__":
    write(report.load(RESULTS))
