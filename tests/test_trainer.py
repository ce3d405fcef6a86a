"""The line, end to end on the embedded model: who plays, what is learned from, stop and go on."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from agon_jax import trainer
from agon_jax.checkpoint import Checkpoints
from agon_jax.config import (
    DataConfig,
    LoraConfig,
    MethodConfig,
    OptimizerConfig,
    PromptConfig,
    RunConfig,
    SamplingConfig,
    VerifierConfig,
)
from agon_jax.metrics import read_metrics
from agon_jax.policies import Pair, Policy, init_trainables, load_pair, model_directory

RUN = RunConfig(
    prompts=PromptConfig(
        draft="{question}", challenge="{question}|{summary}", empty_summary="", withheld=""
    ),
    lora=LoraConfig(rank=2),
    sampling=SamplingConfig(
        max_new_tokens=64,
        max_draft_prompt_tokens=32,
        max_challenge_prompt_tokens=32,
        rows_per_device=8,
    ),
    method=MethodConfig(group_size=4),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    data=DataConfig(train_size=12, heldout_size=3),
    verifier=VerifierConfig(workers=1),
    problems_per_step=4,
    steps=3,
    eval_every=2,
    save_every=1,
)
A, B = (Policy(name, i, 0, i, None, None) for i, name in enumerate("AB"))


def test_roles_rotate_from_step_to_step_or_stay():
    pair = Pair((A, B), ())
    assert [trainer.roles(pair, step, RUN) for step in range(3)] == [(A, B), (B, A), (A, B)]
    fixed = replace(RUN, method=MethodConfig(roles="fixed"))
    assert [trainer.roles(pair, step, fixed) for step in range(2)] == [(A, B)] * 2
    assert [trainer.roles(Pair((A,), ()), step, RUN) for step in range(2)] == [(A, A)] * 2


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    save, counts = Checkpoints.save, []  # compilations before and after each save

    def counted(*arguments):
        counts.append(len(compiled))
        save(*arguments)
        counts.append(len(compiled))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", counted)
        report = trainer.train(RUN, workdir)
    return workdir, report, counts


def rows(workdir, kind):
    """All of a run's figures but those of the clock."""
    return [
        {key: value for key, value in row.items() if "second" not in key and key != "totals"}
        for row in read_metrics(workdir, kind)
    ]


def final_states(run, workdir):
    with Checkpoints(workdir / "checkpoints", 2) as checkpoints:
        step, states, record = checkpoints.restore_latest(load_pair(run).init_states())
    return step, jax.device_get(states), record


def test_a_run_learns_evaluates_and_leaves_a_row_a_step(uninterrupted):
    workdir, report, _ = uninterrupted
    train = read_metrics(workdir, "train")
    assert [row["step"] for row in train] == [0, 1, 2]
    assert [row["step"] for row in read_metrics(workdir, "eval")] == [0, 2, 3]
    assert set(report.stages) == {"A", "B", "A->B", "B->A"}
    assert all(len(stage.rollouts) == 3 for stage in report.stages.values())
    for row in train:
        for policy in "AB":
            assert row[f"policy_{policy}/logprob_gap_max"] < 1e-3
            assert row[f"policy_{policy}/ratio"] == 1.0
            assert row[f"policy_{policy}/grad_norm"] > 0
    totals = train[-1]["totals"]
    assert totals["generated_tokens"] == sum(
        row["draft/generated_tokens"] + row["challenge/generated_tokens"] for row in train
    )


def test_both_policies_moved_from_where_they_began(uninterrupted):
    _, states, _ = final_states(RUN, uninterrupted[0])
    (began,) = jax.device_get([state.trainable for state in load_pair(RUN).init_states()])

    def each_moved(after, before):
        return (after != before).any(axis=tuple(range(1, after.ndim))).all()

    assert all(jax.tree.leaves(jax.tree.map(each_moved, states[0].trainable, began)))


def test_nothing_compiles_after_the_first_step(uninterrupted):
    *_, (_, after_first_save, before_second_save, *_) = uninterrupted
    assert after_first_save == before_second_save


@pytest.mark.parametrize("step", [1, 2])
def test_a_stopped_run_goes_on_to_the_same_bits(uninterrupted, tmp_path, step):
    """Stopped inside `step`, after its rollouts: nothing of it counts, and it is done again."""
    learn = trainer.Pair.learn
    with pytest.MonkeyPatch.context() as patch:
        seen = []

        def stop(self, *arguments):
            seen.append(None)
            if len(seen) > step:
                raise Stopped
            return learn(self, *arguments)

        patch.setattr(trainer.Pair, "learn", stop)
        with pytest.raises(Stopped):
            trainer.train(RUN, tmp_path)
    trainer.train(RUN, tmp_path)
    whole = uninterrupted[0]
    assert rows(tmp_path, "train") == rows(whole, "train")
    assert rows(tmp_path, "eval") == rows(whole, "eval")
    ours, theirs = final_states(RUN, tmp_path), final_states(RUN, whole)
    assert ours[0] == theirs[0] == 3
    jax.tree.map(np.testing.assert_array_equal, ours[1], theirs[1])
    assert ours[2]["data"] == theirs[2]["data"]


def test_grpo_alone_learns_from_twice_the_drafts(tmp_path):
    run = replace(
        RUN, steps=1, eval_every=0, method=MethodConfig(group_size=4, policies=1, challenge=False)
    )
    report = trainer.train(run, tmp_path)
    (row,) = read_metrics(tmp_path, "train")
    assert set(report.stages) == {"A"}
    assert sum(row[f"draft/verdicts/{reason}"] for reason in ("right", "wrong", "no_answer")) == 32
    assert "challenge/reward" not in row


def test_a_method_that_does_not_learn_is_only_evaluated(tmp_path):
    run = replace(RUN, method=MethodConfig(learn=False, group_size=4))
    report = trainer.train(run, tmp_path)
    assert report.numbers()["n"] == 3
    assert read_metrics(tmp_path, "train") == []
    assert [row["step"] for row in read_metrics(tmp_path, "eval")] == [0]


def test_full_parameters_start_as_the_base_and_near_it():
    from agon_jax.models import convert

    run = replace(RUN, model=replace(RUN.model, train="full"))
    _, base = convert.load(model_directory("embedded"), "float32")
    trees = init_trainables(base, run)
    jax.tree.map(lambda leaf, mine: np.testing.assert_array_equal(leaf, mine[0]), base, trees)
    difference = jax.tree.map(lambda leaf, mine: float(abs(leaf - mine[1]).max()), base, trees)
    assert 0 < max(jax.tree.leaves(difference)) < 0.05
