"""Set-up of the tests: eight devices, strict dtypes, reproducible examples."""

import os

# Before JAX is imported: the devices are made when it first runs.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import hypothesis
import jax
import optax
import pytest

# It needs PyTorch.
collect_ignore = ["support/other_tools_torch.py"]

hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("tests")


def pytest_configure(config):
    # All processes, and the next run, read what one of them has compiled.
    if hasattr(config, "cache"):
        folder = str(config.cache.mkdir("jax"))
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_report_header():
    return f"jax {jax.__version__}, optax {optax.__version__}"


@pytest.fixture
def quick_compilation():
    """Compiles without LLVM's optimizations, which take long in large programs."""
    option = "jax_disable_most_optimizations"
    before = jax.config.read(option)
    jax.config.update(option, True)
    yield
    jax.config.update(option, before)


# Where a test asks what a program computes, not what the compiler makes of a step.
QUICK_FOLDERS = {"autocast", "diagnostics", "docs", "examples", "peers", "rules"}


@pytest.fixture(autouse=True)
def quick_compilation_where_it_does_not_matter(request):
    """Steps are compiled as users compile them, but not all repetitions."""
    is_exhaustive = request.node.get_closest_marker("exhaustive")
    if is_exhaustive or request.path.parent.name in QUICK_FOLDERS:
        request.getfixturevalue("quick_compilation")


@pytest.fixture(autouse=True)
def strict_dtype_promotion():
    """Fails where the package lets JAX promote one dtype to another unasked."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def standard_dtype_promotion(strict_dtype_promotion):
    """Promotes dtypes as JAX does by default, which other libraries rely on."""
    with jax.numpy_dtype_promotion("standard"):
        yield
