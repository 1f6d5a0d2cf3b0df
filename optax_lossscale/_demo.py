"""The demonstration's experiment, report and figure; `__main__` runs them."""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    LossScaleOptimizer,
    diagnostics,
)

SEEDS = 3
BATCH_SIZE = 449  # a third of the training set
TOLERANCE = 0.015  # Accuracies that differ by at most this much count as equal.

# Gradients are proportional to the loss weight. Dividing the learning rate of SGD by
# the weight, or multiplying the eps of Adam by it, makes updates independent of it.
OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "sgd": lambda weight: optax.sgd(0.2 / weight),
    "momentum": lambda weight: optax.sgd(0.05 / weight, momentum=0.9),
    "adam": lambda weight: optax.adam(2e-3, eps=1e-8 * weight),
}


class Way(NamedTuple):
    """A way to train.

    Attributes:
      name: Its name in the report and the figure.
      dtype: The dtype of the computation.
      rule: The rule for the loss scale.
      color: Its color in the figure.
    """

    name: str
    dtype: Any
    rule: LossScale
    color: str


# A scale of 1 means no scaling. The dynamic scale starts at its default of 2**15, and
# doubles every 10 steps, not 2000, as a run has only 500. Color-blind readers can tell
# the colors apart.
FLOAT32 = Way("float32", jnp.float32, FixedLossScale(1.0), "#B8B8B8")
UNSCALED = Way("float16, unscaled", jnp.float16, FixedLossScale(1.0), "#D55E00")
FIXED = Way("float16, fixed", jnp.float16, FixedLossScale(2.0**15), "#CC79A7")
DYNAMIC_RULE = DynamicLossScale(growth_interval=10)
DYNAMIC = Way("float16, dynamic", jnp.float16, DYNAMIC_RULE, "#0072B2")
WAYS = (FLOAT32, UNSCALED, FIXED, DYNAMIC)


class Run(NamedTuple):
    """The results of one training run.

    Attributes:
      accuracy: The accuracy on the test set.
      seconds: The duration of the run, without compilation.
      history: The metrics of the initial state (step 0) and of every step. Every step
        also has `loss`, without the loss weight, and `zeros`, the share of the
        gradients that are exactly zero.
      histograms: The exponents of the unscaled gradients of every step.
    """

    accuracy: float
    seconds: float
    history: diagnostics.History
    histograms: list[diagnostics.ExponentHistogram]


def train_all_ways(steps: int, **options: Any) -> dict[Way, list[Run]]:
    """Trains the network in every way.

    Shows a progress bar in a terminal, and else writes a line to stderr for each way.
    """
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 8 - 1).astype(np.float32)
    data = train_test_split(images, labels, stratify=labels, random_state=0)
    runs = {}
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=len(WAYS) * SEEDS * steps)
        advance = functools.partial(progress.advance, task)
        for way in WAYS:
            progress.update(task, description=f"{way.name:17}")
            if hidden:
                print(f"{way.name}: {SEEDS} runs of {steps} steps", file=sys.stderr)
            runs[way] = train(way, data, advance, steps, **options)
    return runs


def train(
    way: Way,
    data: Any,
    advance: Callable[[], None],
    steps: int,
    seed: int,
    loss_weight: float,
    optimizer: str,
) -> list[Run]:
    """Trains an 8-layer network in one way, once per seed.

    The initial parameters and the batches depend on the seed, but not on the way.

    Args:
      way: The way to train.
      data: Training images and test images, f32[n, 64] in [-1, 1], then their labels.
      advance: Called after every step.
      steps: The number of steps per run.
      seed: The first seed.
      loss_weight: The weight of the loss.
      optimizer: The name of the inner optimizer, in `OPTIMIZERS`.
    """
    images, test_images, labels, test_labels = data
    # Parameters are float32. Layers cast them to this dtype when they use them.
    dense = functools.partial(nn.Dense, dtype=way.dtype)
    hidden = [layer for _ in range(7) for layer in (dense(80), nn.tanh)]
    network: Any = nn.Sequential([*hidden, dense(10)])
    inner = OPTIMIZERS[optimizer](loss_weight)
    wrapped = LossScaleOptimizer(inner, way.rule)

    def loss_fn(params, images, labels):
        logits = network.apply(params, images).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return loss_weight * losses.mean()

    @jax.jit
    def train_step(params, opt_state, images, labels):
        grad_fn = wrapped.value_and_grad(loss_fn, opt_state)
        loss, grads = grad_fn(params, images, labels)
        params, opt_state = wrapped.apply_gradients(grads, params, opt_state)
        histogram = diagnostics.exponent_histogram(grads)
        zeros = histogram.zeros / sum(leaf.size for leaf in jax.tree.leaves(grads))
        record = diagnostics.metrics(opt_state)
        record |= {"loss": loss / loss_weight, "zeros": zeros}
        return params, opt_state, record, histogram

    runs = []
    for run_seed in range(seed, seed + SEEDS):
        params = network.init(jax.random.key(run_seed), images[:1])
        opt_state = wrapped.init(params)
        rng = np.random.default_rng(run_seed)
        # The first call compiles. That is not timed.
        train_step(params, opt_state, images[:BATCH_SIZE], labels[:BATCH_SIZE])
        histograms, history = [], diagnostics.History(capacity=steps + 1)
        history.record(0, diagnostics.metrics(opt_state))
        started = time.perf_counter()
        for step in range(1, steps + 1):
            batch = rng.choice(len(labels), BATCH_SIZE, replace=False)
            params, opt_state, record, histogram = train_step(
                params, opt_state, images[batch], labels[batch]
            )
            history.record(step, record)
            histograms.append(jax.device_get(histogram))
            advance()
        seconds = time.perf_counter() - started
        guesses = np.argmax(network.apply(params, test_images), axis=-1)
        accuracy = np.mean(guesses == test_labels)
        runs.append(Run(accuracy, seconds, history, histograms))
    return runs


def column(runs: list[Run], name: str) -> np.ndarray:
    """Returns a metric of every run and step, [runs, steps]."""
    return np.stack([run.history.columns[name] for run in runs])[:, 1:]


def mean_accuracy(runs: list[Run]) -> float:
    """Returns the accuracy, averaged over the seeds."""
    return float(np.mean([run.accuracy for run in runs]))


def mean_skips(runs: list[Run]) -> float:
    """Returns the number of skipped steps, averaged over the seeds."""
    return column(runs, "skipped_steps")[:, -1].mean()


def print_report(runs: dict[Way, list[Run]]) -> None:
    """Prints a table with a row for every way, then a summary in words."""
    titles = ("accuracy, %", "skipped", "scale", "zeros, %", "seconds")
    columns = [Column(title, justify="right") for title in titles]
    table = Table("training", *columns, box=box.SIMPLE_HEAD)
    for way, some in runs.items():
        percent = [100 * run.accuracy for run in some]
        table.add_row(
            way.name,
            f"{np.mean(percent):.1f} ({min(percent):.1f}-{max(percent):.1f})",
            f"{mean_skips(some):.0f}",
            f"2^{np.median(column(some, 'log2_loss_scale')[:, -1]):g}",
            f"{100 * column(some, 'zeros').mean():.1f}",
            f"{np.mean([run.seconds for run in some]):.1f}",
        )
    Console().print(table)
    print(
        f"Means over {SEEDS} seeds. accuracy: on the test set (lowest-highest).\n"
        "skipped: number of skipped steps. scale: median of the final loss scales.\n"
        "zeros: gradients that are exactly zero. seconds: time of one run, without\n"
        "compilation.\n"
    )
    print(describe(runs))


def describe(runs: dict[Way, list[Run]]) -> str:
    """Returns a summary of the runs in words."""
    accuracy = {way: mean_accuracy(some) for way, some in runs.items()}

    def verdict(way: Way) -> str:
        if accuracy[way] < 0.2:
            return f"does not learn ({accuracy[way]:.1%}, guessing gives 10%)"
        same = abs(accuracy[way] - accuracy[FLOAT32]) <= TOLERANCE
        return f"{'matches' if same else 'differs from'} float32 ({accuracy[way]:.1%})"

    if accuracy[FLOAT32] < 0.2:
        return (
            f"float32 itself {verdict(FLOAT32)}, so this says nothing about float16: "
            "try more --steps."
        )
    return (
        f"float32 reaches {accuracy[FLOAT32]:.1%}. Without loss scaling float16 "
        f"{verdict(UNSCALED)}: {column(runs[UNSCALED], 'zeros').mean():.1%} of its "
        f"gradients are zero. With a fixed scale it {verdict(FIXED)}. With the dynamic "
        f"scale it {verdict(DYNAMIC)}, and skips {mean_skips(runs[DYNAMIC]):.0f} of "
        f"{len(runs[DYNAMIC][0].histograms)} steps."
    )


def draw_figure(runs: dict[Way, list[Run]], path: Path) -> None:
    """Draws all losses, and the scale and gradients of the first dynamic run."""
    figure = Figure(figsize=(9, 6.4), dpi=140, layout="constrained")
    axes = figure.subplot_mosaic("ls;gg", height_ratios=[1, 0.85])

    for way, some in runs.items():
        width, dashes = 5 if way == FLOAT32 else 2, "--" if way == DYNAMIC else "-"
        style = {"color": way.color, "label": way.name, "linestyle": dashes}
        losses = column(some, "loss").mean(axis=0)
        axes["l"].semilogy(losses, linewidth=width, **style)
    axes["l"].set(xlabel="step", ylabel="loss")
    axes["l"].spines[["top", "right"]].set_visible(False)
    axes["l"].legend(frameon=False)

    first = runs[DYNAMIC][0]
    diagnostics.plot_history(first.history, ax=axes["s"])
    # Draw the last step that was applied, or the last one if every step was skipped.
    applied = column([first], "last_step_applied")[0]
    last = len(applied) - 1 - np.argmax(applied[::-1])
    # The history starts with the initial state, so row `last` is before that step.
    scale = first.history.columns["loss_scale"][last]
    diagnostics.plot_exponents(first.histograms[last], scale, ax=axes["g"])

    axes["l"].set_title("Training loss", loc="left", fontweight="bold")
    axes["s"].set_title("Dynamic loss scale", loc="left", fontweight="bold")
    title = f"Gradients of step {last + 1}"
    axes["g"].set_title(title, loc="left", fontweight="bold")
    figure.savefig(path)
