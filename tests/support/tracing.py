"""What the tests of `trace_numerics` share."""

from pathlib import Path

from optax_lossscale._jaxprs import parts
from optax_lossscale._jaxprs.primitives import Kind, kind_of
from optax_lossscale.diagnostics._trace.judge.verdict import Search, closeness, find_all
from optax_lossscale.diagnostics._trace.measure import twin
from optax_lossscale.diagnostics._trace.measure.call import Traced, make_call


def line_numbers(mark, file):
    """Returns the numbers of the lines of a file that end with a comment."""
    lines = Path(file).read_text().splitlines()
    return [i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}")]


def line_of(mark, file):
    """Returns the number of the line of a file that ends with a comment."""
    (number,) = line_numbers(mark, file)
    return number


class Findings:
    """What `trace_numerics` finds for several arguments, by one compiled program."""

    def __init__(self, loss_fn, *args):
        self._program = program_of(loss_fn, *args)

    def search(self, *args, scale=1.0):
        traced = self._program.with_arrays(call_of(lambda: None, *args).arrays)
        return Search(traced.at, closeness(traced.dtype), scale)

    def __call__(self, *args, scale=1.0):
        return find_all(self.search(*args, scale=scale))


def call_of(loss_fn, params, *args):
    """Returns a call of `trace_numerics` as a function of arrays."""
    return make_call("trace_numerics", loss_fn, params, args, {}, False)


def program_of(loss_fn, *args):
    """Returns the program of a trace, which is not compiled yet."""
    return Traced(call_of(loss_fn, *args), "float16")


def sites_of(loss_fn, *args):
    """Returns the operations that a trace follows, without compiling it."""
    outline = program_of(loss_fn, *args).program.outline
    return [x for x in outline.sites.values() if x.primitive and not x.is_decision]


def run_eagerly(jaxpr, args, ran):
    """Runs a jaxpr equation by equation; adds each and its results to `ran`."""

    def follow(_, equation, inputs):
        if kind_of(equation.primitive.name) == Kind.CALL:
            inner, consts = parts.opened(parts.called_jaxpr(equation))
            return run_eagerly(inner, [*consts, *inputs], ran)
        ran.append((equation, parts.bind(equation, inputs)))
        return ran[-1][1]

    return twin.walk(jaxpr, args, follow)
