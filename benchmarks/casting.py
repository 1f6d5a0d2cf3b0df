"""Measures what `autocast` computes, and what it costs: `python -m benchmarks.casting`.

Compares it with float32, with casts by hand and with other libraries: the errors of
public models, small trainings, the products in float16 of a transformer, and the time
to trace. Adds to `results/casting.json`. Arguments name some of these parts: `models`.
`peers` needs `pip install grampax==0.1.0 quax==0.3.8`.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import by_hand, need, report
from benchmarks.errors import differences, gradients
from benchmarks.tasks import TASKS
from optax_lossscale import autocast
from optax_lossscale._jaxprs.parts import all_equations

RESULTS = report.RESULTS / "casting.json"
FORMS = "GPT-2", "GPT-2, scanned", "GPT-2, rematerialized"


def errors() -> dict[str, dict[str, Any]]:
    """Returns by model and way the errors of the loss and of the worst gradient."""
    from benchmarks.models import HALF, models

    rows = {}
    for name, model in models().items():
        plain, x = model.loss(), model.x
        naive = lambda p, x, f=plain: f(*optax.tree.cast((p, x), HALF))  # noqa: E731
        ways = {"autocast": autocast(plain), "naive cast": naive}
        if model.takes_dtype:
            ways["by hand"] = model.loss(HALF)
        right = gradients(plain, model.params, x)
        rows[name] = {k: _errors(f, model.params, x, right) for k, f in ways.items()}
        print(name, rows[name], flush=True)
    return rows


def _errors(loss_fn, params, x, right):
    """Returns both errors, None if not finite, or the error that is raised."""
    try:
        found = gradients(loss_fn, params, x)
    except (TypeError, ValueError) as error:
        return type(error).__name__
    return differences(found, right)


def trainings() -> dict[str, dict[str, list[float]]]:
    """Returns by task and way the losses at the end of 100 steps, for three seeds."""
    rows = {}
    for make in TASKS:
        task = make(100)

        def mended(*args, dtype, loss_fn=task.loss_fn):
            del dtype
            return autocast(functools.partial(loss_fn, dtype=jnp.float32))(*args)

        ways = {"float32": task, "float16, dynamic": task}
        ways["autocast"] = task._replace(loss_fn=mended)
        rows[task.name] = {
            way: [
                need.final_loss(x, "float16, dynamic" if x is not task else way, seed)
                for seed in range(3)
            ]
            for way, x in ways.items()
        }
    return rows


def _equations(f, *args):
    return list(all_equations(jax.make_jaxpr(f)(*args).jaxpr))


def peers() -> dict[str, dict[str, Any]]:
    """Returns what libraries compute in float16 of a transformer of Haiku."""
    import grampax
    import jmp
    import mpx

    from benchmarks.models import models

    model = models()["Haiku: transformer"]
    plain = model.loss()
    half = jmp.Policy(jnp.float32, jnp.float16, jnp.float32)
    ways = {
        "float32": plain,
        "autocast": autocast(plain),
        "jmp": lambda *x: half.cast_to_output(plain(*half.cast_to_compute(x))),
        "mpx": mpx.cast_function(plain, jnp.float16, jnp.float32),
        "Haiku's policies": model.loss(jnp.float16),
        "grampax": grampax.autocast(plain, dtype=jnp.float16),
    }
    rows = {}
    for name, loss_fn in ways.items():
        forward = _equations(loss_fn, model.params, model.x)
        both = _equations(jax.grad(loss_fn), model.params, model.x)
        counts = [_halves(x, ["dot_general"]) for x in (forward, both)]
        sums = _halves(both, ["exp", "reduce_sum", "div", "rsqrt", "square"])
        residuals = jax.eval_shape(
            lambda p, f=loss_fn: jax.vjp(lambda p: f(p, model.x), p)[1], model.params
        )
        saved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals))
        rows[name] = {"forward": counts[0], "both": counts[1], "sums": sums}
        rows[name] |= {"saved_bytes": saved}
    return rows


def _halves(equations, names):
    """Returns how many of these operations read float16, and how many there are."""
    dtypes = [x.invars[0].aval.dtype for x in equations if x.primitive.name in names]
    return [sum(x == jnp.float16 for x in dtypes), len(dtypes)]


def tracing() -> list[dict[str, Any]]:
    """Returns equations, and times to trace, of a gradient relative to float32."""
    rows = []
    for name in FORMS:
        params, batch, make = by_hand.MODELS[name]()
        rows.append({"form": name})
        for way, cast in (("float32", lambda f: f), ("autocast", autocast)):
            times = []
            for _ in range(5):
                # JAX remembers the jaxprs of functions that it has seen before.
                loss_fn = cast(make(jnp.float32))
                start = time.process_time()
                equations = len(_equations(jax.grad(loss_fn), params, *batch))
                times.append(time.process_time() - start)
            rows[-1][way] = {"equations": equations, "seconds": float(np.median(times))}
    return rows


PARTS = {"models": errors, "training": trainings, "peers": peers, "CPU": tracing}


def _percent(pair):
    if pair is None or isinstance(pair, str):
        return "not finite" if pair is None else "raises"
    return f"{100 * pair[1]:.2g}%"


def tables(results: dict[str, Any]) -> list[str]:
    """Returns Markdown tables of the results."""
    rows = {part: entry["rows"] for part, entry in results.items()}
    made = []
    if errors_ := rows.get("models"):
        ways = "autocast", "by hand", "naive cast"
        cells = [
            [name, *(_percent(row[way]) if way in row else "" for way in ways)]
            for name, row in errors_.items()
        ]
        made.append(report.table(["error of the worst gradient", *ways], cells))
    if losses := rows.get("training"):
        cells = [
            [name, *(f"{np.mean(x):.4f}" for x in row.values())]
            for name, row in losses.items()
        ]
        header = ["loss after 100 steps", "float32", "by hand", "autocast"]
        made.append(report.table(header, cells))
    if counts := rows.get("peers"):
        title = "of a transformer, in float16"
        header = [title, "products forward", "backward", "sums, exp, roots", "saved MB"]
        cells = []
        for name, row in counts.items():
            (n, all_), (both, all_both) = row["forward"], row["both"]
            pairs = (n, all_), (both - n, all_both - all_), row["sums"]
            saved = f"{row['saved_bytes'] / 1e6:.1f}"
            cells.append([name, *("{} of {}".format(*x) for x in pairs), saved])
        made.append(report.table(header, cells))
    if traced := rows.get("CPU"):
        cells = []
        for row in traced:
            pairs = [
                (row["autocast"][k], row["float32"][k])
                for k in ("equations", "seconds")
            ]
            cells.append([row["form"], *(f"{a / b:.2f}" for a, b in pairs)])
        header = ["gradient / float32", "equations", "time to trace"]
        made.append(report.table(header, cells))
    return made


def main() -> None:
    """Measures all parts, or those that are named, and writes the results."""
    results = report.measure_parts("benchmarks.casting", __doc__, PARTS, RESULTS)
    print("\n".join(tables(results)))


if __name__ == "__main__":
    main()
