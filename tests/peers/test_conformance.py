"""Recorded runs of other loss scalers, replayed with ours in one jitted scan.

A line of `data/trajectories.jsonl.gz` is a run: the peer's arguments by the peer's
names, which steps were finite, and the scale at the start and after each step. It ends
where the peer raised. It is reproduced if, with the arguments of `peers.py`, every
scale and every decision to skip is the same.
"""

import ast
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, exhaustive_but, scan_updates
from peers import PEERS, LogMax

import optax_lossscale

DATA = Path(__file__).with_name("data")
LINES = gzip.decompress((DATA / "trajectories.jsonl.gz").read_bytes())
RUNS = {run["id"]: run for run in map(json.loads, LINES.splitlines())}

# Not comparable: the runs, and the argument that our error names.
REFUSED = {
    # An interval of 0: TensorFlow always grows, Keras never, apex after overflows.
    "tf1_dynamic-039 tf1_dynamic-041 tfkeras_dynamic-031": "growth_interval",
    "keras3_tensorflow-032 apex_amp-037 apex_amp-038": "growth_interval",
    # A factor below 1: the scale rises when gradients overflow.
    "tf1_dynamic-045": "growth_factor",
    # It starts below the minimum, and rises when gradients overflow. (jmp's minimum is
    # 1 under jit, whatever it was: it is lost in flattening.)
    "tfkeras_dynamic-018 tfkeras_legacy_dynamic-013 mpx-025": "initial_scale",
    "apex_fp16utils-012 jmp-039": "initial_scale",
    # It starts above float16's maximum, as a float16; at a negative scale; at a scale
    # whose reciprocal is no normal float32; in half precision.
    "mpx-003 tfkeras_dynamic-033 tf1_dynamic-036": "initial_scale",
    "jmp-050 jmp-053 jmp-054 jmp-055": "initial_scale",
    # The reciprocal is no normal float32; a fixed scale below 1.
    "tf1_fixed-011 tfkeras_fixed-010 tfkeras_fixed-008": "loss_scale_value",
}
REFUSED_RUNS = {
    name: argument for names, argument in REFUSED.items() for name in names.split()
}
NAMES = [name for name in PEERS if name not in ("Optax", "DeepSpeed, no ZeRO")]
# In full only where asked for.
every_run = pytest.mark.parametrize("every_run", exhaustive_but([False, True], [False]))


def gradients(run):
    """Returns the largest gradient of each step; any finite one where unrecorded."""
    recorded = run.get("amax") or 1.0
    return np.where(run["finite"], recorded, np.inf).astype(np.float32)


def ours(run):
    """Makes the loss scale that a run is to be compared with."""
    (peer,) = (p for p in PEERS.values() if run["peer"].startswith(p.recorded))
    config = dict(run["config"])
    if "min_loss_scale_after" in run:
        config["min_loss_scale"] = run["min_loss_scale_after"]
    return peer.ours(**config)


def comparable_steps(run):
    """Returns how many steps of a run are comparable.

    These are the steps until the peer's scale is not a normal number with a normal
    reciprocal any more. (There ours stays, and the peer's goes on to 0 or inf.)
    """
    scale = np.array(run["scale"][1:])
    sound = (scale >= 2.0**-126) & (scale <= 2.0**126)
    if "LogMax" in run["peer"]:
        # Its defects show from the first overflow or zero on.
        sound = (gradients(run) > 0) & np.isfinite(gradients(run))
    return int(np.argmin([*sound, False]))


def assert_reproduced(run):
    scale, steps = ours(run), comparable_steps(run)
    recorded = np.array(run["scale"][: steps + 1])
    states, applied = scan_updates(scale, gradients(run))
    mine = np.append(scale.init().loss_scale, states.loss_scale)[: steps + 1]
    # Some peers compute in double, or divide: a few units in the last place each time.
    tolerance = np.cumsum(np.diff(recorded, prepend=0) != 0) * 2.0**-22
    if isinstance(scale, LogMax):
        # Its variance is the difference of two large numbers, rounded to float32.
        tolerance = 2.0**-8
    assert np.all(abs(mine - recorded) <= tolerance * recorded), run["id"]
    expected = run["applied"] or run["finite"]
    assert applied.tolist()[:steps] == expected[:steps], run["id"]


def is_comparable(run):
    # The racy ones, of Backoff, hold a data race.
    return not run.get("racy") and run["id"] not in REFUSED_RUNS


def runs_of(name, *, every_run):
    """Returns the runs of a peer, or the one that rises and falls most often."""

    def turns(run):
        old, new = np.array(run["scale"][:-1]), np.array(run["scale"][1:])
        return min(sum(old < new), sum(old > new))

    recorded = PEERS[name].recorded
    runs = [x for x in RUNS.values() if x["peer"].startswith(recorded)]
    runs = [run for run in runs if is_comparable(run)]
    return runs if every_run else [max(runs, key=turns)]


@every_run
@pytest.mark.parametrize("name", NAMES)
def test_recorded_runs_are_reproduced(name, every_run):
    for run in runs_of(name, every_run=every_run):
        assert_reproduced(run)


@pytest.mark.parametrize("name", REFUSED_RUNS)
def test_what_only_a_defect_makes_sense_of_is_refused(name):
    with pytest.raises(ValueError, match=f"^{REFUSED_RUNS[name]} must"):
        ours(RUNS[name])


def test_most_runs_are_comparable_to_their_end():
    recorded = [run["id"] for name in NAMES for run in runs_of(name, every_run=True)]
    comparable = [run for run in RUNS.values() if is_comparable(run)]
    assert sorted(recorded) == sorted(run["id"] for run in comparable)
    ends = [comparable_steps(run) == len(run["finite"]) for run in comparable]
    racy = sum(bool(run.get("racy")) for run in RUNS.values())
    assert (sum(ends), len(ends), len(RUNS)) == (166, 184, 184 + 22 + racy)
    assert (len(REFUSED_RUNS), racy) == (22, 3)


def guide_entries():
    """Returns what the guide says: of each peer its call, and what to write."""
    pages = "docs/guide/coming-from-another-loss-scaler.md", "tests/peers/README.md"
    texts = [(ROOT / page).read_text() for page in pages]
    text = "\n".join(text.split("## Keep your scale")[1] for text in texts)
    entries = re.findall(r"^\| ([^|`]+) \| `(\w+\(.*\))` \| `(.*)` \|$", text, re.M)
    return {name: (theirs, code) for name, theirs, code in entries}


def test_the_guide_has_every_peer():
    assert guide_entries().keys() == PEERS.keys()


@pytest.mark.parametrize("name", PEERS)
def test_the_guide_says_the_same(name):
    theirs, code = guide_entries()[name]
    call = ast.parse(theirs, mode="eval").body
    assert PEERS[name].recorded.endswith(ast.unparse(call.func))
    arguments = {k.arg: eval(ast.unparse(k.value)) for k in call.keywords}
    expected = PEERS[name].ours(**arguments)
    assert eval(code, vars(optax_lossscale) | {"LogMax": LogMax}) == expected
    if name not in ("TensorFlow, fixed", "Optax"):
        # Which are the peer's defaults.
        assert expected == PEERS[name].ours()
