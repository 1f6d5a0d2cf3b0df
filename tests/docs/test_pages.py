"""The code of the README and of the guide runs as pasted, and prints what is shown."""

import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, assert_same_bits, exhaustive_but
from pages import page_blocks, page_fragments, run_blocks

DEVICES = "docs/guide/many-devices.md"
BY_DEFAULT = ["README.md", "docs/guide/use.md", "docs/guide/guard-a-run.md"]
GUIDE = {f"docs/guide/{path.name}" for path in ROOT.glob("docs/guide/*.md")}
GUIDE |= {"docs/api/optimizer.md"}
PAGES = ["README.md", *sorted(path for path in GUIDE - {DEVICES} if page_blocks(path))]


@pytest.fixture
def add_scalar(monkeypatch):
    """Returns what stands for the method of a writer of tensorboardX."""
    module = mock.Mock()
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    return module.SummaryWriter.return_value.add_scalar


@pytest.fixture(autouse=True)
def reader(tmp_path, monkeypatch):
    """Gives each page a folder, and one process for those that want several."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax.distributed, "initialize", lambda: None)
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("path", exhaustive_but(PAGES, BY_DEFAULT))
def test_page(path, add_scalar):
    blocks = list(run_blocks(path))
    assert not any(printed for _, printed, _ in blocks)
    if path == "README.md":
        assert blocks[-1][2]["opt_state"].skipped_steps == 1
    if path.endswith("troubleshooting.md"):
        points = blocks[-1][2]["axes"].lines[0].get_xydata().tolist()
        assert points == [[step, 2.0**14] for step in range(50, 401, 50)]
        # Not pasted with the rest, because not everybody has this package.
        for code in filter(re.compile("train_and_log").search, page_fragments(path)):
            exec(code, blocks[-1][2])
        _, values, steps = zip(*(x.args for x in add_scalar.mock_calls), strict=True)
        assert list(dict.fromkeys(steps)) == [100, 200, 300, 400]
        assert {type(x) for x in values} == {float}


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
