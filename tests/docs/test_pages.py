"""The code of the README and of the guide runs as pasted, and prints what is shown."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, assert_same_bits, exhaustive_but
from pages import page_blocks, run_blocks

DEVICES = "docs/guide/many-devices.md"
BY_DEFAULT = ["README.md", "docs/guide/use.md", "docs/guide/guard-a-run.md"]
GUIDE = {f"docs/guide/{path.name}" for path in ROOT.glob("docs/guide/*.md")}
GUIDE |= {"docs/api/optimizer.md"}
PAGES = ["README.md", *sorted(path for path in GUIDE - {DEVICES} if page_blocks(path))]


@pytest.fixture(autouse=True)
def reader(tmp_path, monkeypatch):
    """Gives each page a folder, and one process for those that want several."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax.distributed, "initialize", lambda: None)
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("path", exhaustive_but(PAGES, BY_DEFAULT))
def test_page(path):
    blocks = list(run_blocks(path))
    assert not any(printed for _, printed, _ in blocks)
    if path == "README.md":
        assert blocks[-1][2]["opt_state"].skipped_steps == 1
    if path.endswith("troubleshooting.md"):
        points = blocks[-1][2]["axes"].lines[0].get_xydata().tolist()
        assert points == [[step, 2.0**14] for step in range(50, 401, 50)]
        # What writes to packages that not everybody has.
        scope = blocks[-1][2] | {"writer": mock.Mock(), "run": mock.Mock()}
        text = (ROOT / path).read_text()
        for_board, for_wandb = re.findall(r"`(lambda step, x: .*?|run\.log.*?)`", text)
        scope["train_and_log"](eval(for_board, scope))
        calls = scope["writer"].add_scalar.mock_calls
        _, values, steps = zip(*(x.args for x in calls), strict=True)
        assert list(dict.fromkeys(steps)) == [100, 200, 300, 400]
        assert {type(x) for x in values} == {float}
        eval(for_wandb, scope | {"step": 7, "x": {"loss": jnp.float32(2)}})
        scope["run"].log.assert_called_once_with({"loss": 2.0}, step=7)


def test_the_code_for_contributors():
    assert list(run_blocks("CONTRIBUTING.md"))


def test_the_diff_of_the_readme_ends_in_its_script():
    (diff,) = re.findall(
        r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    script = iter(page_blocks("README.md")[0][0].splitlines())
    assert sum(line[0] == "+" for line in diff.splitlines()) == 3
    for line in diff.splitlines():
        assert line[0] == "-" or line[1:] in script, line


@pytest.mark.exhaustive
def test_many_devices():
    """All devices skip a batch that overflows on one of them."""
    checked = 0
    for code, _, scope in run_blocks(DEVICES):
        if "def train_step" not in code or "initialize" in code:
            continue
        batch = jnp.ones((16, 3)).at[5].set(jnp.inf), jnp.ones((16, 2))
        if "pmap" in code:
            batch = map(scope["split"], batch)
        params, state, _ = scope["train_step"](*scope["state"], *batch)
        assert np.all(scope["optimizer"].current_loss_scale(state) == 2**14)
        assert_same_bits(params, scope["state"][0])
        checked += 1
    assert checked == 3
