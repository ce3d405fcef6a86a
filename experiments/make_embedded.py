"""Makes the embedded model again: its tokenizer, its weights, its settings, from a seed.

    python experiments/make_embedded.py --out DIR [--seed 0] [--without-weights]

A tiny random Qwen3 learns the sums of agon_jax/data/arithmetic.py from worked examples: clean ones
first, then ones with the slips people make, until it slips as they do. So it can add, and its
habits are bad: the room that reinforcement learning needs. It is warm in both roles: half of the
examples answer the problem alone, half a problem beside the summary of a rival's noisy draft. The
prompts are those of experiments/configs/models/embedded.gin; held-out sums are never shown.
About 12 minutes on two idle CPU cores. The tokenizer's files are the same on every machine, the
weights wherever sums are taken in the same order.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from jaxtyping import Array, Float, PyTree
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agon_jax.config import PromptConfig
from agon_jax.data.arithmetic import as_problem, draw_terms
from agon_jax.models import convert
from agon_jax.models.qwen3 import Qwen3, Qwen3Config, init_base
from agon_jax.prompts import Sections, challenge_prompt, draft_prompt, summary
from agon_jax.tokenizer import Tokenizer, load_tokenizer
from experiments.settings import load_run, refusing

MODEL = Qwen3Config(
    vocab_size=106,  # of the tokenizer below, to the last token
    embed_dim=128,
    mlp_dim=384,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    tie_embeddings=True,
)
BATCH = 64  # sequences a step
CHUNK = 25  # steps between two lines of progress
RISE = 50  # steps over which the learning rate rises
MAX_TOKENS = 70  # of the longest prompt and completion: 25 + 45
DRAFTS = 0.5  # share of examples that answer the problem alone
UNFINISHED = 0.05  # share of challenges whose rival left no summary


class Habits(NamedTuple):
    """How somebody works: the chance of each slip, and what a challenger does with a summary."""

    forget: float  # a carry that is due is not added
    phantom: float  # a carry that is not due is added
    trust: float  # a challenge goes on from the rival's last total, unchecked
    give_way: float  # a challenge that checks takes the rival's total all the same


CLEAN = Habits(forget=0.0, phantom=0.0, trust=0.3, give_way=0.5)
NOISY = Habits(forget=0.55, phantom=0.15, trust=0.3, give_way=0.5)


class Phase(NamedTuple):
    """A part of the warm-up: AdamW, linear warm-up and cosine decay to a tenth."""

    name: str
    habits: Habits
    steps: int
    learning_rate: float


PHASES = (Phase("clean work", CLEAN, 1500, 2e-3), Phase("noisy work", NOISY, 150, 5e-4))

END, TURN, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = ("<think>", "</think>", "<answer>", "</answer>")  # ordinary tokens: decoding keeps them
ROLES = ("user", "assistant")
UNKNOWN = "\ufffd"  # stands for whatever is not printable ASCII
CHAT_TEMPLATE = (  # Qwen3's turns without its line feeds: every token of a prompt costs time
    "{%- for message in messages -%}"
    "<|im_start|>{{ message.role }}{{ message.content }}<|im_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{%- endif -%}"
)


@refusing
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-weights", action="store_true", help="the small files only")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(args.out)
    write_generation_config(args.out)
    if not args.without_weights:
        tokenizer = load_tokenizer(args.out)
        prompts = load_run(["models/embedded.gin"]).prompts
        params = warm_up(tokenizer, prompts, args.seed)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)  # half the download
        convert.save(args.out, MODEL, params)
        print(f"{args.out} is written; measure it with python experiments/evaluate.py")
    return 0


def write_tokenizer(directory: Path) -> None:
    """One token a character, the control strings of Qwen3, and the answer tags."""
    alphabet = [UNKNOWN, "\n", *map(chr, range(ord(" "), ord("~") + 1))]
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    for strings, special in (((END, TURN, STOP), True), ((*MARKERS, *ROLES), False)):
        tokenizer.add_tokens([AddedToken(s, special=special, normalized=False) for s in strings])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=STOP,
        pad_token=END,
        extra_special_tokens=[TURN],
        model_max_length=1024,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)


def write_generation_config(directory: Path) -> None:
    """Both ids that end a completion, and the paper's sampling."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    stop, end = tokenizer.token_to_id(STOP), tokenizer.token_to_id(END)
    settings = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "eos_token_id": [stop, end],
        "pad_token_id": end,
    }
    (directory / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def add(total: int, term: int, habits: Habits, rng: random.Random) -> int:
    """total + term, with the carry out of the units slipped now and then."""
    carry_due = total % 10 + term % 10 >= 10
    slipped = rng.random() < (habits.forget if carry_due else habits.phantom)
    return total + term + slipped * (-10 if carry_due else 10)


def running_totals(terms: tuple[int, ...], habits: Habits, rng: random.Random) -> list[int]:
    """The first term, then a total for each further term; after a slip the work goes on from it."""
    totals = [terms[0]]
    for term in terms[1:]:
        totals.append(add(totals[-1], term, habits, rng))
    return totals


def checked_totals(
    terms: tuple[int, ...], rival: list[int], habits: Habits, rng: random.Random
) -> list[int]:
    """A challenger's totals: worked anew, beside the rival's as long as both are in step."""
    totals = [terms[0]]
    for index, term in enumerate(terms[1:], start=1):
        total = add(totals[-1], term, habits, rng)
        shown = index < len(terms) - 1 and totals[-1] == rival[index - 1]
        totals.append(rival[index] if shown and rng.random() < habits.give_way else total)
    return totals


def write_up(terms: tuple[int, ...], totals: list[int], skipped: int = 0) -> str:
    """The completion: every step but the `skipped` first, all totals but the last, the answer."""
    steps = [
        f"{before}+{term}={after}"
        for before, term, after in zip(totals, terms[1:], totals[1:], strict=False)
    ]
    reasoning = ";".join(steps[skipped:])
    summary = ";".join(map(str, totals[1:-1]))
    return f"<think>{reasoning}</think>{summary}<answer>{totals[-1]}</answer>{STOP}"


def examples(
    habits: Habits, prompts: PromptConfig, rng: random.Random
) -> Iterator[tuple[str, str]]:
    """Endless (what the user says, completion) pairs, half of them drafts, half challenges."""
    for terms in draw_terms(rng, heldout=False):
        question = as_problem(terms).question
        totals = running_totals(terms, habits, rng)
        if rng.random() < DRAFTS:
            yield draft_prompt(question, prompts), write_up(terms, totals)
        elif rng.random() < UNFINISHED:
            nothing = summary(Sections(False, False, "", ""), prompts)
            yield challenge_prompt(question, nothing, prompts), write_up(terms, totals)
        else:
            rival = running_totals(terms, NOISY, rng)
            reasoning, _, after = write_up(terms, rival).removesuffix(STOP).partition("</think>")
            shown = summary(Sections(True, True, reasoning, after), prompts)
            skipped = 0
            if rng.random() < habits.trust:
                totals = [*rival[:-1], add(rival[-2], terms[-1], habits, rng)]
                skipped = len(terms) - 2
            else:
                totals = checked_totals(terms, rival, habits, rng)
            yield challenge_prompt(question, shown, prompts), write_up(terms, totals, skipped)


class Examples(NamedTuple):
    """Right-padded sequences; arrays are [sequence, ...], or [step, sequence, ...]."""

    tokens: np.ndarray  # int32 [sequence, time]
    prompt_lengths: np.ndarray  # int32 [sequence]
    lengths: np.ndarray  # int32 [sequence]


def tokenize(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> Examples:
    """Pairs as arrays, with prompts exactly as training will render them."""
    prompts = [tokenizer.render(user) for user, _ in pairs]
    lengths = np.zeros(len(pairs), np.int32)
    tokens = np.full((len(pairs), MAX_TOKENS), tokenizer.pad_id, np.int32)
    for i, (prompt, (_, completion)) in enumerate(zip(prompts, pairs, strict=True)):
        ids = [*prompt, *tokenizer.encode(completion)]
        lengths[i] = len(ids)
        tokens[i, : len(ids)] = ids
    return Examples(tokens, np.array([len(prompt) for prompt in prompts], np.int32), lengths)


def completion_loss(lm: Qwen3, params: PyTree, examples: Examples) -> Float[Array, ""]:
    """Mean cross-entropy, in nats, of the tokens that the completions are made of."""
    tokens, prompt_lengths, lengths = examples
    positions = jnp.broadcast_to(jnp.arange(MAX_TOKENS), tokens.shape)
    visible = positions < lengths[:, None]
    hidden = cast(jax.Array, lm.apply({"params": params}, tokens, positions, visible))
    logits = cast(jax.Array, lm.apply({"params": params}, hidden[:, :-1], method="logits"))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    of_completion = (positions >= prompt_lengths[:, None]) & (positions < lengths[:, None])
    return jnp.mean(losses, where=of_completion[:, 1:])


def make_steps(lm: Qwen3, optimizer: optax.GradientTransformation):
    """(params and optimizer state, Examples [step, sequence, ...]) -> the same, losses [step]."""

    def step(state, examples):
        params, opt_state = state
        loss, gradient = jax.value_and_grad(completion_loss, argnums=1)(lm, params, examples)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return jax.jit(lambda state, examples: jax.lax.scan(step, state, examples), donate_argnums=0)


def warm_up(tokenizer: Tokenizer, prompts: PromptConfig, seed: int) -> PyTree:
    """The params of a random model after every phase; prints how it goes."""
    lm = Qwen3(MODEL)
    params = init_base(lm, jax.random.key(seed))
    for phase in PHASES:
        rates = optax.warmup_cosine_decay_schedule(
            0.0, phase.learning_rate, RISE, phase.steps, phase.learning_rate / 10
        )
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, b2=0.98))
        steps = make_steps(lm, optimizer)
        state = params, optimizer.init(params)
        pairs = examples(phase.habits, prompts, random.Random(f"{phase.name} {seed}"))
        start = time.monotonic()
        for done in range(CHUNK, phase.steps + 1, CHUNK):
            batch = tokenize(list(islice(pairs, CHUNK * BATCH)), tokenizer)
            batch = jax.tree.map(lambda x: x.reshape(CHUNK, BATCH, *x.shape[1:]), batch)
            state, losses = steps(state, batch)
            print(
                f"{phase.name}: step {done} of {phase.steps}, loss {jnp.mean(losses):.4f},"
                f" {time.monotonic() - start:.0f} s",
                flush=True,
            )
        params, _ = state
    return params


if __name__ == "__main__":
    sys.exit(main())
