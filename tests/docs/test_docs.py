"""Every public name is documented, with an example that runs."""

import dataclasses
import doctest
import inspect
import subprocess
import sys

import jax
import pytest
from rules import NAMES

import optax_lossscale
from optax_lossscale import LossScale, diagnostics


def public_names(module):
    found = vars(module).items()
    return {k: v for k, v in found if k[0] != "_" and not inspect.ismodule(v)}


DIAGNOSTICS = public_names(diagnostics)
PUBLIC = public_names(optax_lossscale) | DIAGNOSTICS


def functions_and_methods():
    for name, public in PUBLIC.items():
        if inspect.isfunction(public):
            yield name, public
        for attribute, method in vars(public).items():
            method = getattr(method, "__func__", method)
            own = inspect.isfunction(method) and method.__module__.startswith(
                "optax_lossscale"
            )
            if own and not attribute.startswith("_"):
                yield f"{name}.{attribute}", method


CALLABLES = dict(functions_and_methods())


def test_public_names():
    """A name comes and goes on purpose."""
    names = """
        LossScale LossScaleOptimizer LossScaleOptimizerState all_finite autocast
        get_loss_scale scale_as_parameter scale_gradient select_applied with_loss_scale
    """
    assert PUBLIC.keys() - DIAGNOSTICS.keys() == set(names.split()) | NAMES
    names = """
        ExponentHistogram Float32Lines NonfiniteGradient NumericFinding
        NumericOperation NumericsTrace Report UnderflowStats
        check_health compare describe_nonfinite exponent_histogram float32_lines metrics
        nonfinite_leaves plot_exponents plot_history report
        suggest_loss_scale trace_numerics underflow_stats
    """
    assert DIAGNOSTICS.keys() == set(names.split())


@pytest.mark.parametrize("name", CALLABLES)
def test_every_argument_result_and_error_is_documented(name):
    function = CALLABLES[name]
    text = inspect.getdoc(function) or ""
    if "see the base class" in text:
        return
    parameters = [p for p in inspect.signature(function).parameters if p != "self"]
    if parameters and parameters != ["cls"]:
        described = text.split("Args:")[1]
        for parameter in parameters:
            if parameter != "cls":
                assert f"{parameter}: " in described
    assert "Returns:" in text
    if " raise " in inspect.getsource(function):
        assert "Raises:" in text


@pytest.mark.parametrize("name", [x for x in PUBLIC if inspect.isclass(PUBLIC[x])])
def test_every_class_documents_its_fields(name):
    public = PUBLIC[name]
    text = inspect.getdoc(public) or ""
    is_rule = issubclass(public, LossScale)
    if dataclasses.is_dataclass(public) and not is_rule:
        for field in dataclasses.fields(public):
            assert f"{field.name}: " in text.split("Attributes:")[1]
    elif issubclass(public, tuple) and not hasattr(public, "inner_optimizer"):
        for field in public._fields:
            assert f"{field}: " in text.split("Attributes:")[1]
    elif name != "LossScale":
        for parameter in inspect.signature(public).parameters:
            assert f"{parameter}: " in text.split("Args:")[1]
        assert "Raises:" in text


EXAMPLES = {
    name: inspect.getdoc(public)
    for name, public in {**PUBLIC, **CALLABLES}.items()
    if ">>>" in (inspect.getdoc(public) or "")
}


def test_every_public_name_has_an_example():
    states = {name for name in PUBLIC if name.endswith("State")}
    assert set(PUBLIC) - states <= EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_on_their_own(name):
    # In an empty namespace: what a reader pastes has to import what it uses.
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name], {}, name, None, None)
    with jax.numpy_dtype_promotion("standard"):
        doctest.DebugRunner().run(example)


def test_needs_jax_and_optax_alone():
    code = """
import sys
import optax
packages = lambda: {name.split('.')[0] for name in sys.modules}
before = packages() | set(sys.stdlib_module_names)
import optax_lossscale
print(sorted(packages() - before))
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "['optax_lossscale']"
