"""Training steps in float32, bfloat16 and float16, measured side by side."""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._autocast.cast import autocast, function_of
from optax_lossscale._jaxprs.parts import all_equations
from optax_lossscale._jaxprs.primitives import Kind, kind_of
from optax_lossscale._models import combine, is_module, partition, trainable
from optax_lossscale._optimizer import LossScaleOptimizer
from optax_lossscale._tree import is_key, split_arrays
from optax_lossscale.diagnostics._common import check_host, is_watched

FLOAT32, TF32 = "float32", "float32, products in TF32 (JAX's default)"
BFLOAT16, MINIMIZE = "autocast to bfloat16", "autocast to float16, minimize"
RETRIES, ALONE = "autocast to float16, minimize, retries=24", "the optimizer alone"
TURNS, SECONDS, WARM_UP = 5, 0.3, 3  # The first steps may overflow.


class Way(NamedTuple):
    """One way to train.

    Attributes:
      init: Maps parameters to the initial state.
      step: Maps `params, state, *batch` to new `params, state` and the loss.
    """

    init: Callable[..., Any]
    step: Callable[..., Any]


def compare(
    loss_fn: Callable[..., Any],
    params: Any,
    *batch: Any,
    optimizer: Any = None,
    has_aux: bool = False,
) -> dict[str, dict[str, Any]]:
    """Measures your training step in float32, bfloat16 and float16, side by side.

    It prints a table, and names the limits of your step. Run it where you train: a CPU
    says nothing of a GPU. It compiles the step in each way, and runs all ways in turns
    on one device for about ten seconds. `params` stay as they are.

    Args:
      loss_fn: The loss function, in float32 or as `autocast(loss_fn)`; called as
        `loss_fn(params, *batch)`.
      params: The parameters, or a model of any library.
      *batch: The other arguments of `loss_fn`.
      optimizer: An optimizer of Optax, or a `LossScaleOptimizer`, of which the inner
        one counts; `optax.adamw(1e-4)` by default.
      has_aux: Whether `loss_fn` returns auxiliary data as well.

    Returns:
      The table as a dictionary, with one for each way in it: `ms`, the median time of
      a step; `low` and `high`, the lowest and the highest of five turns; `call_ms`,
      the time until a call returns; `temp_bytes`, the temporary memory; `products`,
      how many matrix products compute in 16 bits; and `applied`, False if the last
      step was skipped.

    Raises:
      TypeError: Under a transformation of JAX, such as `jax.jit`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import diagnostics
      >>> def loss_fn(params, x):
      ...     return jnp.mean((x @ params["w"]) ** 2)
      >>> params = {"w": jnp.ones((64, 64))}
      >>> x = jnp.ones((32, 64))
      >>> table = diagnostics.compare(loss_fn, params, x)  # doctest: +ELLIPSIS
      On ... ms a step ... float32 ...
      >>> table["autocast to bfloat16"]["products"]
      '2 of 2'
    """
    check_host("compare", (params, batch))
    optimizer = optax.adamw(1e-4) if optimizer is None else optimizer
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    rows = measure(ways(loss_fn, optimizer, has_aux), params, batch)
    device = jax.devices()[0]
    kind = "a CPU" if device.platform == "cpu" else device.device_kind
    print(f"On {kind}, jax {jax.__version__}:\n\n{table(rows)}\n")
    print(limits(rows, device.platform))
    return rows


def name_of_float32(device: Any) -> str:
    """Names the precision in which a device multiplies float32 arrays."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    if minor.isdigit() and int(major) >= 8:
        return TF32
    return TF32.replace("TF32", "bfloat16") if device.platform == "tpu" else FLOAT32


def minimize(
    loss_fn: Callable[..., Any], optimizer: Any, has_aux: bool = False, **options: Any
) -> Way:
    """Returns the step of `minimize`, given options of `LossScaleOptimizer`."""
    scaling = LossScaleOptimizer(optimizer, **options)

    def step(params, state, *batch):
        return scaling.minimize(loss_fn, params, state, *batch, has_aux=has_aux)

    return Way(scaling.init, step)


def alone(optimizer: Any) -> Way:
    """Returns the step of an optimizer on gradients that are given."""
    unscaled = LossScaleOptimizer(optimizer, 1.0)

    def init(params):
        grads = trainable(partition(params)[0])
        return unscaled.init(params), jax.tree.map(jnp.copy, grads)

    def step(params, state, *batch):
        state, grads = state
        params, state = unscaled.apply_gradients(grads, params, state)
        return params, (state, grads), 0.0

    return Way(init, step)


def ways(
    loss_fn: Callable[..., Any], optimizer: Any, has_aux: bool = False, **options: Any
) -> dict[str, Way]:
    """Returns the ways to train: with the loss as it is, and with `autocast`."""
    half = autocast(loss_fn)
    written, bfloat16 = function_of(half), autocast(loss_fn, jnp.bfloat16)
    plain = {"loss_scale": 1.0}  # It costs nothing.
    return {
        name_of_float32(jax.devices()[0]): minimize(
            written, optimizer, has_aux, **plain
        ),
        BFLOAT16: minimize(bfloat16, optimizer, has_aux, **plain),
        MINIMIZE: minimize(half, optimizer, has_aux, **options),
        RETRIES: minimize(half, optimizer, has_aux, retries=24, **options),
        ALONE: alone(optimizer),
    }


def products_of(jaxpr: Any) -> str:
    """Counts the matrix products in half precision, and all; those of loops once."""
    sizes = [
        equation.invars[0].aval.dtype.itemsize
        for equation in all_equations(jaxpr)
        if kind_of(equation.primitive.name) is Kind.PRODUCT
    ]
    return f"{sizes.count(2)} of {len(sizes)}"


def time_steps(
    program: Callable[..., Any], carry: Any, batch: Any, seconds: float
) -> Any:
    """Runs a compiled step from its start for about `seconds`.

    Returns:
      The ms of a step; the ms until a call returns; and whether the last step was
      applied.
    """

    def steps(count):
        nonlocal carry
        start = time.perf_counter()
        for _ in range(count):
            carry = program(*carry, batch)
        called = time.perf_counter() - start
        jax.block_until_ready(carry)
        return 1e3 * (time.perf_counter() - start), 1e3 * called

    steps(WARM_UP)
    once, called = steps(1)
    count = max(1, round(1e3 * seconds / once))
    each = steps(count)[0] / count
    return each, called, bool(getattr(carry[1], "last_step_applied", True))


def measure(
    ways: dict[str, Way], params: Any, batch: tuple, seconds: float = SECONDS
) -> dict[str, dict[str, Any]]:
    """Runs all ways in turns, each for about `seconds` in a turn; see `compare`.

    Only one way at a time is on the device. Of models, the arrays are arguments.
    """
    trained, rest = partition(params)
    numbers = float, complex  # Those that a step trains become arrays.
    trained = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, numbers) else x,
        trained,
        is_leaf=is_module,
    )
    params = combine(trained, rest)
    arrays, join = split_arrays(params)
    arrays = [x if is_key(x) else jax.device_get(x) for x in arrays]
    inputs, join_batch = split_arrays(batch)
    inputs = jax.device_put(inputs)
    rows, programs, times = {}, {}, {name: [] for name in ways}
    for name, way in ways.items():

        def init(arrays, way=way):
            return way.init(join(arrays))

        def step(arrays, state, inputs, way=way):
            new = way.step(join(arrays), state, *join_batch(inputs))
            return split_arrays(new[0])[0], new[1]

        _tell(f"compiling: {name}")
        state = jax.eval_shape(init, arrays)
        traced = jax.jit(step, donate_argnums=(0, 1)).trace(arrays, state, inputs)
        programs[name] = jax.jit(init), traced.lower().compile()
        size = programs[name][1].memory_analysis().temp_size_in_bytes
        products = products_of(traced.jaxpr.jaxpr)
        rows[name] = {"temp_bytes": size, "products": products}
    for turn in range(TURNS):
        _tell(f"running: turn {turn + 1} of {TURNS}")
        for name, (init, program) in programs.items():
            # Copies, which the first step may overwrite.
            carry = jax.tree.map(jnp.copy, jax.device_put(arrays)), init(arrays)
            times[name].append(time_steps(program, carry, inputs, seconds))
    for name, row in rows.items():
        ms, call_ms, applied = zip(*times[name], strict=True)
        row |= {"ms": statistics.median(ms), "low": min(ms), "high": max(ms)}
        row |= {"call_ms": statistics.median(call_ms), "applied": applied[-1]}
    return rows


def _tell(text: str) -> None:
    if is_watched():
        print(text, file=sys.stderr, flush=True)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the rows side by side, relative to the first."""
    lines = [f"{'':44}{'ms a step':>11}{'/ float32':>11}{'temporary MB':>14}"]
    first = next(iter(rows.values()))["ms"]
    for way, row in rows.items():
        ratio, size = row["ms"] / first, row["temp_bytes"] / 1e6
        lines.append(f"{way:44}{row['ms']:11.3g}{ratio:11.2f}{size:14,.1f}")
    return "\n".join(lines)


def limits(rows: dict[str, dict[str, Any]], platform: str) -> str:
    """Names the possible limits of a step, each with its number."""
    half, optimizer = rows[MINIMIZE], rows[ALONE]
    lines = [
        f"{half['products']} matrix products compute in float16. They alone are faster "
        "there: it takes many large ones, and a large batch.",
        f"The optimizer takes {optimizer['ms']:.3g} of {half['ms']:.3g} ms, and stays "
        "float32. In a larger batch it is a smaller part.",
        f"The host takes {half['call_ms']:.3g} ms to start a step. If your loop takes "
        "longer than this table, the host is the limit: data, logs, small steps.",
    ]
    if not half["applied"]:
        lines.append(
            "The last step in float16 was skipped: its gradients are not finite. Ask "
            "trace_numerics why."
        )
    if TF32 in rows:
        lines.append(
            "JAX multiplies float32 arrays in TF32 here: they are fast already."
        )
    if platform == "cpu":
        lines.append("A CPU says nothing of a GPU. Measure where you train.")
    return "\n".join(f"- {line}" for line in lines)
