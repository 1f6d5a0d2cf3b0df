"""Tries the installed wheel alone: no extras, no checkout on the path."""

import re
import sys
from importlib.metadata import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import optax_lossscale

# The installed package is under test, and it needs jax and optax alone.
assert Path(optax_lossscale.__file__).is_relative_to(sys.prefix)
assert (Path(optax_lossscale.__file__).parent / "py.typed").is_file()
assert not {"chex", "flax"} & set(sys.modules)

# PyPI shows the README: its links lead to files that the repository has.
OURS = r"https://github\.com/optax-lossscale/optax_lossscale/(?:blob|raw)/main/([^#]*)"
text = metadata("optax_lossscale")["Description"]
links = re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"', text)
links = [link or picture for link, picture in links]
assert len(links) > 20
for link in links:
    assert link.startswith("https://"), link
    if match := re.match(OURS, link):
        assert (Path(__file__).parents[1] / match[1]).exists(), link

# A step that overflows is skipped and halves the scale; the next one counts.
optimizer = optax_lossscale.LossScaleOptimizer(optax.sgd(0.25))
step = jax.jit(lambda p, s, x: optimizer.minimize(lambda p: p * x, p, s))
params = jnp.ones(())
state = optimizer.init(params)
params, state, _ = step(params, state, jnp.inf)
assert params == 1
assert optimizer.current_loss_scale(state) == 2**14
params, state, loss = step(params, state, 1.0)
assert (params, loss, state.skipped_steps) == (0.75, 1, 1)

print(f"optax_lossscale {optax_lossscale.__version__}: the wheel works alone")
