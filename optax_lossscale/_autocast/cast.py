"""`autocast`: the function around a function."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _check as check
from optax_lossscale._autocast import policy
from optax_lossscale._autocast.evaluate import Evaluator
from optax_lossscale._autocast.policy import State
from optax_lossscale._autocast.program import Reader
from optax_lossscale._autocast.states import Planner, is_float32
from optax_lossscale._tree import is_argument, split_arrays


def autocast(fun, dtype=jnp.float16, *, float32=()):
    @functools.wraps(fun)
    def cast(*args, **kwargs):
        arrays, join = split_arrays((args, kwargs), is_argument)
        joins = []

        def flat(*arrays):
            args, kwargs = join(arrays)
            out, join_out = split_arrays(fun(*args, **kwargs), lambda x: isinstance(x, jax.Array))
            joins[:] = [join_out]
            return out

        closed = jax.make_jaxpr(flat)(*arrays)
        reader = Reader(policy.kind_of)
        planner = Planner(dtype, lambda step: False)
        program = reader.read(closed)
        inputs = tuple(State.FLEXIBLE if is_float32(x.aval) else None for x in closed.jaxpr.invars)
        outputs = tuple(State.WIDE if is_float32(x.aval) else None for x in closed.jaxpr.outvars)
        plan = planner.plan(program, inputs, [True] * len(outputs))
        found = Evaluator(dtype, planner, reader).run(plan, list(map(jnp.asarray, arrays)), outputs, is_saved=True)
        return joins[0](found)

    return cast
