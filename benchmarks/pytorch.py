"""Measures `autocast` beside PyTorch's: `python -m benchmarks.pytorch`.

Both run the networks of `benchmarks/networks` on a CPU, with the same weights and data,
in float32 and in float16 with a scaled loss. It needs torch, and takes ten minutes.
Writes `results/pytorch.json`. A word chooses the networks that have it in their name:
`python -m benchmarks.pytorch attention`.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.progress import track

from benchmarks import report
from benchmarks.errors import Gradients, differences
from benchmarks.networks import NETWORKS, in_jax
from benchmarks.networks.draws import Network
from optax_lossscale import autocast

RESULTS = report.RESULTS / "pytorch.json"
WAYS = THEIRS, OURS = "PyTorch", "autocast"
SEEDS, SCALE = 5, 2.0**16
# A smaller error is chance: it is that of one rounding to float16.
ROUNDING = 2.0**-11
# Round where the program says so; and compile fast, as each runs a few times.
OPTIONS = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
# Why a network is more than twice as far from float32 as in PyTorch.
REASONS = {
    "residual MLP divided by sqrt(2)": "JAX rounds a Python number to float16 first, "
    "PyTorch does not",
}

# Maps parameters, batch and loss scale to the loss and the unscaled gradients.
Run = Callable[[Any, list[np.ndarray], float], Gradients]
# Runs in float32, and the errors of loss and gradients in float16.
Measured = tuple[list[Gradients], list[float] | None]


def draw(network: Network, size: float, seed: int) -> tuple[Any, list[np.ndarray]]:
    """Returns the parameters and the batch of a network."""
    random = np.random.default_rng(seed)

    def array(draw):
        drawn = np.asarray(draw(random, size))
        return drawn.astype(np.float32) if drawn.dtype.kind == "f" else drawn

    return jax.tree.map(array, (network.params, list(network.batch)))


def measure_in_jax(network: Network) -> list[Measured]:
    """Measures `autocast`."""

    def make(cast):
        loss_fn = cast(lambda params, *batch: network.loss(in_jax, params, *batch))

        @jax.jit(compiler_options=OPTIONS)
        @jax.value_and_grad
        def scaled(params, scale, *batch):
            return scale * loss_fn(params, *batch)

        def run(params, batch, scale):
            loss, grads = scaled(params, scale, *batch)
            grads = [np.float64(g) / scale for g in jax.tree.leaves(grads)]
            return float(loss) / scale, grads

        return run

    return measure(network, make(lambda f: f), make(autocast))


def measure_in_torch(network: Network) -> list[Measured]:
    """Measures `torch.autocast`."""
    import torch

    from benchmarks.networks import in_torch

    torch.set_num_threads(1)  # In operations as small as these, others only wait.

    def make(is_half):
        def run(params, batch, scale):
            params = jax.tree.map(lambda x: torch.tensor(x, requires_grad=True), params)
            with torch.autocast("cpu", torch.float16, enabled=is_half):
                loss = network.loss(in_torch, params, *map(torch.tensor, batch)).float()
            (scale * loss).backward()
            grads = [np.float64(p.grad) / scale for p in jax.tree.leaves(params)]
            return loss.item(), grads

        return run

    return measure(network, make(False), make(True))


def measure(network: Network, exact: Run, half: Run) -> list[Measured]:
    """Returns by size the runs in float32, and the errors in float16."""
    rows = []
    for size in network.sizes:
        draws = [draw(network, size, seed) for seed in range(SEEDS)]
        rights = [exact(*arrays, 1.0) for arrays in draws]
        rows.append((rights, errors(half, draws, rights)))
    return rows


def errors(half: Run, draws: list, rights: list[Gradients]) -> list[float] | None:
    """Returns the median errors of loss and gradients; None if one is not finite.

    The scale halves until all are finite, as in a training.
    """
    scale, found = SCALE, []
    for arrays, right in zip(draws, rights, strict=True):
        while not (error := differences(half(*arrays, scale), right)):
            scale /= 2
            if scale < 1 / SCALE:
                return None
        found.append(error)
    return np.median(found, 0).tolist()


def compare(network: Network) -> list[dict[str, Any]]:
    """Returns the errors of both by size."""
    rows = []
    both = zip(measure_in_torch(network), measure_in_jax(network), strict=True)
    for size, ((theirs, a), (ours, b)) in zip(network.sizes, both, strict=True):
        between = np.median([*map(differences, ours, theirs)], 0).tolist()
        rows.append({"size": size, "float32 of both": between, THEIRS: a, OURS: b})
    return rows


def times(row: dict[str, Any], way: str, other: str) -> float:
    """Returns how many times the error of another way that of a way is, at most."""
    return max(_times(size[way], size[other]) for size in row["errors"])


def _times(errors, others):
    if errors is None or others is None:
        return 1.0 if errors == others else float("inf" if errors is None else 0)
    pairs = zip(errors, others, strict=True)
    return max(max(x, ROUNDING) / max(y, ROUNDING) for x, y in pairs)


def groups(found: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Returns the networks that are worse in PyTorch, alike, and worse here."""
    worse, alike, ours = [], [], []
    for name, row in found["rows"].items():
        if times(row, OURS, THEIRS) > 2:
            ours.append(name)
        else:
            (worse if times(row, THEIRS, OURS) > 2 else alike).append(name)
    return worse, alike, ours


def tables(found: dict[str, Any]) -> list[str]:
    """Returns a short table, of how many networks are alike, and that of all."""
    titles = "more than twice ours", "within a factor of two", "less than half of ours"
    worse, alike, ours = groups(found)
    names = ", ".join(worse), "all others", ", ".join(ours)
    counts = (str(len(x)) for x in (worse, alike, ours))
    short = [[*x] for x in zip(titles, counts, names, strict=True)]
    cells = []
    for name, row in found["rows"].items():
        sizes = ", ".join(f"{size['size']:g}" for size in row["errors"])
        errors = (", ".join(_worst(x[way]) for x in row["errors"]) for way in WAYS)
        stress = f"{row['stress']}: {sizes}"
        cells.append([name, stress, *errors, row.get("reason", "")])
    theirs, jax_ = (f"{x} {found['versions'][x]}" for x in ("torch", "jax"))
    header = ["network", "what stresses it", theirs, f"autocast, {jax_}", ""]
    return [
        report.table(["PyTorch's error is", "networks", "which"], short),
        report.table(header, cells),
    ]


def _worst(errors):
    if errors is None:
        return "not finite"
    percent = 100 * max(errors)
    return f"{percent:.2g}%" if percent < 99 else f"{percent:.0f}%"


def main() -> None:
    """Measures, and writes the results."""
    parser = report.parser("benchmarks.pytorch", __doc__)
    parser.add_argument("word", nargs="?", default="", help="of the networks' names")
    word = parser.parse_args().word
    rows = report.load(RESULTS).get("rows", {})
    for name in track([x for x in NETWORKS if word in x], "measuring"):
        network = NETWORKS[name]
        rows[name] = {"stress": network.stress, "errors": compare(network)}
        if name in REASONS:
            rows[name]["reason"] = REASONS[name]
        # In the order of the networks, without those that are no more.
        rows = {name: rows[name] for name in NETWORKS if name in rows}
        report.save(RESULTS, {**report.about(), "rows": rows})
    print("\n".join(tables(report.load(RESULTS))))


if __name__ == "__main__":
    main()
