"""`minimize` takes Flax nnx models: they change in place, as by `nnx.Optimizer`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, relaxed, to_numpy
from meshes import PARTS, WHOLE, mesh_of, over_devices, varying
from networks import Net, in_one_call, in_two_calls, nnx_step

from optax_lossscale import DynamicLossScale, LossScaleOptimizer, autocast

X = np.sin(np.arange(64.0, dtype=np.float32)).reshape(8, 8)
every_way = pytest.mark.parametrize("make", [in_one_call, in_two_calls])
with_and_without_retries = pytest.mark.parametrize("retries", [0, 5])


def value_of(variable):
    is_new = hasattr(nnx.Variable, "get_value")
    return variable.get_value() if is_new else variable.value  # Before Flax 0.12.1.


def assign(variable, value):
    if hasattr(nnx.Variable, "set_value"):
        variable.set_value(value)
    else:
        variable.value = value


Model = functools.partial(Net, features=8, width=16, rate=0.5)


def loss_fn(model, x):
    return jnp.mean((model(x) - x[:, :1]) ** 2)


LOW, HIGH = DynamicLossScale(2.0**8), DynamicLossScale(2.0**24)


def start(model, inner=None, loss_scale=None, *, wrt=nnx.Param, **options):
    """Returns an optimizer, the model, and the state of its parameters."""
    loss_scale = loss_scale or DynamicLossScale(4.0)
    optimizer = LossScaleOptimizer(inner or optax.sgd(0.125), loss_scale, **options)
    part = model if wrt is nnx.Param else nnx.state(model, wrt)
    return optimizer, model, optimizer.init(part)


def values(model):
    """Copies the arrays of all variables, also keys and random counts, to NumPy."""
    return [to_numpy(x) for x in jax.tree.leaves(nnx.state(model))]


def scanned(step):
    """Returns a compiled function that takes a step with each of its batches."""

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def steps(carry, x):
        model, state, loss = step(*carry, x)
        return (model, state), loss

    return steps


def train(optimizer, model, state, wrap=nnx.jit, steps=3, loss_fn=loss_fn):
    step = wrap(in_one_call(optimizer, loss_fn))
    for _ in range(steps):
        new, state, loss = step(model, state, X)
        # jax.jit returns another module.
        assert wrap is jax.jit or new is model
        model = new
    return model, state, loss


@pytest.mark.parametrize(("wrap", "retries"), [(nnx.jit, 24), (jax.jit, 0)])
def test_the_model_changes_as_by_the_optimizer_of_nnx(wrap, retries):
    inner = optax.sgd(0.1, 0.9)
    model, _, loss = train(*start(Model(), inner, LOW, retries=retries), wrap)
    expected = Model()
    optimizer, step = nnx.Optimizer(expected, inner, wrt=nnx.Param), nnx_step(loss_fn)
    wanted = [step(expected, optimizer, X) for _ in range(3)][-1]
    pairs = zip([*values(model), loss], [*values(expected), wanted], strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-5)


def test_passes_that_run_again_change_it_once():
    half = autocast(loss_fn)
    low, high = (
        train(*start(Model(), loss_scale=scale, retries=24), loss_fn=half)
        for scale in (LOW, HIGH)
    )
    assert (low[1].retries, high[1].skipped_steps) == (0, 0)
    assert high[1].retries > 5
    # Statistics and random counts are those of the first passes.
    for x, y in zip(values(high[0]), values(low[0]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


def test_in_a_tree_beside_arrays_and_constants():
    def loss_with_bias(params, x):
        model, bias = params["model"], params["bias"]
        loss = jnp.mean((model(x) + bias - 1) ** 2) / params["heads"]
        return loss, model.norm.mean[...]

    params = {"model": Model(), "bias": jnp.zeros(()), "heads": 4}
    optimizer, _, state = start(params, retries=2)
    kernel = params["model"].hidden.kernel[...]
    step = in_one_call(optimizer, loss_with_bias, has_aux=True)
    new, state, (_, mean) = step(params, state, X)
    assert new["model"] is params["model"]
    assert (new["model"].hidden.kernel[...] != kernel).any()
    assert (new["bias"] != 0, new["heads"]) == (True, 4)
    np.testing.assert_array_equal(mean, new["model"].norm.mean[...])


OUTPUT = nnx.All(nnx.Param, nnx.PathContains("output"))
DIFFERENTIATED = nnx.DiffState(0, OUTPUT)
BY_TRANSFORM = {
    "transform": functools.partial(nnx.value_and_grad, argnums=DIFFERENTIATED)
}


@pytest.mark.parametrize(
    ("make", "retries", "options"),
    [
        (in_one_call, 0, BY_TRANSFORM),
        (in_one_call, 24, BY_TRANSFORM),
        (in_two_calls, 0, {"argnums": DIFFERENTIATED}),
    ],
)
def test_only_the_variables_that_are_differentiated_change(make, retries, options):
    optimizer, model, state = start(Model(), wrt=OUTPUT, retries=retries)
    kernels = model.hidden.kernel[...], model.output.kernel[...]
    nnx.jit(make(optimizer, loss_fn, **options))(model, state, X)
    assert_same_bits(model.hidden.kernel[...], kernels[0])
    assert (model.output.kernel[...] != kernels[1]).any()


def test_a_line_search_evaluates_copies():
    inner = optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(5))
    model, _, _ = train(*start(Model(), relaxed(inner), retries=2), steps=2)
    # A trial of the search draws no random number of the model.
    assert model.drop.rngs.count[...] == 2


def test_many_steps_in_a_scan():
    optimizer, *begun = start(Model(), loss_scale=HIGH, retries=24)
    steps = scanned(in_one_call(optimizer, autocast(loss_fn)))
    (model, state), losses = steps(tuple(begun), jnp.stack([X] * 3))
    assert (state.skipped_steps, losses.shape) == (0, (3,))
    assert jnp.isfinite(losses).all()
    assert model.drop.rngs.count[...] == 3


class Statistics(nnx.Module):
    """Has batch statistics, a moving average and a variable of its own."""

    def __init__(self):
        self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.largest = nnx.Variable(jnp.zeros(()))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.rngs = nnx.Rngs(0)

    def __call__(self, x):
        self.rngs()  # A key that nothing uses.
        self.largest[...] = jnp.maximum(self.largest[...], jnp.max(x))
        self.calls[...] += 1
        return self.norm(self.layer(x))


def square(model, x):
    return jnp.mean(model(x) ** 2)


def statistics(model):
    """Returns what a skipped step must not change."""
    parts = (
        nnx.state(model.norm, nnx.BatchStat),
        model.largest[...],
        model.layer.kernel[...],
    )
    return jax.tree.leaves(parts)


GOOD, BAD = np.float32([[1, 2, 3, 4], [5, 3, 1, 2]]), np.float32([[np.inf] * 4] * 2)


@every_way
class TestASkippedStepChangesNothing:
    @pytest.mark.parametrize("wrap", [nnx.jit, jax.jit])
    def test_in_a_step(self, make, wrap):
        optimizer, *begun = start(Statistics())
        step = wrap(make(optimizer, square))
        model, state, _ = step(*begun, GOOD)
        before = statistics(model)
        model, state, _ = step(model, state, BAD)
        assert state.skipped_steps == 1
        assert_same_bits(statistics(model), before)
        assert model.rngs.default.count[...] == 2  # Random counts go on.
        model, state, _ = step(model, state, GOOD)
        assert (statistics(model)[0] != before[0]).any()

    def test_200_steps_end_as_those_that_never_saw_a_bad_batch(self, make):
        # A power of two that never changes, so that scales do not differ.
        rule = DynamicLossScale(4.0, growth_interval=1000, min_scale=4.0)
        random = np.random.default_rng(0)
        xs = random.normal(size=(200, 2, 4)).astype(np.float32)
        bad = random.random(200) < 0.2
        xs[bad, 0, 1] = np.inf
        optimizer = LossScaleOptimizer(optax.sgd(0.01), rule)
        run, ends = scanned(make(optimizer, square)), []
        # The same program, to the bit: bad batches at the end stand for none.
        for order in (np.arange(200), np.argsort(bad, kind="stable")):
            model = Statistics()
            begun = model, optimizer.init(model)
            (model, state), _ = run(begun, jnp.asarray(xs[order]))
            assert state.skipped_steps == bad.sum()
            ends.append(statistics(model))
        assert_same_bits(*ends)

    def test_of_one_member(self, make):
        @nnx.vmap(in_axes=(None, 0))
        def members(_, x):
            return start(Statistics())[1:]

        optimizer, *_ = start(Statistics())
        models, states = members(None, jnp.zeros(2))
        before = statistics(models)
        step = nnx.jit(nnx.vmap(make(optimizer, square)))
        models, states, _ = step(models, states, jnp.stack([GOOD, BAD]))
        assert states.skipped_steps.tolist() == [0, 1]
        for new, old in zip(statistics(models), before, strict=True):
            assert_same_bits(new[1], old[1])
            assert (new[0] != old[0]).any()

    def test_on_all_devices(self, make):
        optimizer, model, state = start(Statistics(), axis_name="batch")
        graph, arrays = nnx.split(model)

        @over_devices((WHOLE, WHOLE, PARTS), PARTS, mesh_of(batch=2))
        def step(arrays, state, x):
            arrays, state = jax.tree.map(varying, (arrays, state))
            model = nnx.merge(graph, arrays)
            model, state, _ = make(optimizer, square)(model, state, x)
            return jax.tree.map(lambda x: x[None], (nnx.state(model), state))

        arrays, state = step(arrays, state, jnp.concatenate([GOOD, BAD]))
        assert state.skipped_steps.tolist() == [1, 1]
        nnx.update(model, arrays)
        expected = [np.stack([x, x]) for x in statistics(Statistics())]
        assert_same_bits(statistics(model), expected)

    def test_of_a_part_and_of_a_model_that_is_not_trained(self, make):
        def loss_fn(layer, frozen, x):
            return jnp.mean((layer(x) - frozen(x)) ** 2)

        model, frozen = Statistics(), Statistics()
        optimizer, norm, state = start(model.norm)
        before = statistics(model), statistics(frozen)
        nnx.jit(make(optimizer, loss_fn))(norm, state, frozen, BAD)
        assert_same_bits((statistics(model), statistics(frozen)), before)

    def test_but_a_fixed_scale_applies_it(self, make):
        optimizer, model, state = start(Statistics(), loss_scale=8.0)
        model, *_ = nnx.jit(make(optimizer, square))(model, state, BAD)
        assert not np.isfinite(model.norm.mean[...]).any()


@pytest.mark.parametrize(
    ("options", "more", "x"),
    [({"check_loss": True}, {}, BAD), ({}, {"skip_if": True}, GOOD)],
    ids=["loss", "veto"],
)
def test_a_bad_loss_and_a_veto_take_all_changes_back(options, more, x):
    optimizer, model, state = start(Statistics(), loss_scale=8.0, **options)
    before = statistics(model)
    model, state, _ = nnx.jit(in_one_call(optimizer, square, **more))(model, state, x)
    assert state.skipped_steps == 1
    assert_same_bits(statistics(model), before)


class Layer(nnx.Module):
    """A layer with more attributes; numbers among them are plain ones."""

    def __init__(self, **attributes):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, x):
        return self.linear(x)


def shift(model, x):
    assign(model.second, value_of(model.first))
    assign(model.first, jnp.max(x))


def swap(model, _):
    first = value_of(model.first)
    assign(model.first, value_of(model.second))
    assign(model.second, first)


def copy_parameters(model, _):
    assign(model.teacher, value_of(model.linear.kernel))


def widen(model, x):
    old = jnp.float32(value_of(model.half))
    assign(model.half, jnp.maximum(old, jnp.max(x)))


def count(model, _):
    assign(model.rate, value_of(model.rate) / 2)
    assign(model.array, 0.5)


def fold_key(model, _):
    assign(model.key, jax.random.fold_in(value_of(model.key), 1))


def replace(model, x):
    model.first = nnx.Variable(jnp.max(x))
    model.raw = x[0]


def share(model, _):
    model.second = model.first


def swap_variables(model, _):
    model.first, model.second = model.second, model.first


def make_modules(model, x):
    model.head = nnx.Dict(largest=nnx.Variable(jnp.max(x)))
    model.sizes = nnx.List([nnx.Variable(jnp.min(x))])


def halve(model, x):
    model.linear.kernel[...] = model.linear.kernel[...] / 2 + 0 * jnp.max(x)


# What a pass may do to variables, which a skipped step takes back.
CHANGES = [halve, shift, swap, copy_parameters, widen, count, fold_key, replace]


def plain_attributes(model, _):
    model.calls += 1
    model.kind = "last"
    model.linear.note = "new"
    del model.unused


STRUCTURES = [share, swap_variables, make_modules, plain_attributes]


def variables(model, x):
    model.sizes.append(nnx.Variable(jnp.max(x)))
    model.made = nnx.Variable(jnp.min(x))
    model.empty = nnx.Variable(jnp.sum(x))


def layer():
    names = {"first": 1.0, "second": 2.0, "half": np.float16(0), "array": 1.0}
    held = {name: nnx.Variable(jnp.asarray(x)) for name, x in names.items()}
    held["rate"] = nnx.Variable(0.5)  # A Python number.
    held["teacher"] = nnx.Variable(jnp.zeros((4, 4)))
    held["key"] = nnx.Variable(jax.random.key(0))
    plain = {"calls": 0, "kind": "first", "unused": 1, "raw": jnp.zeros(4)}
    plain["empty"] = nnx.data(None)
    return Layer(**held, **plain, sizes=nnx.List([nnx.Variable(jnp.ones(()))]))


def contents(model, with_dtypes=True):
    """Returns the values of variables and of plain attributes, by path."""
    found = {}
    for path, x in nnx.iter_graph(model):
        for name, value in vars(x).items() if isinstance(x, nnx.Pytree) else ():
            if isinstance(value, int | str):
                found[str((*path, name))] = value
        if isinstance(x, nnx.Variable | jax.Array):
            (value,) = map(to_numpy, jax.tree.leaves(x))
            dtype = str(value.dtype) if with_dtypes else None
            found[str(path)] = type(x), dtype, value.tolist()
    return found


def layer_step(change, optimizer=None):
    """Makes a step of a layer, of `nnx.Optimizer` without an optimizer."""

    def loss_fn(model, x):
        change(model, x)
        return square(model, x)

    def step(model, state, x):
        if optimizer is not None:
            in_one_call(optimizer, loss_fn)(model, state, x)
        else:
            _, grads = nnx.value_and_grad(loss_fn)(model, x)
            params, grads = nnx.state(model, nnx.Param), nnx.state(grads)
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.125 * g, params, grads))

    return step


@functools.cache
def changed_by_nnx(change, wrap):
    """Returns the contents of the layer after a step without our optimizer."""
    model = layer()
    wrap(layer_step(change))(model, None, GOOD)
    return contents(model)


@pytest.mark.parametrize("wrap", [nnx.jit, pytest.param(lambda f: f, id="eager")])
@with_and_without_retries
class TestWhatAPassChanges:
    @pytest.mark.parametrize("change", [*CHANGES, *STRUCTURES, variables])
    def test_is_kept(self, change, retries, wrap):
        optimizer, model, state = start(layer(), retries=retries)
        wrap(layer_step(change, optimizer))(model, state, GOOD)
        assert contents(model) == changed_by_nnx(change, wrap) != contents(layer())

    @pytest.mark.parametrize("change", CHANGES)
    def test_comes_back_after_a_skipped_step(self, change, retries, wrap):
        optimizer, model, state = start(layer(), retries=retries)
        wrap(layer_step(change, optimizer))(model, state, BAD)
        assert contents(model, False) == contents(layer(), False)

    def test_in_a_variable_beside_the_model(self, retries, wrap):
        def loss_fn(model, x, seen):
            assign(seen["largest"], jnp.max(x))
            return square(model, x)

        optimizer, model, state = start(Layer(), retries=retries)
        step = in_one_call(optimizer, loss_fn)
        seen = {"largest": nnx.Variable(jnp.float32(-1))}
        for x, largest in ((BAD, -1), (GOOD, 5)):
            wrap(step)(model, state, x, seen)
            assert seen["largest"][...] == largest


@pytest.mark.parametrize("convert", [lambda f: f, autocast], ids=["", "autocast"])
@with_and_without_retries
def test_arguments_by_keyword(retries, convert):
    def loss_fn(model, x, scale, y=0.0):
        return scale * jnp.mean((model(x) - y) ** 2)

    optimizer, model, state = start(Layer(), retries=retries)
    loss, keywords = convert(loss_fn), {"scale": jnp.float32(2), "y": GOOD}
    value = in_one_call(optimizer, loss)(model, state, GOOD, **keywords)[2]
    np.testing.assert_allclose(value, loss_fn(Layer(), GOOD, **keywords), rtol=1e-2)
    if not retries:
        optimizer.value_and_grad(loss, state)(model, GOOD, **keywords)


@with_and_without_retries
def test_a_variable_of_another_shape_has_no_old_value(retries):
    def lengthen(model, x):
        assign(model.first, jnp.zeros(3))

    optimizer, model, state = start(layer(), retries=retries)
    nnx.jit(layer_step(lengthen, optimizer))(model, state, BAD)
    assert model.first[...].tolist() == [0, 0, 0]  # Not the old number, three times.


def by_partial(y):
    return functools.partial(lambda model, x, y: jnp.mean((model(x) - y) ** 2), y=y)


def keyword_only(model, x, *, train=True):
    return jnp.mean(model(x) ** 2) if train else jnp.zeros(())


@pytest.mark.parametrize("loss_fn", [by_partial(2.0), keyword_only])
@pytest.mark.parametrize("convert", [lambda f: f, autocast], ids=["", "autocast"])
@with_and_without_retries
def test_a_loss_whose_keywords_are_bound(loss_fn, retries, convert):
    optimizer, model, state = start(Layer(), retries=retries)
    step = in_one_call(optimizer, convert(loss_fn))
    assert (nnx.jit(step)(model, state, GOOD)[1]).last_step_applied


@with_and_without_retries
def test_a_teacher_of_an_outer_trace_is_only_read(retries):
    teacher = Layer(kind=nnx.Variable("a string"), largest=nnx.Variable(jnp.ones(())))
    optimizer, *_ = start(Layer(), retries=retries)
    params = jnp.ones((4, 4))

    def loss_fn(params, x, teacher):
        return jnp.mean((x @ params - teacher(x)) ** 2)

    @jax.jit
    def steps(params, state):
        def step(carry, _):
            return optimizer.minimize(loss_fn, *carry, GOOD, teacher)[:2], None

        return jax.lax.scan(step, (params, state), length=2)[0]

    assert (steps(params, optimizer.init(params))[0] != params).all()


@with_and_without_retries
def test_in_the_tree_mode_of_flax(retries):
    if not hasattr(nnx, "set_graph_mode"):
        pytest.skip("this version of Flax has no tree mode")
    with nnx.set_graph_mode(False):
        optimizer, model, state = start(Layer(), retries=retries)
        before = model.linear.kernel[...]
        in_one_call(optimizer, square)(model, state, GOOD)
        assert (model.linear.kernel[...] != before).all()
