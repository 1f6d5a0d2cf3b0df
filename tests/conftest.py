"""Set-up of the tests: strict dtype promotion, reproducible examples."""

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def strict_dtype_promotion():
    """Fails where the package lets JAX promote one dtype to another unasked."""
    with jax.numpy_dtype_promotion("strict"):
        yield
