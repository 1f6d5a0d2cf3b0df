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
from jax.flatten_util import ravel_pytree
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
)

SEEDS = 3
BATCH_SIZE = 449  # a third of the training set
TOLERANCE = 0.015  # of accuracy, within which two ways count as equal

# Gradients are proportional to the loss weight. So are the steps of SGD, unless the
# learning rate makes up for it; Adam divides the weight out, if eps is small enough.
OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "sgd": lambda weight: optax.sgd(0.2 / weight),
    "momentum": lambda weight: optax.sgd(0.05 / weight, momentum=0.9),
    "adam": lambda weight: optax.adam(2e-3, eps=1e-8 * weight),
}

# The histogram of gradient exponents: bin 0 counts the zeros, the last bin what is
# not finite, and bin k the magnitudes from 2**(k - BIAS) to below twice that.
BINS, BIAS = 160, 80


class Way(NamedTuple):
    """A way to train: the dtype of the computation, the loss scale, and a color."""

    name: str
    dtype: Any
    loss_scale: LossScale
    color: str


# A scale of one is no scaling. The first dynamic scale is far too high on purpose:
# one that is too high is lowered every step, one that is too low waits to be raised.
# Color-blind readers tell the colors apart.
FLOAT32 = Way("float32", jnp.float32, FixedLossScale(1.0), "#B8B8B8")
UNSCALED = Way("float16, unscaled", jnp.float16, FixedLossScale(1.0), "#D55E00")
FIXED = Way("float16, fixed", jnp.float16, FixedLossScale(2.0**15), "#0072B2")
DYNAMIC_SCALE = DynamicLossScale(initial_scale=2.0**48, growth_interval=25)
DYNAMIC = Way("float16, dynamic", jnp.float16, DYNAMIC_SCALE, "#009E73")
WAYS = (FLOAT32, UNSCALED, FIXED, DYNAMIC)


class Runs(NamedTuple):
    """What came of training in one way, with every seed and at every step.

    Attributes:
      accuracy: float[SEEDS], on the test set.
      seconds: float[SEEDS], without compilation.
      final_scale: f32[SEEDS].
      losses: f32[SEEDS, steps], without the loss weight.
      scales: f32[SEEDS, steps], the loss scale that the step used.
      applied: bool[SEEDS, steps], False if the step was skipped.
      exponents: int[SEEDS, steps, BINS], the histogram of the scaled gradients.
    """

    accuracy: np.ndarray
    seconds: np.ndarray
    final_scale: np.ndarray
    losses: np.ndarray
    scales: np.ndarray
    applied: np.ndarray
    exponents: np.ndarray

    @property
    def skipped_steps(self) -> float:
        """How many steps were skipped, on average over the seeds."""
        return np.sum(~self.applied, axis=1).mean()

    @property
    def zero_share(self) -> float:
        """The share of exactly-zero entries in the gradients of all steps."""
        return self.exponents[..., 0].sum() / self.exponents.sum()


def train_all_ways(steps: int, **options: Any) -> dict[Way, Runs]:
    """Trains the network in every way, and shows a progress bar on a terminal."""
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
            runs[way] = train(way, data, advance, steps, **options)
    return runs


def train(
    way: Way,
    data: Any,
    advance: Callable[[], None],
    steps: int,
    seed: int,
    loss_weight: float,
    inner_optimizer: str,
) -> Runs:
    """Trains a network of 8 layers in one way, with every seed.

    A seed gives the same initial parameters and the same batches in all ways.

    Args:
      way: The way.
      data: Images to train on and to test on, f32[n, 64] in [-1, 1], and their labels.
      advance: Called after every step.
      steps: The steps of every run.
      seed: The first seed.
      loss_weight: The factor of the loss.
      inner_optimizer: Its name.
    """
    images, test_images, labels, test_labels = data
    # The parameters are float32, and cast to this dtype where they are used.
    dense = functools.partial(nn.Dense, dtype=way.dtype)
    hidden = [layer for _ in range(7) for layer in (dense(80), nn.tanh)]
    network: Any = nn.Sequential([*hidden, dense(10)])
    inner = OPTIMIZERS[inner_optimizer](loss_weight)
    optimizer = LossScaleOptimizer(inner, way.loss_scale)

    def loss_fn(params, images, labels):
        logits = network.apply(params, images).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return loss_weight * losses.mean()

    @jax.jit
    def train_step(params, opt_state, images, labels):
        scale = optimizer.current_loss_scale(opt_state)
        grad_fn = optimizer.value_and_grad(loss_fn, opt_state)
        loss, grads = grad_fn(params, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        exponents = count_exponents(scale * ravel_pytree(grads)[0])
        record = loss / loss_weight, scale, opt_state.last_step_applied, exponents
        return params, opt_state, record

    runs = []
    for run_seed in range(seed, seed + SEEDS):
        params = network.init(jax.random.key(run_seed), images[:1])
        opt_state = optimizer.init(params)
        rng = np.random.default_rng(run_seed)
        # The first call compiles, which is not to be timed.
        train_step(params, opt_state, images[:BATCH_SIZE], labels[:BATCH_SIZE])
        records = []
        started = time.perf_counter()
        for _ in range(steps):
            batch = rng.choice(len(labels), BATCH_SIZE, replace=False)
            params, opt_state, record = train_step(
                params, opt_state, images[batch], labels[batch]
            )
            records.append(jax.device_get(record))
            advance()
        seconds = time.perf_counter() - started
        guesses = np.argmax(network.apply(params, test_images), axis=-1)
        accuracy = np.mean(guesses == test_labels)
        history = map(np.stack, zip(*records, strict=True))
        runs.append(
            (accuracy, seconds, optimizer.current_loss_scale(opt_state), *history)
        )
    return Runs(*map(np.stack, zip(*runs, strict=True)))


def count_exponents(entries: jax.Array) -> jax.Array:
    """Counts the entries of every exponent: int[BINS]."""
    exponents = jnp.clip(jnp.frexp(entries)[1] - 1 + BIAS, 1, BINS - 2)
    bins = jnp.where(jnp.isfinite(entries), exponents, BINS - 1)
    return jnp.bincount(jnp.where(entries == 0, 0, bins), length=BINS)


def print_report(runs: dict[Way, Runs]) -> None:
    """Prints a table, one row for every way, and what it shows in words."""
    titles = ("accuracy, %", "skipped", "scale", "zeros, %", "seconds")
    columns = [Column(title, justify="right") for title in titles]
    table = Table("training", *columns, box=box.SIMPLE_HEAD)
    for way, some in runs.items():
        percent = 100 * some.accuracy
        table.add_row(
            way.name,
            f"{percent.mean():.1f} ({percent.min():.1f}-{percent.max():.1f})",
            f"{some.skipped_steps:.0f}",
            f"2^{np.log2(np.median(some.final_scale)):g}",
            f"{100 * some.zero_share:.1f}",
            f"{some.seconds.mean():.1f}",
        )
    Console().print(table)
    print(
        f"Means of {SEEDS} seeds (lowest-highest). accuracy: on the test set.\n"
        "skipped: steps. scale: the final loss scale, median. zeros: exactly-zero\n"
        "gradients. seconds: of one run, without compilation.\n"
    )
    print(describe(runs))


def describe(runs: dict[Way, Runs]) -> str:
    """Says in words what the runs have shown."""
    accuracy = {way: some.accuracy.mean() for way, some in runs.items()}

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
        f"{verdict(UNSCALED)}: {runs[UNSCALED].zero_share:.1%} of its gradients are "
        f"zero. With a fixed scale it {verdict(FIXED)}. With the dynamic scale it "
        f"{verdict(DYNAMIC)}, and skips {runs[DYNAMIC].skipped_steps:.0f} of "
        f"{runs[DYNAMIC].applied.shape[1]} steps."
    )


def draw_figure(runs: dict[Way, Runs], path: Path) -> None:
    """Draws losses, the loss scales of the first seed, and gradients' exponents."""
    figure = Figure(figsize=(9, 6.4), dpi=140, layout="constrained")
    axes = figure.subplot_mosaic("ls;gg", height_ratios=[1, 0.85])
    for name, title, xlabel in (
        ("l", "Training loss", "step"),
        ("s", "Loss scale", "step"),
        ("g", "Gradients and the range of float16", "magnitude"),
    ):
        axes[name].set_title(title, loc="left", fontweight="bold")
        axes[name].set_xlabel(xlabel)
        axes[name].spines[["top", "right"]].set_visible(False)

    for way, some in runs.items():
        width, dashes = 5 if way == FLOAT32 else 2, "--" if way == DYNAMIC else "-"
        style = {"color": way.color, "label": way.name, "linestyle": dashes}
        axes["l"].semilogy(some.losses.mean(axis=0), linewidth=width, **style)
    axes["l"].legend(frameon=False)

    for way in (DYNAMIC, FIXED):
        scales = runs[way].scales[0]
        style = {"color": way.color, "label": way.name, "drawstyle": "steps"}
        axes["s"].semilogy(scales, base=2, linewidth=2, **style)
    skipped = np.flatnonzero(~runs[DYNAMIC].applied[0])
    label = f"skipped step ({len(skipped)})"
    axes["s"].plot(skipped, runs[DYNAMIC].scales[0, skipped], "kx", label=label)
    axes["s"].legend(frameon=False)

    draw_exponents(axes["g"], runs)
    figure.savefig(path)


def draw_exponents(axis: Any, runs: dict[Way, Runs]) -> None:
    """Draws the magnitudes of the gradients of applied steps, against float16."""
    low, high = -32, 23
    for way, color, label in (
        (FLOAT32, UNSCALED.color, "before scaling"),
        (DYNAMIC, DYNAMIC.color, "after dynamic scaling"),
    ):
        counts = runs[way].exponents[runs[way].applied].sum(axis=0)[1:-1]
        percent = 100 * counts / max(1, counts.sum())
        exponents = np.arange(1, BINS - 1) - BIAS
        axis.bar(exponents + 0.5, percent, 0.9, color=color, label=label)
        seen = exponents[percent > 0.1]
        low, high = min([low, *seen - 2]), max([high, *seen + 3])
    for start, stop, name, shade in (
        (low, -24, "becomes zero", "#F3D9C9"),
        (-24, -14, "subnormal", "#FBF3D0"),
        (-14, 16, "normal float16", "#DDF0E8"),
        (16, high, "infinite", "#F3D9C9"),
    ):
        axis.axvspan(start, stop, color=shade, zorder=0, linewidth=0)
        top = {"transform": axis.get_xaxis_transform(), "ha": "center", "va": "top"}
        axis.text((start + stop) / 2, 0.97, name, **top)
    axis.set_xticks([*range(-24, low, -10), -14, 0, 16])
    axis.xaxis.set_major_formatter("$2^{{{x:.0f}}}$")
    axis.set(xlim=(low, high), ylabel="% of parameter gradients")
    axis.margins(y=0.2)
    axis.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2)
