"""The embedded model: complete, small, made by the documented command, and warm in both roles."""

import json
import random
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agon_jax.data.arithmetic import is_heldout
from agon_jax.models import convert
from agon_jax.models.qwen3 import Qwen3
from agon_jax.policies import model_directory
from agon_jax.prompts import challenge_prompt, draft_prompt, format_reward, parse_answer
from agon_jax.tokenizer import load_tokenizer
from experiments import make_embedded
from experiments.settings import load_run

DIRECTORY = model_directory("embedded")
RUN = load_run(["models/embedded.gin", "tasks/arithmetic.gin"])


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DIRECTORY)


@pytest.fixture(scope="module")
def model():
    config, params = convert.load(DIRECTORY, "float32")
    return config, jax.tree.map(jnp.asarray, params)


def some_examples(habits, count, seed=5):
    return list(islice(make_embedded.examples(habits, RUN.prompts, random.Random(seed)), count))


def terms_of(user):
    return tuple(int(term) for term in user.partition("|")[0].split("+"))


def test_the_package_holds_a_whole_and_small_hugging_face_directory():
    names = {path.name for path in DIRECTORY.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 4_000_000


def test_config_tokenizer_and_weights_agree(model, tokenizer):
    config, params = model
    assert config == make_embedded.MODEL
    assert config.vocab_size == tokenizer.vocab_size == params["embed_tokens"].shape[0]
    stops = json.loads((DIRECTORY / "generation_config.json").read_text())["eos_token_id"]
    assert set(stops) == tokenizer.eos_ids
    assert {tokenizer.decode([stop]) for stop in stops} <= {"", "<|im_end|>", "<|endoftext|>"}


def test_the_documented_command_makes_the_small_files_again_bit_for_bit(tmp_path):
    assert make_embedded.main(["--out", str(tmp_path), "--without-weights"]) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {path.name for path in DIRECTORY.iterdir()} - {
        "config.json",
        "model.safetensors",
    }
    for name in written:
        assert (tmp_path / name).read_bytes() == (DIRECTORY / name).read_bytes(), name


@pytest.mark.parametrize(
    "text",
    [
        "23+45=68;68+91=159",
        " two  spaces\nand a line",
        "<think>1</think>2<answer>3</answer>",
        "~|{}",
    ],
)
def test_text_comes_back_from_its_tokens(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_markers_are_one_token_each_and_other_alphabets_are_marked_unknown(tokenizer):
    assert tokenizer.encode("<think>") == [tokenizer.open_id]
    assert tokenizer.encode("</think>") == [tokenizer.close_id]
    assert len(tokenizer.encode("<answer>12</answer>")) == 4
    assert tokenizer.decode(tokenizer.encode("π=3")) == "\ufffd=3"


def test_prompts_and_completions_fit_their_caps(tokenizer):
    longest = "99+99+99+99"
    summary = "9" * RUN.prompts.max_summary_chars
    draft = tokenizer.render(draft_prompt(longest, RUN.prompts))
    challenge = tokenizer.render(challenge_prompt(longest, summary, RUN.prompts))
    assert len(draft) == len(longest) + 5 <= RUN.sampling.max_draft_prompt_tokens
    assert len(challenge) <= RUN.sampling.max_challenge_prompt_tokens
    for _, completion in some_examples(make_embedded.NOISY, 200):
        assert len(tokenizer.encode(completion)) <= RUN.sampling.max_new_tokens


def test_clean_work_is_right_unless_it_trusts_a_rival_and_in_the_format(tokenizer):
    alone = make_embedded.CLEAN._replace(trust=0.0, give_way=0.0)
    for user, completion in some_examples(alone, 200):
        sections = tokenizer.sections(
            tokenizer.render(user), np.array(tokenizer.encode(completion), np.int32)
        )
        assert format_reward(sections)
        assert parse_answer(sections.after) == str(sum(terms_of(user)))


def test_noisy_work_errs_as_often_as_its_habits_say():
    rng = random.Random(0)
    habits = make_embedded.Habits(forget=0.5, phantom=0.2, trust=0.0, give_way=0.0)
    forgotten = [make_embedded.add(27, 15, habits, rng) for _ in range(4000)]
    imagined = [make_embedded.add(22, 15, habits, rng) for _ in range(4000)]
    assert set(forgotten) == {42, 32} and set(imagined) == {37, 47}
    assert np.mean(np.array(forgotten) == 32) == pytest.approx(0.5, abs=0.03)
    assert np.mean(np.array(imagined) == 47) == pytest.approx(0.2, abs=0.03)


def test_both_roles_are_warmed_up_never_on_held_out_sums_nor_with_the_rivals_answer():
    users = [user for user, _ in some_examples(make_embedded.NOISY, 2000)]
    challenges = [user for user in users if "|" in user]
    assert 0.4 < len(challenges) / len(users) < 0.6
    assert not any(is_heldout(terms_of(user)) for user in users)
    totals = [user.partition("|")[2].split(";") for user in challenges]
    assert {len(shown) for shown in totals if shown != [""]} == {2}  # of three: the last withheld
    assert 0.01 < np.mean([shown == [""] for shown in totals]) < 0.1


def test_the_weights_are_warm(model, tokenizer):
    """Loss on fresh noisy work: at chance 4.7, before the sums are understood 0.2, at best 0.04."""
    config, params = model
    examples = make_embedded.tokenize(some_examples(make_embedded.NOISY, 128), tokenizer)
    loss = jax.jit(lambda *inputs: make_embedded.completion_loss(Qwen3(config), *inputs))
    assert 0.02 < loss(params, jax.tree.map(jnp.asarray, examples)) < 0.08
