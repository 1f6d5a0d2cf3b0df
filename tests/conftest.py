"""Set-up of the tests: eight CPU devices, strict dtypes, reproducible examples."""

import dataclasses
import doctest
import gc
import os
import traceback
from importlib.metadata import version

# Before JAX is imported: the devices are made when it first runs.
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
# Each process would take three quarters of a GPU's memory.
if "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
# One thread compiles a small program faster than several.
os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
# These emitters take most of the time of compiling small programs. Newer JAX has no
# others and refuses the flag: there a small program takes four times as long to
# compile, and the tests marked `optimized` compile as users do.
if [int(part) for part in version("jaxlib").split(".")[:2]] <= [0, 10]:
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import hypothesis
import jax
import optax
import pytest

hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("tests")


# The lines of test modules that compile a program where they are imported.
AT_IMPORT, is_importing = [], True


def note_compilation(event, *_, **__):
    if is_importing and "backend_compile" in event:
        lines = traceback.extract_stack()
        AT_IMPORT.append([str(x) for x in lines if f"{os.sep}tests{os.sep}" in str(x)])


jax.monitoring.register_event_duration_secs_listener(note_compilation)


def pytest_configure(config):
    # All processes, and the next run, read what one of them has compiled.
    if hasattr(config, "cache"):
        folder = str(config.cache.mkdir("jax"))
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_finish():
    global is_importing
    is_importing = False
    # JAX makes many objects that live on. To look through them takes a tenth of the
    # time.
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


# What the extra `test-all` adds to `test`. Tests skip what of it is not installed.
OPTIONAL = {"haiku", "jmp", "keras", "matplotlib", "mpx", "numpyro"}
OPTIONAL |= {"sklearn", "tensorboardX"}


def missing(error):
    """Returns the optional package that an error is about, or None."""
    if isinstance(error, doctest.UnexpectedException):
        error = error.exc_info[1]
    while error and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    name = error and (error.name or "").partition(".")[0]
    return name if name in OPTIONAL else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.failed and (name := missing(report.call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = str(collector.path), 0, f"Skipped: needs {name}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except Exception as error:
        if name := missing(error):
            pytest.skip(f"needs {name}")
        if jax.device_count() < 8 and "Number of devices" in str(error):
            pytest.skip("needs 8 devices")
        raise


def pytest_make_parametrize_id(val):
    """Names options and numbers by themselves, and a rule by its class."""
    if dataclasses.is_dataclass(val) and not isinstance(val, type):
        return type(val).__name__
    if isinstance(val, dict | tuple | list):
        items = val.items() if isinstance(val, dict) else enumerate(val)
        words = {k: pytest_make_parametrize_id(x) or x for k, x in items}
        if all(isinstance(x, str | int | float | None) for x in words.values()):
            equals = "{}={}" if isinstance(val, dict) else "{1}"
            return ", ".join(equals.format(*x) for x in words.items()) or repr(val)
    return None


def pytest_report_header():
    devices = f"{jax.device_count()} {jax.default_backend()} devices"
    if jax.default_backend() == "cpu":
        devices += " (on a GPU: JAX_PLATFORMS=cuda pytest -n 1)"
    return [f"jax {jax.__version__}, optax {optax.__version__}", devices]


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """Compiles without LLVM's optimizations, which take most of the time.

    A test that asks what the compiler makes of a step is marked `optimized`, and
    compiles as users do; not its exhaustive repetitions.
    """
    marked = request.node.get_closest_marker
    option = "jax_disable_most_optimizations"
    before = jax.config.read(option)
    quick = marked("exhaustive") or not marked("optimized")
    jax.config.update(option, bool(quick))
    yield
    jax.config.update(option, before)


@pytest.fixture(autouse=True)
def strict_dtype_promotion():
    """Fails where the package lets JAX promote one dtype to another unasked."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def compiled_at_import():
    return AT_IMPORT


@pytest.fixture
def standard_dtype_promotion(strict_dtype_promotion):
    """Promotes dtypes as JAX does by default, which other libraries rely on."""
    with jax.numpy_dtype_promotion("standard"):
        yield
