"""What the tests of `trace_numerics` share."""

from pathlib import Path

import jax.numpy as jnp


def line_of(mark, file):
    """Returns the number of the line of a file that ends with a comment."""
    lines = Path(file).read_text().splitlines()
    (found,) = (i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))
    return found


def total(x):
    return jnp.sum(x.astype(jnp.float32))


def half(x):
    return x.astype(jnp.float16)


def assert_found(trace, mark, phase="forward", **expected):
    """Asserts that the first inf or nan begins in the line with a comment."""
    found = trace.first_nonfinite
    assert Path(found.file).name.startswith("test_trace")
    line = line_of(mark, found.file)
    assert (found.line, found.phase) == (line, phase), str(found)
    assert {k: getattr(found, k) for k in expected} == expected
    assert not found.output.is_finite
    assert trace.findings[0].kind != "fine"
