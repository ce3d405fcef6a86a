import json
import logging
import subprocess
import sys
from itertools import chain

import pytest

from agon_jax.config import DataConfig
from agon_jax.data.batches import host_share, load_problems, make_batches
from agon_jax.data.jsonl import DataError
from agon_jax.data.problem import Problem


def problems(count):
    return [Problem(str(i), f"question {i}", str(i)) for i in range(count)]


def steps(batches, count):
    return [[problem.id for problem in next(batches)] for _ in range(count)]


def write(path, questions, answer="1"):
    rows = [json.dumps({"question": question, "answer": answer}) for question in questions]
    path.write_text("\n".join(rows))
    return str(path)


# Order


def test_every_batch_is_full_and_a_pass_repeats_nothing():
    for count, size in [(10, 3), (9, 3), (7, 7), (1, 1)]:
        batches = make_batches(problems(count), size, seed=0)
        for _ in range(3):
            seen = list(chain(*steps(batches, count // size)))
            assert len(seen) == len(set(seen)) == count // size * size


def test_what_a_pass_leaves_over_is_trained_on_in_others():
    batches = make_batches(problems(10), 4, seed=0)
    assert {name for step in steps(batches, 20) for name in step} == {str(i) for i in range(10)}


def test_seeds_and_passes_give_different_orders_each_reproducible():
    """D04: seeds 1, 2 and passes 0, 1 are four orders; a pass of one seed is no pass of another."""

    def passes(seed):
        batches = make_batches(problems(12), 4, seed)
        return [list(chain(*steps(batches, 3))) for _ in range(4)]

    orders = [order for seed in range(4) for order in passes(seed)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert passes(1) == passes(1)
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


# Resume


@pytest.mark.parametrize("stop", range(8))
def test_stopping_anywhere_and_going_on_is_one_run(stop):
    """C08, C11, D05: also in the second pass, and through JSON, as a checkpoint holds it."""
    whole = steps(make_batches(problems(10), 3, seed=5), 11)
    first = make_batches(problems(10), 3, seed=5)
    before = steps(first, stop)
    state = json.loads(json.dumps(first.get_state()))
    second = make_batches(problems(10), 3, seed=5)
    steps(second, 2)  # a restored iterator forgets where it was
    second.set_state(state)
    assert before + steps(second, 11 - stop) == whole


def test_a_new_process_goes_on_with_the_same_order():
    script = (
        "import sys, json\n"
        "from agon_jax.data.batches import make_batches\n"
        "from agon_jax.data.problem import Problem\n"
        "problems = [Problem(str(i), f'question {i}', str(i)) for i in range(10)]\n"
        "batches = make_batches(problems, 3, seed=5)\n"
        "batches.set_state(json.loads(sys.argv[1]))\n"
        "print(json.dumps([[p.id for p in next(batches)] for _ in range(4)]))\n"
        "print([m for m in ('tensorflow', 'torch') if m in sys.modules])\n"
    )
    batches = make_batches(problems(10), 3, seed=5)
    steps(batches, 4)
    ran = subprocess.run(
        [sys.executable, "-c", script, json.dumps(batches.get_state())],
        capture_output=True,
        text=True,
        check=True,
    )
    order, frameworks = ran.stdout.splitlines()
    assert json.loads(order) == steps(batches, 4)
    assert frameworks == "[]"  # grain starts no TensorFlow


def test_a_state_of_another_order_is_refused():
    state = make_batches(problems(10), 3, seed=5).get_state()
    other = problems(10)
    other[3] = other[3]._replace(answer="4")
    for changed, message in [
        (make_batches(problems(10), 3, seed=6), "seed = 5, but now it is 6"),
        (make_batches(problems(10), 2, seed=5), "problems_per_step = 3, but now it is 2"),
        (make_batches(problems(11), 3, seed=5), "problems = '"),
        (make_batches(other, 3, seed=5), "problems = '"),
    ]:
        with pytest.raises(DataError, match=message):
            changed.set_state(state)


# Hosts


@pytest.mark.parametrize("hosts", [2, 3, 6])
def test_hosts_make_the_same_steps_and_together_the_batches_of_one(hosts):
    """D03: 10 problems on 3 hosts, 2 each a step: nobody runs dry before the others."""
    whole = steps(make_batches(problems(10), 6, seed=1), 5)
    each = [make_batches(problems(10), 6, 1, host, hosts) for host in range(hosts)]
    shares = [steps(batches, 5) for batches in each]
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == whole
    assert {len(part) for share in shares for part in share} == {6 // hosts}
    assert len({json.dumps(batches.get_state()) for batches in each}) == 1


def test_a_run_goes_on_with_another_number_of_hosts():
    one = make_batches(problems(10), 6, seed=1)
    steps(one, 2)
    two = [make_batches(problems(10), 6, 1, host, 2) for host in range(2)]
    for batches in two:
        batches.set_state(one.get_state())
    assert next(two[0]) + next(two[1]) == next(one)


def test_hosts_share_an_evaluation_without_loss():
    """D03: an evaluation counts all 10 once."""
    for hosts in (1, 3, 4, 11):
        shares = [host_share(problems(10), host, hosts) for host in range(hosts)]
        assert sorted(chain(*shares)) == problems(10)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_batches_that_cannot_be_made_are_refused():
    with pytest.raises(DataError, match=r"problems_per_step = 4: must be at most .* 3$"):
        make_batches(problems(3), 4, seed=0)
    with pytest.raises(DataError, match=r"problems_per_step = 4: must be a multiple of .* 3$"):
        make_batches(problems(9), 4, 0, process_index=0, process_count=3)


# Sources


def test_the_embedded_task_gives_what_is_asked():
    train, heldout = load_problems(DataConfig(train_size=200, heldout_size=50))
    assert (len(train), len(heldout)) == (200, 50)
    texts = [problem.question for problem in train + heldout]
    assert len(set(texts)) == len({p.id for p in train + heldout}) == 250
    assert load_problems(DataConfig(train_size=200, heldout_size=50)) == (train, heldout)


def test_a_file_is_split_by_seed_and_no_text_is_on_both_sides(tmp_path):
    path = write(tmp_path / "a.jsonl", [f"question {i}" for i in range(60)])
    settings = {"source": "jsonl", "path": path, "train_size": 40, "heldout_size": 20}
    train, heldout = load_problems(DataConfig(**settings))
    texts = [problem.question for problem in train + heldout]
    assert (len(train), len(heldout), len(set(texts))) == (40, 20, 60)
    assert load_problems(DataConfig(**settings)) == (train, heldout)
    assert set(load_problems(DataConfig(**settings, seed=1))[1]) != set(heldout)
    smaller = load_problems(DataConfig(**{**settings, "train_size": 5}))
    assert smaller == (train[:5], heldout)  # the held-out problems do not move with train_size


def test_the_split_follows_the_texts_and_not_the_order_of_the_file(tmp_path):
    questions = [f"question {i}" for i in range(60)]
    settings = {"source": "jsonl", "train_size": 30, "heldout_size": 20}
    splits = []
    for name, order in [("a.jsonl", questions), ("b.jsonl", questions[::-1])]:
        split = load_problems(DataConfig(path=write(tmp_path / name, order), **settings))
        splits.append([[problem.question for problem in part] for part in split])
    assert splits[0] == splits[1]


def test_repeated_questions_are_dropped_and_counted(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    rows = [("What is 3\N{SUPERSCRIPT TWO}?", "9"), ("what is  3\N{SUPERSCRIPT TWO}? ", "nine")]
    rows += [("What is 32?", "32"), ("Caf\u00e9?", "1"), ("Cafe\u0301?", "1")]
    path.write_text("\n".join(json.dumps({"question": q, "answer": a}) for q, a in rows))
    data = DataConfig(source="jsonl", path=str(path), train_size=3, heldout_size=0)
    with caplog.at_level(logging.WARNING):
        train, heldout = load_problems(data)
    assert sorted(problem.answer for problem in train) == ["1", "32", "9"] and heldout == []
    assert "2 repeated questions dropped, the first of each kept; 1 had another" in caplog.text


def test_a_heldout_file_is_kept_out_of_training_whole(tmp_path, caplog):
    path = write(tmp_path / "train.jsonl", [f"question {i}" for i in range(30)])
    other = write(tmp_path / "test.jsonl", [f"QUESTION  {i}" for i in range(20, 40)], answer="2")
    settings = {"source": "jsonl", "path": path, "heldout_path": other, "heldout_size": 5}
    with caplog.at_level(logging.WARNING):
        train, heldout = load_problems(DataConfig(**settings, train_size=20))
    assert {problem.question for problem in train} == {f"question {i}" for i in range(20)}
    assert len(heldout) == 5 and {problem.answer for problem in heldout} == {"2"}
    assert "10 problems kept out of training" in caplog.text
    for changed, message in [
        ({"train_size": 21}, r"data.train_size = 21: .*train.jsonl has only 20 problems"),
        (
            {"train_size": 9, "heldout_size": 21},
            r"data.heldout_size = 21: .*test.jsonl has only 20",
        ),
    ]:
        with pytest.raises(DataError, match=message):
            load_problems(DataConfig(**{**settings, **changed}))


def test_a_file_too_small_for_both_parts_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [f"question {i}" for i in range(10)])
    data = DataConfig(source="jsonl", path=path, train_size=8, heldout_size=3)
    with pytest.raises(DataError, match=r"train_size = 8: .*only 7 .*set it to at most 7"):
        load_problems(data)


def test_the_plain_layer_loads_without_jax():
    names = ["rewards", "complement", "metrics", "progress", "data.jsonl", "data.batches"]
    script = "import sys\n" + "\n".join(f"import agon_jax.{name}" for name in names)
    script += "\nsys.exit('jax' in sys.modules or 'grain' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
