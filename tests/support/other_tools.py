"""What JAX's tools and ours say about `faulty_transformer`.

Prints a Markdown table, in about five minutes:

    python tests/support/other_tools.py
"""

import contextlib
import io
import traceback
import warnings
from pathlib import Path
from typing import Any

import faulty_transformer
import jax
from faulty_transformer import FAULTS, Faulty
from jax.experimental import checkify

from optax_lossscale.diagnostics import trace_numerics


def scaled_value_and_grad(faulty: Faulty) -> Any:
    """Returns the function that computes the scaled loss and its gradient."""

    def scaled_loss(params, *args):
        return faulty.loss_fn(params, *args) * faulty.scale

    return jax.value_and_grad(scaled_loss)


def debug_nans(faulty: Faulty, *, infs: bool = False) -> str:
    """Returns what `jax_debug_nans` says about a jitted step.

    Args:
      faulty: The loss and its arguments.
      infs: Whether to set `jax_debug_infs` as well.
    """
    step = jax.jit(scaled_value_and_grad(faulty))
    # JAX prints that it runs the function again, one operation after another.
    quiet = contextlib.redirect_stdout(io.StringIO())
    try:
        with jax.debug_nans(True), jax.debug_infs(infs), quiet:
            jax.block_until_ready(step(faulty.params, *faulty.args))
    except FloatingPointError as error:
        return describe(error, faulty)
    return "nothing"


def debug_nans_and_infs(faulty: Faulty) -> str:
    """Returns what `jax_debug_nans` and `jax_debug_infs` together say."""
    return debug_nans(faulty, infs=True)


def check_floats(faulty: Faulty) -> str:
    """Returns what `checkify.float_checks` says about a jitted step."""
    step = scaled_value_and_grad(faulty)
    checked = jax.jit(checkify.checkify(step, errors=checkify.float_checks))
    error, _ = checked(faulty.params, *faulty.args)
    try:
        error.throw()
    except checkify.JaxRuntimeError as error:
        return describe(error, faulty)
    return "nothing"


def trace(faulty: Faulty) -> str:
    """Returns what the first finding of `trace_numerics` says."""
    scale = faulty.scale
    found = trace_numerics(faulty.loss_fn, faulty.params, *faulty.args, scale=scale)
    operation = found.findings[0].operation
    if operation is None:
        return "nothing"
    place = operation.file, operation.line
    return f"{operation.phase}, {operation.primitive}; {compare(place, faulty)}"


TOOLS = {
    "jax_debug_nans": debug_nans,
    "jax_debug_nans and jax_debug_infs": debug_nans_and_infs,
    "checkify": check_floats,
    "trace_numerics": trace,
}


def describe(error: BaseException, faulty: Faulty) -> str:
    """Returns the message of an error, and the line of the model that it names."""
    message = str(error).splitlines()[0].rstrip(".")
    named = [
        (frame.filename, frame.lineno)
        for link in (error, error.__cause__)
        for frame in traceback.extract_tb(link.__traceback__ if link else None)
        if frame.filename == faulty_transformer.__file__
    ]
    if not named:
        return f"{message}; names no line"
    return f"{message}; {compare(named[-1], faulty)}"


def compare(place: tuple[str, int], faulty: Faulty) -> str:
    """Returns the file and the line that a tool names, and whether it is right."""
    file, line = place
    verdict = "the faulty line" if place in faulty.lines else "another line"
    return f"names {Path(file).name}:{line}, {verdict}"


def table() -> str:
    """Returns the Markdown table."""
    rows = [["fault", *TOOLS], ["---"] * (1 + len(TOOLS))]
    for name in (None, *FAULTS):
        faulty = faulty_transformer.plant(name)
        rows.append([name or "none", *(tool(faulty) for tool in TOOLS.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    # The mask: NumPy warns that -1e9 overflows in float16.
    warnings.filterwarnings("ignore", "overflow encountered in cast")
    print(table(), flush=True)
