"""The network, its data, and the five ways to train it: begin here."""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console
from rich.progress import Progress

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    LossScaleOptimizer,
    autocast,
    diagnostics,
)

SIDE, WIDTH = 8, 32  # Patches are 8 x 8; hidden layers have 32 units.
POSITIVES = 0.005  # The share of the patches that have a digit.
PRIOR = 0.01  # The first prediction of the network, as in RetinaNet.

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(3.0),
    "momentum": lambda: optax.sgd(1.0, momentum=0.9),
    "adam": lambda: optax.adam(3e-3),
}


class Way(NamedTuple):
    """A way to train.

    Attributes:
      name: Its name in the report and the figure.
      cast: The function that makes the loss function compute in float16; None if the
        layers do, or in float32.
      rule: The rule for the loss scale.
      color: Its color in the figure.
      dtype: The dtype of the layers: float16 if they are cast by hand.
    """

    name: str
    cast: Callable[[Callable[..., Any]], Callable[..., Any]] | None
    rule: LossScale
    color: str
    dtype: Any = jnp.float32


# A scale of 1 means no scaling. The dynamic scale starts at its default of 2**15, and
# doubles every 6 steps, not 2000, as a run has only 80. Color-blind readers can tell
# the colors apart.
FLOAT32 = Way("float32", None, FixedLossScale(1.0), "#8C8C8C")
UNSCALED = Way("float16, no scaling", autocast, FixedLossScale(1.0), "#D55E00")
FIXED = Way("float16, fixed scale", autocast, FixedLossScale(2.0**15), "#C9679C")
DYNAMIC_RULE = DynamicLossScale(growth_interval=6)
DYNAMIC = Way("float16, dynamic scale", autocast, DYNAMIC_RULE, "#1F83CC")
# The same without `autocast`. The figure leaves it out, because it would hide DYNAMIC.
BY_HAND = Way("dynamic, cast by hand", None, DYNAMIC_RULE, "#000000", jnp.float16)
WAYS = (FLOAT32, UNSCALED, FIXED, DYNAMIC, BY_HAND)


class Run(NamedTuple):
    """The results of one training run.

    Attributes:
      precision: The average precision on new patches.
      start: The metrics of the initial state, as a record of step 0.
      records: The record of every step: its number `step`, the metrics of the state
        after it, `loss`, and `zeros`, the share of the gradients of the last hidden
        layer's activations that are exactly zero. A step that is skipped has the share
        of the last one that was not.
      histograms: The exponents of these gradients, unscaled, as of every step.
    """

    precision: float
    start: dict[str, Any]
    records: list[dict[str, Any]]
    histograms: list[diagnostics.ExponentHistogram]

    def column(self, name: str) -> np.ndarray:
        """Returns an entry of the record of every step."""
        return np.array([record[name] for record in self.records])


class Detector(nn.Module):
    """Says whether there is a digit in a patch, initialized as RetinaNet is.

    An ordinary float32 network. With another `dtype` the layers cast by hand:
    parameters stay float32, and are cast where they are used.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits, f32[patch], of patches, f32[patch, pixel]."""
        for _ in range(2):
            init = nn.initializers.he_normal()
            x = nn.relu(nn.Dense(WIDTH, kernel_init=init, dtype=self.dtype)(x))
        # The gradient of a zero that is added is the gradient of the activations.
        x = self.perturb("hidden", x)
        init = nn.initializers.normal(0.01)
        prior = nn.initializers.constant(np.log(PRIOR / (1 - PRIOR)))
        head = nn.Dense(1, kernel_init=init, bias_init=prior, dtype=self.dtype)
        return head(x)[:, 0].astype(jnp.float32)


def keep_histogram() -> optax.GradientTransformation:
    """Keeps the exponents of the gradients in its state; its updates are zero."""

    def init(params):
        return diagnostics.exponent_histogram(params)

    def update(updates, state, params=None):
        histogram = diagnostics.exponent_histogram(updates)
        return optax.tree.zeros_like(updates), histogram

    return optax.GradientTransformation(init, update)


def load_pictures() -> tuple[jax.Array, jax.Array]:
    """Returns scikit-learn's photographs and digits, in gray, from -1 to 1."""
    # It takes seconds to import.
    from sklearn.datasets import load_digits, load_sample_images

    photos = np.mean(load_sample_images()["images"], -1) / 127.5 - 1
    pixels, _ = load_digits(return_X_y=True)
    digits = pixels.reshape(-1, SIDE, SIDE) / 8 - 1
    return jnp.asarray(photos, jnp.float32), jnp.asarray(digits, jnp.float32)


def make_batch(
    key: jax.Array, photos: jax.Array, digits: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Cuts patches from the photographs, and blends a digit into a few of them.

    Args:
      key: A random key.
      photos: f32[photo, height, width].
      digits: f32[digit, 8, 8].
      size: The number of patches.

    Returns:
      The patches, f32[size, 64], and whether they have a digit, bool[size].
    """
    corners, choices, draws = jax.random.split(key, 3)
    last = jnp.array(photos.shape) - jnp.array([0, SIDE, SIDE])
    corner = jax.random.randint(corners, (size, 3), 0, last)[..., None, None]
    photo, row, column = jnp.moveaxis(corner, 1, 0)
    square = jnp.arange(SIDE)
    patches = photos[photo, row + square[:, None], column + square]
    has_digit = jax.random.uniform(choices, (size,)) < POSITIVES
    drawn = digits[jax.random.randint(draws, (size,), 0, len(digits))]
    patches = jnp.where(has_digit[:, None, None], (patches + drawn) / 2, patches)
    return patches.reshape(size, -1), has_digit


def train_all_ways(steps: int, **options: Any) -> dict[Way, Run]:
    """Trains the network in every way.

    Shows a progress bar in a terminal, and else writes a line to stderr for each way.
    """
    pictures, runs = load_pictures(), {}
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=len(WAYS) * steps)
        advance = functools.partial(progress.advance, task)
        for way in WAYS:
            progress.update(task, description=f"{way.name:22}")
            if hidden:
                print(f"{way.name}: {steps} steps", file=sys.stderr)
            runs[way] = train(way, pictures, advance, steps, **options)
    return runs


def train(
    way: Way,
    pictures: tuple[jax.Array, jax.Array],
    advance: Callable[[], None],
    steps: int,
    seed: int,
    batch_size: int,
    optimizer: str,
    retries: int,
) -> Run:
    """Trains a detector in one way.

    The initial parameters and the batches depend on the seed, but not on the way.

    Args:
      way: The way to train.
      pictures: As `load_pictures` returns them.
      advance: Called after every step.
      steps: The number of steps.
      seed: The seed.
      batch_size: The number of patches in a batch.
      optimizer: The name of the inner optimizer, in `OPTIMIZERS`.
      retries: How often a step may repeat its pass at a lower scale.
    """
    network = Detector(way.dtype)
    inner = optax.partition(
        {"params": OPTIMIZERS[optimizer](), "perturbations": keep_histogram()},
        {"params": "params", "perturbations": "perturbations"},
    )
    wrapped = LossScaleOptimizer(inner, way.rule, retries=retries)
    batch_at = functools.partial(make_batch, size=batch_size)

    def loss_fn(variables, patches, has_digit):
        logits = network.apply(variables, patches)
        return optax.sigmoid_binary_cross_entropy(logits, has_digit).mean()

    loss_fn = way.cast(loss_fn) if way.cast else loss_fn

    @jax.jit
    def train_step(variables, opt_state, key, *pictures):
        batch = batch_at(key, *pictures)
        variables, opt_state, loss = wrapped.minimize(
            loss_fn, variables, opt_state, *batch
        )
        kept = opt_state.inner_state.inner_states["perturbations"].inner_state
        record = diagnostics.metrics(opt_state)
        record |= {"loss": loss, "zeros": kept.zeros / (batch_size * WIDTH)}
        return variables, opt_state, record, kept

    @jax.jit
    def test(params, key, *pictures):
        patches, has_digit = batch_at(key, *pictures)
        return Detector().apply({"params": params}, patches), has_digit

    first, last, *keys = jax.random.split(jax.random.key(seed), steps + 2)
    variables = network.init(first, jnp.zeros((batch_size, SIDE**2)))
    opt_state = wrapped.init(variables)
    start = {"step": 0, **jax.device_get(diagnostics.metrics(opt_state))}
    records, histograms = [], []
    for step, key in enumerate(keys, 1):
        variables, opt_state, record, histogram = train_step(
            variables, opt_state, key, *pictures
        )
        records.append({"step": step, **jax.device_get(record)})
        histograms.append(jax.device_get(histogram))
        advance()
    found = test(variables["params"], last, *pictures)
    logits, has_digit = map(np.asarray, found)
    from sklearn.metrics import average_precision_score

    precision = average_precision_score(has_digit, logits)
    return Run(float(precision), start, records, histograms)
