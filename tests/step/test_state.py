"""Finding the state, and selecting by what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_lossscale import LossScaleOptimizer, select_applied


class TestSelectApplied:
    optimizer = LossScaleOptimizer(optax.sgd(0.1))
    new = {"mean": np.ones(2, np.float16), "f": min, "n": 3}
    old = {"mean": np.zeros(2, np.float32), "f": max, "n": 2}

    @pytest.fixture(autouse=True)
    def initialize(self):
        self.state = self.optimizer.init(jnp.float32(1))
        self.skipped = self.state._replace(last_step_applied=np.array(False))

    @pytest.mark.parametrize("nest", [lambda s: s, lambda s: ({"opt": s}, None)])
    def test_selects_whole_trees(self, nest):
        new, old = (
            tree | {"key": jax.random.key(tree["n"])} for tree in (self.new, self.old)
        )
        for state, expected in ((self.state, new), (self.skipped, old)):
            chosen = select_applied(nest(state), new, old)
            assert chosen["mean"].tolist() == expected["mean"].tolist()
            assert chosen["mean"].dtype == self.old["mean"].dtype
            assert chosen["key"] == expected["key"]
            assert chosen["n"] == expected["n"]
            assert chosen["f"] is max

    def test_refuses_the_state_of_an_ensemble(self):
        states = jax.vmap(self.optimizer.init)(jnp.ones(3))
        with pytest.raises(ValueError, match="inside the vmap or pmap"):
            select_applied(states, jnp.ones((3, 3)), jnp.zeros((3, 3)))
        inside = jax.vmap(select_applied)(states, jnp.ones((3, 3)), jnp.zeros((3, 3)))
        assert (inside == 1).all()

    def test_refuses_another_structure_and_no_state(self):
        with pytest.raises(ValueError, match=r"exactly one .* got 0"):
            select_applied((), 1.0, 2.0)
        tree = {"a": 1.0}
        for new, old in [(tree, {"b": 1.0}), (1.0, tree), (tree, 1.0)]:
            with pytest.raises(ValueError, match="same structure"):
                select_applied(self.state, new, old)

    def test_refuses_other_shapes(self):
        with pytest.raises(ValueError, match=r"structure and shapes. .*\(2,\)"):
            select_applied(self.state, jnp.ones(2), jnp.ones(3))

    def test_python_numbers_promote(self):
        for new, old in ((0.5, 0), (1, 0.25), (jnp.float32(0.5), 0), (True, 2)):
            assert float(select_applied(self.state, new, old)) == new
            assert float(select_applied(self.skipped, new, old)) == old

    @pytest.mark.parametrize(
        ("new", "old"),
        [
            (0.5, np.int32(0)),
            (np.ones(2, np.float32), np.zeros(2, np.int32)),
            (1j, np.float32(0)),
            (2, np.array(False)),
        ],
    )
    def test_refuses_a_dtype_that_cannot_hold_both(self, new, old):
        with pytest.raises(TypeError, match="dtype that can hold new"):
            select_applied(self.state, {"x": new}, {"x": old})
