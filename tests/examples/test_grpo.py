"""The reinforcement learning samples, rewards and learns as it says."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from runs import column, last_state, read_rows

from examples.common.checkpoint import Checkpoints
from examples.common.precision import compute_in
from examples.grpo import cli, task
from examples.grpo.config import Config
from examples.grpo.policy import Policy
from examples.grpo.step import Batch, clipped_loss, compare
from examples.language_model import model

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
# Few and short problems.
ARGUMENTS = [
    *("--digits=2", "--layers=1", "--width=32", "--heads=2", "--problems=16"),
    *("--supervised-steps=60", "--supervised-batch=64", "--supervised-rate=1e-2"),
    *("--steps=40", "--minibatches=2", "--group=4", "--save-every=20"),
    "--learning-rate=2e-3",
]


def main(*arguments):
    cli.main([*ARGUMENTS, *arguments])


def difference(dtype):
    """Returns how far the log-probabilities of sampler and trainer are apart."""
    options = {"xla_allow_excess_precision": False}
    policy = Policy(Config(digits=4, layers=2, width=32).model())
    params = jax.tree.map(lambda x: 5 * x, policy.init(jax.random.key(0)))
    prompts = task.draw(jax.random.key(1), 64, digits=4)
    sample, score = (
        jax.jit(compute_in(dtype, function), compiler_options=options)
        for function in (policy.sample, policy.log_probs)
    )
    answers, sampled = sample(params, prompts, jax.random.key(2))
    scored = score(params, prompts, answers)
    assert answers.shape == sampled.shape == scored.shape == (64, 4)
    assert len(jnp.unique(answers)) > 50
    return jnp.abs(sampled - scored).mean()


@pytest.mark.exhaustive
def test_sampler_and_trainer_differ_by_roundoff():
    in_float16, in_bfloat16 = difference("float16"), difference("bfloat16")
    assert in_float16 < 0.01
    assert 6 < in_bfloat16 / in_float16 < 12
    # All of it is the order of the division.
    with mock.patch.object(model, "_mix_then_divide", model._mix):
        assert difference("float16") < 0.05 * in_float16


def test_rewards_and_advantages():
    prompts = np.array([list(b"312>"), list(b"990>")])
    rewards = task.reward(prompts, np.array([list(b"123"), list(b"990")]))
    np.testing.assert_array_equal(rewards, [1, 0])
    advantages = compare(jnp.float32([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]))
    np.testing.assert_allclose(advantages[0], np.array([3, -1, -1, -1]) / 3**0.5, 1e-3)
    np.testing.assert_array_equal(advantages[1:], 0)


def test_a_ratio_counts_up_to_the_clip_unless_it_does_harm():
    ratios = np.float32([[0.5, 1.1, 2.0], [0.5, 1.1, 2.0]])
    tokens = np.zeros((2, 3), int)
    batch = Batch(tokens, tokens, np.zeros((2, 3)), np.float32([1, -1]))
    loss, metrics = clipped_loss(np.log(ratios), batch, clip=0.2)
    gains = [0.5, 1.1, 1.2], [-0.8, -1.1, -2.0]
    assert loss == pytest.approx(-np.mean(gains))
    assert metrics["clipped"] == pytest.approx(4 / 6)
    assert metrics["mean_difference"] == pytest.approx(np.abs(np.log(ratios)).mean())
    assert metrics["largest_difference"] == pytest.approx(np.log(2))


class Died(Exception):
    """Stands for the end of a process."""


@pytest.mark.exhaustive
def test_rewards_rise_and_a_run_that_died_comes_to_the_same_end(tmp_path, capsys):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    main("--out", str(whole))
    rewards = np.array(column(whole, "reward"))
    assert len(rewards) == 40
    assert rewards[-10:].mean() > rewards[:10].mean() + 0.1
    assert read_rows(whole)[-1]["skipped_steps"] == "0"
    text = " ".join(capsys.readouterr().out.split())
    assert f"reward {rewards[-5:].mean():.3f}, sampler and trainer " in text
    assert text.endswith(" apart: means of the last 5 of 100 steps")

    save = Checkpoints.save

    def fatal_save(self, step, state):
        if step == 80:
            raise Died
        save(self, step, state)

    # It goes on from step 60, where its optimizer changes.
    with mock.patch.object(Checkpoints, "save", fatal_save), pytest.raises(Died):
        main("--out", str(stopped))
    main("--out", str(stopped))
    assert read_rows(stopped) == read_rows(whole)
    assert_same_bits(last_state(stopped), last_state(whole))
