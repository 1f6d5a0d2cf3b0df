"""Draws the figures of the pages, in light and dark: `python -m docs._mkdocs.figures`.

It runs the demonstration, which takes a minute.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from examples.digits import __main__ as digits, report, train
from optax_lossscale import diagnostics

DOCS = Path(__file__).parents[1]
# For telephones, letters are large. Dark figures show the background of the page.
SHARED = {"font.size": 13, "savefig.dpi": 200}
SHARED |= {"figure.constrained_layout.w_pad": 0.08}
FACES = dict.fromkeys((f"{x}.facecolor" for x in ("figure", "axes", "savefig")), "none")
STYLES = {
    "": [SHARED],
    "-dark": ["dark_background", SHARED | FACES | {"legend.facecolor": "#1E2129"}],
}


def draw_all(runs: dict[train.Way, train.Run], suffix: str) -> None:
    """Draws all figures in the style that is set."""
    report.draw_figure(runs, DOCS / f"demo{suffix}.png")
    run = runs[train.DYNAMIC]
    axes = diagnostics.plot_history([run.start, *run.records])
    axes.set_title("Loss scale of the demonstration")
    axes.figure.savefig(DOCS / f"history{suffix}.png")
    step, scale = report.middle_step(run)
    axes = diagnostics.plot_exponents(run.histograms[step], scale)
    axes.set_title(f"Gradients of the demonstration, step {step + 1}")
    axes.figure.savefig(DOCS / f"exponents{suffix}.png")


def main() -> None:
    """Draws all figures in both styles."""
    options = vars(digits.make_parser().parse_args([]))
    runs = train.train_all_ways(**options)
    for suffix, style in STYLES.items():
        with plt.style.context(style):
            draw_all(runs, suffix)
        plt.close("all")


if __name__ == "__main__":
    main()
