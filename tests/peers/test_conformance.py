"""Recorded runs of other loss scalers, replayed with ours in one jitted scan.

A line of `data/trajectories.jsonl.gz` is a run: the peer's arguments by the peer's
names, which steps were finite, and the scale at the start and after each step. It ends
where the peer raised. It is reproduced if, with the arguments of `peers.py`, every
scale and every decision to skip is the same.
"""

import ast
import gzip
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, scan_updates
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
# Left out: some runs of Backoff hold a data race.
LEFT_OUT = {"open_seq2seq BackoffScaler": 3}
# Runs reproduced to the end, reproduced until the peer's scale is not a normal number
# with a normal reciprocal any more (there ours stays, and the peer's goes on to 0 or
# inf) or LogMax meets its first overflow or zero, and refused.
COUNTS = {
    "TensorFlow, dynamic": (12, 0, 4),
    "TensorFlow, fixed": (5, 0, 1),
    "tf_keras": (15, 0, 6),
    "Keras 3": (19, 7, 1),
    "PyTorch": (7, 1, 0),
    "Flax, up to 0.12.12": (9, 1, 0),
    "jmp": (11, 1, 5),
    "mpx": (5, 0, 2),
    "fairseq": (8, 1, 0),
    "DeepSpeed, ZeRO": (21, 0, 0),
    "Megatron": (16, 2, 0),
    "apex, amp": (10, 0, 2),
    "apex, fp16_utils": (9, 0, 1),
    "apex, contrib": (5, 0, 0),
    "OpenSeq2Seq, Backoff": (9, 0, 0),
    "OpenSeq2Seq, LogMax": (5, 5, 0),
}


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


def assert_reproduced(run, scale):
    """Asserts that a run is reproduced; returns whether it is so to its end."""
    recorded = np.array(run["scale"])
    normal = (recorded >= 2.0**-126) & (recorded <= 2.0**126)
    sound = normal[1:]
    grads = gradients(run)
    if isinstance(scale, LogMax):
        # Its defects show from the first overflow or zero on.
        sound = (grads > 0) & np.isfinite(grads)
    # Of the steps, those before the first that leads out of bounds.
    steps = np.argmin([*sound, False])
    recorded = recorded[: steps + 1]
    states, applied = scan_updates(scale, grads)
    mine = np.append(scale.init().loss_scale, states.loss_scale)[: steps + 1]
    # Some peers compute in double, or divide: a few units in the last place each time.
    tolerance = np.cumsum(np.diff(recorded, prepend=0) != 0) * 2.0**-22
    if isinstance(scale, LogMax):
        # Its variance is the difference of two large numbers, rounded to float32.
        tolerance = 2.0**-8
    assert np.all(abs(mine - recorded) <= tolerance * recorded), run["id"]
    expected = run["applied"] or run["finite"]
    assert applied.tolist()[:steps] == expected[:steps], run["id"]
    return steps == len(run["finite"])


def runs_of(name):
    """Returns the recorded runs of a peer."""
    return [
        run
        for run in RUNS.values()
        if run["peer"].startswith(PEERS[name].recorded) and not run.get("racy")
    ]


def liveliest(runs):
    """Returns the run in which the scale both rises and falls most often."""

    def turns(run):
        pairs = list(itertools.pairwise(run["scale"]))
        return min(sum(a < b for a, b in pairs), sum(a > b for a, b in pairs))

    return max(runs, key=turns)


@pytest.mark.parametrize("name", COUNTS)
def test_the_liveliest_run_is_reproduced(name):
    run = liveliest(run for run in runs_of(name) if run["id"] not in REFUSED_RUNS)
    assert_reproduced(run, ours(run))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COUNTS)
def test_recorded_runs_are_reproduced(name):
    runs = runs_of(name)
    mine = [run for run in runs if run["id"] not in REFUSED_RUNS]
    ends = [assert_reproduced(run, ours(run)) for run in mine]
    assert COUNTS[name] == (sum(ends), len(ends) - sum(ends), len(runs) - len(mine))


@pytest.mark.parametrize("name", REFUSED_RUNS)
def test_what_only_a_defect_makes_sense_of_is_refused(name):
    with pytest.raises(ValueError, match=f"^{REFUSED_RUNS[name]} must"):
        ours(RUNS[name])


def test_every_run_is_accounted_for():
    assert Counter(r["peer"] for r in RUNS.values() if r.get("racy")) == LEFT_OUT
    counted = sum(sum(counts) for counts in COUNTS.values())
    assert counted + sum(LEFT_OUT.values()) == len(RUNS) == 209


def guide_entries():
    """Returns what the guide says: of each peer its call, and what to write."""
    text = (ROOT / "docs/guide/coming-from-another-loss-scaler.md").read_text()
    text = text.split("## Keep your scale")[1]
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
