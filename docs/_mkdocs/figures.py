"""Draws the figures of the pages, in light and dark: `python -m docs._mkdocs.figures`.

It runs the demonstration, which takes a minute, and reads `benchmarks/results`.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import grpo
from benchmarks.report import load
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
COLORED = (train.FLOAT32, train.DYNAMIC, train.UNSCALED)


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
    draw_grpo(grpo.RESULTS.with_name(f"grpo{suffix}.png"))


def draw_grpo(path: Path) -> None:
    """Draws float16 and bfloat16 in reinforcement learning."""
    runs = load(grpo.RESULTS)["runs"]
    figure, panels = plt.subplots(1, 2, figsize=(7, 3.6), layout="constrained")
    colors = [*map(report.color_of, COLORED), report.GREEN]
    for axes, name in zip(panels, grpo.CURVES, strict=True):
        for color, (way, seeds) in zip(colors, runs.items(), strict=True):
            curves = np.array([run[name] for run in seeds])
            steps = (np.arange(curves.shape[1]) + 0.5) * grpo.EVERY
            axes.plot(steps, curves.mean(0), color=color, linewidth=2)
            spread = curves.min(0), curves.max(0)
            axes.fill_between(steps, *spread, color=color, alpha=0.2, linewidth=0)
            if name == "mean_difference":
                is_above = way in ("float32", "bfloat16")
                label = "without excess precision" if grpo.AS_WRITTEN in way else way
                place = (2, curves[:, 0].mean() * (1.3 if is_above else 0.7))
                style = {"color": color, "va": "bottom" if is_above else "top"}
                axes.text(*place, label, **style)
        axes.set_xlabel(f"step (band: {grpo.SEEDS} seeds)")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(yscale="log", ylim=(3e-8, 3e-2), ylabel="mean difference")
    panels[0].set_title("Log-probabilities of\nsampler and trainer", loc="left")
    panels[1].set(ylabel="share of right answers", ylim=(0, 0.7))
    panels[1].set_title("Reward\n(same colors)", loc="left")
    figure.savefig(path)


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
