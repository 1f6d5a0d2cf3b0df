"""A bad argument of an example gets one line, which says what to write."""

import re

import jax
import pytest
from language_model_run import main as of_language_model

from examples.digits import __main__ as digits
from examples.grpo import cli as grpo

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
TWO_PROCESSES = ["--coordinator=127.0.0.1:1", "--processes=2"]


def language_model(arguments):
    of_language_model(*arguments)


LANGUAGE_MODEL = [
    (["--accumulate=4"], "--batch-size: must be a multiple of acc.*, got 16"),
    (["--mesh=data=3"], "--mesh: must have all 8 devices, got 'data=3'"),
    (["--retries=3", "--accumulate=2"], "--retries: must be 0 .*, got 3"),
    ([*TWO_PROCESSES, "--process=2"], "--process: must be from 0 to 1, got 2"),
]
CASES = [
    (
        digits.main,
        ["--steps=0"],
        "--steps: must be a whole number from 1 to .*, got '0'",
    ),
    (digits.main, ["--batch-size", "big\nish"], r"--batch-size: .*, got 'big\\nish'"),
    (digits.main, ["--optimizer=lion"], "--optimizer: .*'lion' .*choose from .*"),
    (digits.main, ["--plot=x.gif"], "--plot: must be a .png file in .*, got 'x.gif'"),
    (grpo.main, ["--minibatches=3"], "--minibatches: must divide the number of .*"),
    (grpo.main, ["--heads=3"], "--heads: must divide the width, .*, got 3"),
    (grpo.main, ["--dtype=half"], "--dtype: must be one of float32, .*, got 'half'"),
    *((language_model, *case) for case in LANGUAGE_MODEL),
]


@pytest.mark.parametrize(("main", "arguments", "message"), CASES)
def test_a_bad_argument_gets_one_line(main, arguments, message, tmp_path, capsys):
    if main is language_model and jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    out = [] if main is digits.main else ["--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, *out])
    error = rf"python -m examples\.\w+: error: argument {message}\n"
    assert re.fullmatch(error, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
