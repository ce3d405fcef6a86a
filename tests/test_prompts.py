"""Templates, answers, phi and the summary, on what models write and what they should not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agon_jax.config import PromptConfig
from agon_jax.prompts import (
    Sections,
    challenge_prompt,
    draft_prompt,
    format_reward,
    parse_answer,
    summary,
)

PROMPTS = PromptConfig()


def closed(after: str, reasoning: str = "hm") -> Sections:
    return Sections(True, True, reasoning, after)


def test_templates_take_braces_in_their_values_as_text():
    prompts = PromptConfig(draft="Q: {question} {x}", challenge="{question}|{summary}|{question}")
    assert draft_prompt(r"\{1\} {summary} {question} {0}", prompts) == (
        r"Q: \{1\} {summary} {question} {0} {x}"
    )
    assert (
        challenge_prompt("a{summary}", "b{question}", prompts)
        == "a{summary}|b{question}|a{summary}"
    )


@pytest.mark.parametrize("nothing", ["", " \n"])
def test_an_empty_summary_is_named_as_such(nothing):
    assert PROMPTS.empty_summary in challenge_prompt("q", nothing, PROMPTS)


@pytest.mark.parametrize(
    ("after", "answer"),
    [
        ("<answer>42</answer>", "42"),
        ("so\n\n<answer>\n 42 \n</answer>\n", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer>2</answer></answer>", "2"),
        ("<answer>1</answer><answer>", "1"),
        ("</answer>1<answer>", None),
        (r"<answer>\boxed{42}</answer>", "42"),
        (r"<answer>$\boxed{\frac{1}{3}}$.</answer>", r"\frac{1}{3}"),
        (r"<answer>\boxed{\boxed{3}}</answer>", "3"),
        (r"\boxed{7} <answer>8</answer> \boxed{9}", "8"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{3}} and \boxed{\text{E}}", r"\text{E}"),
        (r"\fbox{42}", "42"),
        (r"\boxed {42}", "42"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1\}} x", r"1\}"),
        (r"\\boxed{5}", "5"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{4} <answer></answer>", None),  # an empty one falls back on nothing
        (r"<answer>5</answer> <answer> </answer>", None),
        (r"<answer>\boxed{}</answer>", None),
        (r"\boxed{3} \boxed{}", None),
        ("<answer>42", None),
        ("the answer is 42", None),
        ("", None),
    ],
)
def test_the_last_answer_block_counts_or_else_the_last_box(after, answer):
    assert parse_answer(after) == answer


@pytest.mark.parametrize("gap", ["", "\n", "\n\n", "a summary\n"])
@pytest.mark.parametrize("inside", ["c", "\nc\n", "\n\nc\n\n", r"\boxed{c}"])
def test_phi_does_not_mind_line_feeds_nor_a_summary(gap, inside):
    assert format_reward(closed(f"{gap}<answer>{inside}</answer>"))


@pytest.mark.parametrize(
    "sections",
    [
        closed("c"),
        closed("<answer>c"),
        closed("</answer>c<answer>"),
        closed("<answer></answer>"),
        closed("<answer> \n</answer>"),
        closed("<answer>c</answer> and more"),
        closed("<answer>1</answer><answer>2</answer>"),
        closed("<answer><answer>1</answer></answer>"),
        closed("<think>b</think><answer>c</answer>"),
        closed("<answer>c</answer>", reasoning="a <think> b"),
        Sections(True, False, "a", "<answer>c</answer>"),
        Sections(False, True, "a", "<answer>c</answer>"),
        Sections(False, False, "", ""),
    ],
)
def test_phi_is_for_one_block_closed_then_one_answer_at_the_end(sections):
    assert not format_reward(sections)


def test_an_answer_named_in_the_reasoning_takes_no_phi():
    assert format_reward(closed("<answer>c</answer>", reasoning="then <answer>d</answer>"))


def test_the_summary_is_the_text_after_the_block_and_never_the_trace():
    assert summary(closed("68;159<answer>236</answer>", reasoning="23+45=68"), PROMPTS) == (
        "68;159[withheld]"
    )
    nothing = PromptConfig(withheld="")
    assert summary(closed("68;159<answer>236</answer>"), nothing) == "68;159"
    for unclosed in (Sections(False, False, "23+45=68", "68"), Sections(False, True, "", "68")):
        assert summary(unclosed, PROMPTS) == ""


def test_the_summary_is_capped_after_its_answer_is_gone():
    prompts = PromptConfig(max_summary_chars=20)
    text = summary(closed("one two three 125 four five <answer>12</answer>"), prompts)
    assert text == "one two three 125"
    assert summary(closed("one two three four 125 <answer>12</answer>"), prompts) == (
        "one two three four"
    )


@given(st.text(alphabet="ab12 \n<>/|{}\\$answerboxd.=", max_size=200), st.integers(1, 50))
def test_the_cap_holds_and_nothing_raises(text, limit):
    parse_answer(text)
    format_reward(closed(text))
    assert len(summary(closed(text), PromptConfig(max_summary_chars=limit))) <= limit
