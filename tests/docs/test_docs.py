"""The documentation and the layout keep what they promise."""

import base64
import doctest
import inspect
import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

import jax
import pytest

import optax_lossscale
from optax_lossscale import diagnostics

PACKAGE = Path(optax_lossscale.__file__).parent


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
    assert DIAGNOSTICS.keys() == {
        "ExponentHistogram",
        "History",
        "NonfiniteGradient",
        "NonfiniteLeaf",
        "NumericFinding",
        "NumericOperation",
        "NumericRange",
        "NumericsTrace",
        "ScaleSweep",
        "Underflow",
        "UnderflowStats",
        "describe_nonfinite",
        "exponent_histogram",
        "metrics",
        "nonfinite_leaves",
        "plot_exponents",
        "plot_history",
        "plot_numerics",
        "plot_sweep",
        "report",
        "scale_sweep",
        "suggest_loss_scale",
        "trace_numerics",
        "underflow_stats",
    }
    assert PUBLIC.keys() - DIAGNOSTICS.keys() == {
        "AccumulationState",
        "DynamicLossScale",
        "FixedLossScale",
        "FixedLossScaleState",
        "Health",
        "HeadroomLossScale",
        "HeadroomLossScaleState",
        "LogMaxLossScale",
        "LogMaxLossScaleState",
        "LossScale",
        "LossScaleOptimizer",
        "LossScaleOptimizerState",
        "LossScaleState",
        "TolerantLossScale",
        "TolerantLossScaleState",
        "accumulate_gradients",
        "all_finite",
        "check_health",
        "get_loss_scale",
        "has_updated",
        "import_state",
        "select_applied",
    }


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
    source = inspect.getsource(function)
    if " raise " in source:
        assert "Raises:" in text


@pytest.mark.parametrize("name", PUBLIC)
def test_every_class_documents_its_fields(name):
    public = PUBLIC[name]
    if not inspect.isclass(public):
        pytest.skip("a function")
    text = inspect.getdoc(public) or ""
    if issubclass(public, tuple) and not hasattr(public, "inner_optimizer"):
        for field in public._fields:
            assert f"{field}: " in text.split("Attributes:")[1]
    elif name != "LossScale":
        for parameter in inspect.signature(public).parameters:
            assert f"{parameter}: " in text.split("Args:")[1]
        assert "Raises:" in text


def documented():
    for name, public in {**PUBLIC, **CALLABLES}.items():
        if ">>>" in (inspect.getdoc(public) or ""):
            yield name, public


@pytest.mark.parametrize(("name", "public"), list(documented()))
def test_examples_run_on_their_own(name, public):
    # In an empty namespace: what a reader pastes has to import what it uses.
    text = inspect.getdoc(public)
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    runner = doctest.DocTestRunner()
    with jax.numpy_dtype_promotion("standard"):
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


def test_the_guide_shows_pictures_of_a_notebook():
    path = PACKAGE.parent / "notebooks/anatomy_of_underflow.ipynb"
    cells = json.loads(path.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pictures = [output.get("data", {}).get("image/png") for output in outputs]
    for name in ("exponents", "history"):
        picture = (PACKAGE.parent / f"docs/{name}.png").read_bytes()
        assert base64.b64encode(picture).decode() in [p and p.strip() for p in pictures]


def test_every_public_name_has_an_example():
    states = {name for name in PUBLIC if name.endswith("State")}
    assert set(PUBLIC) - states <= dict(documented()).keys()


def test_every_file_is_short():
    lengths = {path: code_lines(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {path.name: n for path, n in lengths.items() if n > 250} == {}


def code_lines(text):
    """Counts the lines of code: without blank lines, comments and docstrings."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT)
    skipped += (tokenize.DEDENT, tokenize.ENDMARKER)
    lines, at_start = set(), True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = at_start and token.type == tokenize.STRING
        if token.type not in skipped and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            at_start = token.type in skipped
    return len(lines)


def test_code_lines():
    text = '"""Doc\nstring."""\n\nx = """a\nb"""  # Comment.\n# Comment.\n'
    assert code_lines(text) == 2
    text += '\ndef f():\n    """Doc\n    string."""\n    return (\n        1)\n'
    assert code_lines(text) == 5


def test_needs_jax_and_optax_alone():
    code = """
import sys
import tokenize
import optax
packages = lambda: {name.split('.')[0] for name in sys.modules}
before = packages()
import optax_lossscale.diagnostics
print(sorted(packages() - before))
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "['optax_lossscale']"
