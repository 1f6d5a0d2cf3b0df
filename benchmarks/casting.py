"""Measures what `autocast` computes, and what it costs: `python -m benchmarks.casting`.

Compares it with float32, with casts by hand and with other libraries: the errors of
public models, small trainings, the products in float16 of a transformer, and what
compilers make of another one. Adds to `results/casting.json`. Arguments name some of
these parts: `models "TPU v5e"`.
"""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from benchmarks import need, report
from benchmarks.compiled import H100, TPU, describe, device, place
from benchmarks.measure import cpu_seconds
from benchmarks.tasks import TASKS
from optax_lossscale import autocast
from optax_lossscale._autocast import policy
from optax_lossscale._jaxprs.parts import all_equations

RESULTS = report.RESULTS / "casting.json"
WIDTH, HEADS, TOKENS, BATCH, VOCABULARY, SCALE = 256, 8, 256, 16, 257, 2.0**12
LAYERS = {TPU: 2, H100: 6, "CPU": 6}
FORMS = "unrolled", "scanned", "rematerialized", "scanned and rematerialized"
ALL_SAVED = "autocast, all saved"
WAYS = "float32", "by hand", "autocast", ALL_SAVED


def _normed(p, x):
    x = x.astype(jnp.float32)
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * p["gain"] + p["bias"]


def _block(p, h, dtype):
    dense = lambda p, x: x.astype(dtype) @ p["w"].astype(dtype) + p["b"].astype(dtype)  # noqa: E731
    split = lambda x: x.reshape(*x.shape[:2], HEADS, -1)  # noqa: E731
    q, k, v = map(split, jnp.split(dense(p["qkv"], _normed(p["norm1"], h)), 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH / HEADS) ** 0.5
    mask = jnp.tri(scores.shape[-1], dtype=bool)
    scores = jnp.where(mask, scores.astype(jnp.float32), -1e9)
    weights = jax.nn.softmax(scores).astype(dtype)
    attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape)
    h = h + dense(p["out"], attended)
    return h + dense(p["down"], jax.nn.gelu(dense(p["up"], _normed(p["norm2"], h))))


def transformer(form: str, dtype: Any) -> Callable[..., jax.Array]:
    """Returns the loss of a transformer that casts by hand."""
    block = functools.partial(_block, dtype=dtype)
    block = jax.checkpoint(block) if "remat" in form else block

    def loss_fn(params, tokens):
        x, y = tokens[:, :-1], tokens[:, 1:]
        h, blocks = (params["tokens"][x] + params["positions"]).astype(dtype), []
        if "scanned" in form:
            h, _ = jax.lax.scan(lambda h, p: (block(p, h), None), h, params["blocks"])
        else:
            blocks = params["blocks"]
        for p in blocks:
            h = block(p, h)
        logits = _normed(params["norm"], h).astype(dtype) @ params["out"].astype(dtype)
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss_fn


def shapes(form: str, layers: int) -> tuple[Any, Any]:
    """Returns the shapes of the parameters, and of a batch."""
    of, d = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32), WIDTH
    dense = lambda m, n: {"w": of(m, n), "b": of(n)}  # noqa: E731
    norm = {"gain": of(d), "bias": of(d)}
    block = {"norm1": norm, "norm2": norm, "qkv": dense(d, 3 * d), "out": dense(d, d)}
    block |= {"up": dense(d, 4 * d), "down": dense(4 * d, d)}
    blocks = [block] * layers
    if "scanned" in form:
        blocks = jax.tree.map(lambda x: of(layers, *x.shape), block)
    params = {"tokens": of(VOCABULARY, d), "positions": of(TOKENS, d), "norm": norm}
    params |= {"blocks": blocks, "out": of(d, VOCABULARY)}
    return params, jax.ShapeDtypeStruct((BATCH, TOKENS + 1), jnp.int32)


def _losses(form):
    float32, half = (transformer(form, x) for x in (jnp.float32, jnp.float16))
    mended = autocast(float32)
    return dict(zip(WAYS, (float32, half, mended, mended), strict=True))


def compile_(target: str) -> list[dict[str, Any]] | None:
    """Compiles training steps of the transformer; None without the compiler."""
    if (on := device(target)) is None:
        return None
    optimizer, rows = optax.adam(1e-3), []
    on_device = functools.partial(place, sharding=SingleDeviceSharding(on))
    for form, way in itertools.product(FORMS, WAYS):
        params, tokens = shapes(form, LAYERS[target])

        loss_fn = _losses(form)[way]

        def step(params, state, tokens, loss_fn=loss_fn):
            scaled = jax.value_and_grad(lambda p: SCALE * loss_fn(p, tokens))
            loss, grads = scaled(params)
            grads = jax.tree.map(lambda g: g / SCALE, grads)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        args = params, jax.eval_shape(optimizer.init, params), tokens
        jitted = jax.jit(step, donate_argnums=(0, 1))
        is_saved = policy.is_saved if way != ALL_SAVED else lambda *_, **__: True
        with mock.patch.object(policy, "is_saved", is_saved):
            lowered = jitted.lower(*jax.tree.map(on_device, args))
        seconds, compiled = cpu_seconds(lowered.compile)
        rows.append({"form": form, "way": way, "seconds": seconds})
        rows[-1] |= {"layers": LAYERS[target], **describe(compiled)}
        print(rows[-1], flush=True)
    return rows


def errors() -> dict[str, dict[str, Any]]:
    """Returns by model and way the errors of the loss and of the worst gradient."""
    from benchmarks.models import HALF, models

    found = {}
    for name, model in models().items():
        plain, x = model.loss(), model.x
        naive = lambda p, x, f=plain: f(*optax.tree.cast((p, x), HALF))  # noqa: E731
        ways = {"autocast": autocast(plain), "naive cast": naive}
        if model.takes_dtype:
            ways["by hand"] = model.loss(HALF)
        right = _gradients(plain, model.params, x)
        found[name] = {k: _errors(f, model.params, x, right) for k, f in ways.items()}
        print(name, found[name], flush=True)
    return found


def _gradients(loss_fn, params, x):
    scaled = jax.value_and_grad(lambda p, x: SCALE * loss_fn(p, x).astype(jnp.float32))
    exact = {"xla_allow_excess_precision": False}
    loss, grads = jax.jit(scaled).lower(params, x).compile(exact)(params, x)
    return loss, [np.float64(g) for g in jax.tree.leaves(grads)]


def _errors(loss_fn, params, x, right):
    """Returns both errors, None if not finite, or the error that is raised."""
    try:
        loss, grads = _gradients(loss_fn, params, x)
    except (TypeError, ValueError) as error:
        return type(error).__name__
    # Some gradients are zero but for roundings, of biases before a norm for example.
    least = 0.01 * np.sqrt(sum(np.sum(g**2) for g in right[1]))
    norms = [max(np.linalg.norm(g), least) for g in right[1]]
    pairs = zip(grads, right[1], norms, strict=True)
    worst = np.max([np.linalg.norm(a - b) / norm for a, b, norm in pairs])
    both = abs(float(loss / right[0]) - 1), float(worst)
    return both if np.all(np.isfinite(both)) else None


def trainings() -> dict[str, dict[str, list[float]]]:
    """Returns by task and way the losses at the end of 100 steps, for three seeds."""
    found = {}
    for make in TASKS:
        task = make(100)

        def mended(*args, dtype, loss_fn=task.loss_fn):
            del dtype
            return autocast(functools.partial(loss_fn, dtype=jnp.float32))(*args)

        ways = {"float32": task, "float16, dynamic": task}
        ways["autocast"] = task._replace(loss_fn=mended)
        found[task.name] = {
            way: [
                need.final_loss(x, "float16, dynamic" if x is not task else way, seed)
                for seed in range(3)
            ]
            for way, x in ways.items()
        }
    return found


def _equations(f, *args):
    return list(all_equations(jax.make_jaxpr(f)(*args).jaxpr))


def peers() -> dict[str, dict[str, Any]]:
    """Returns what libraries compute in float16 of a transformer of Haiku."""
    import grampax
    import jmp
    import mpx

    from benchmarks import models

    model = models.transformer()
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
    found = {}
    for name, loss_fn in ways.items():
        forward = _equations(loss_fn, model.params, model.x)
        both = _equations(jax.grad(loss_fn), model.params, model.x)
        counts = [_halves(x, ["dot_general"]) for x in (forward, both)]
        sums = _halves(both, ["exp", "reduce_sum", "div", "rsqrt", "square"])
        residuals = jax.eval_shape(
            lambda p, f=loss_fn: jax.vjp(lambda p: f(p, model.x), p)[1], model.params
        )
        saved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals))
        found[name] = {"forward": counts[0], "both": counts[1], "sums": sums}
        found[name] |= {"saved_bytes": saved}
    return found


def _halves(equations, names):
    """Returns how many of these operations read float16, and how many there are."""
    found = [x.invars[0].aval.dtype for x in equations if x.primitive.name in names]
    return [sum(x == jnp.float16 for x in found), len(found)]


def tracing() -> list[dict[str, Any]]:
    """Returns equations, and times to trace, of a gradient relative to float32."""
    rows = []
    for form in FORMS:
        args = shapes(form, LAYERS["CPU"])
        rows.append({"form": form})
        for way, cast in (("float32", lambda f: f), ("autocast", autocast)):
            times = []
            for _ in range(5):
                # JAX remembers the jaxprs of functions that it has seen before.
                loss_fn = cast(transformer(form, jnp.float32))
                start = time.process_time()
                equations = len(_equations(jax.grad(loss_fn), *args))
                times.append(time.process_time() - start)
            rows[-1][way] = {"equations": equations, "seconds": float(np.median(times))}
    return rows


PARTS = {"models": errors, "training": trainings, "peers": peers, "CPU": tracing}
PARTS |= {target: functools.partial(compile_, target) for target in (TPU, H100)}


def _percent(found):
    if found is None or isinstance(found, str):
        return "not finite" if found is None else "raises"
    return f"{100 * found[1]:.2g}%"


def tables(found: dict[str, Any]) -> list[str]:
    """Returns Markdown tables of the results."""
    rows = {part: entry["rows"] for part, entry in found.items()}
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
    for target in (TPU, H100):
        cells = [
            [
                f"{row['form']}, {row['way']}",
                f"{row['bytes'] / 1e9:.2f}",
                f"{row['flops'] / 1e9:.1f}" if row["flops"] else "",
                f"{row['temp_bytes'] / 1e6:.0f}",
                f"{row['seconds']:.0f}",
            ]
            for row in rows.get(target, ())
        ]
        header = [f"transformer for {target}", "GB moved", "Gflop", "temporary MB"]
        made += [report.table([*header, "s to compile"], cells)] if cells else []
    if traced := rows.get("CPU"):
        cells = []
        for row in traced:
            pairs = [
                (row["autocast"][k], row["float32"][k])
                for k in ("equations", "seconds")
            ]
            cells.append([row["form"], *(f"{a / b:.2f}" for a, b in pairs)])
        header = ["gradient of a transformer / float32", "equations", "time to trace"]
        made.append(report.table(header, cells))
    return made


def main() -> None:
    """Measures all parts, or those that are named, and writes the results."""
    found = report.measure_parts("benchmarks.casting", __doc__, PARTS, RESULTS)
    print("\n".join(tables(found)))


if __name__ == "__main__":
    main()
