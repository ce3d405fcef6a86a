"""Every setting, as frozen dataclasses; a wrong value is refused.

The paper's values are the defaults; one marked (ours) is not in the paper. experiments/ binds
these classes to gin under the lower-case names given in SETTINGS.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import no_type_check  # a wrong type is refused below, in words, in the tests too

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class SettingError(ValueError):
    """A setting has a wrong value; the message names setting, value and what is allowed."""


def _one_of(owner: object, name: str, allowed: tuple) -> None:
    value = getattr(owner, name)
    if not any(type(value) is type(each) and value == each for each in allowed):
        _refuse(owner, name, f"one of {', '.join(map(repr, allowed))}")


def _number(
    owner: object,
    name: str,
    low: int | float,
    high: int | float = math.inf,
    *,
    integer: bool = False,
) -> None:
    value = getattr(owner, name)
    kind = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        what = "a whole number" if integer else "a number"
        bound = f">= {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        _refuse(owner, name, f"{what} {bound}")


def _boolean(owner: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(owner, name), bool):
            _refuse(owner, name, "True or False")


def _text(owner: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(owner, name), str):
            _refuse(owner, name, "text")


def _refuse(owner: object, name: str, allowed: str) -> None:
    section = next((key for key, cls in SETTINGS.items() if isinstance(owner, cls)), "")
    raise SettingError(f"{section}.{name} = {getattr(owner, name)!r}: must be {allowed}")


@no_type_check
@dataclass(frozen=True)
class ModelConfig:
    """Where a base comes from and how it is held."""

    path: str = "embedded"  # a Hugging Face directory, or "embedded": the tiny model in the package
    param_dtype: str = "float32"  # of the base; adapters are always float32
    dtype: str = "float32"  # of activations and the KV cache
    train: str = "lora"  # lora | full: what a policy's own parameters are
    remat: bool = False  # recompute each layer in the backward pass

    def __post_init__(self):
        _text(self, "path")
        _one_of(self, "param_dtype", ("float32", "bfloat16"))
        _one_of(self, "dtype", ("float32", "bfloat16"))
        _one_of(self, "train", ("lora", "full"))
        _boolean(self, "remat")


@no_type_check
@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters W + alpha / rank * A B. Policy A starts at B = 0, policy B at noise."""

    rank: int = 16
    alpha: float = 32.0  # (ours)
    targets: tuple[str, ...] = LORA_TARGETS  # (ours)
    noise_std: float = 0.002  # (ours) std of policy B's second matrix at the start

    def __post_init__(self):
        _number(self, "rank", 1, integer=True)
        _number(self, "alpha", 0)
        _number(self, "noise_std", 0)
        given = self.targets if isinstance(self.targets, (tuple, list)) else ()
        if not given or any(target not in LORA_TARGETS for target in given):
            _refuse(self, "targets", f"a non-empty choice of {', '.join(LORA_TARGETS)}")
        object.__setattr__(self, "targets", tuple(given))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@no_type_check
@dataclass(frozen=True)
class SamplingConfig:
    """How completions are drawn."""

    temperature: float = 0.6
    top_p: float = 0.95  # 1.0 = off
    top_k: int = 0  # 0 = off
    greedy: bool = False
    max_new_tokens: int = 8192  # (ours) the length cap of either stage, stop token included
    max_draft_prompt_tokens: int = 1024  # (ours)
    max_challenge_prompt_tokens: int = 2048  # (ours)
    overlong_prompt: str = "error"  # error | drop: a prompt beyond its cap; drops are counted
    rows_per_device: int = 64  # (ours) sequences decoded at once on a device

    def __post_init__(self):
        _number(self, "temperature", 1e-3)
        _number(self, "top_p", 0, 1)
        _number(self, "top_k", 0, integer=True)
        _boolean(self, "greedy")
        for name in ("max_new_tokens", "max_draft_prompt_tokens", "max_challenge_prompt_tokens"):
            _number(self, name, 1, integer=True)
        _one_of(self, "overlong_prompt", ("error", "drop"))
        _number(self, "rows_per_device", 1, integer=True)


@no_type_check
@dataclass(frozen=True)
class PromptConfig:
    """The words around a question. Templates are filled by name: {question}, {summary}."""

    system: str = ""
    draft: str = (
        "{question}\n\nReason step by step. After your reasoning, write a short summary of your"
        " approach, then give the final answer alone inside <answer> and </answer>."
    )
    challenge: str = (
        "{question}\n\nA rival attempted this problem. Their summary, which may be wrong and from"
        " which the final answer was removed:\n---\n{summary}\n---\n\nSolve the problem yourself:"
        " use what is sound, mend what is not. After your reasoning, write a short summary of your"
        " approach, then give the final answer alone inside <answer> and </answer>."
    )
    empty_summary: str = "(the rival gave no summary)"
    withheld: str = "[withheld]"  # stands where the answer stood in a summary
    max_summary_chars: int = 2000

    def __post_init__(self):
        _text(self, "system", "draft", "challenge", "empty_summary", "withheld")
        if "{question}" not in self.draft:
            _refuse(self, "draft", "a template with {question}")
        if "{question}" not in self.challenge or "{summary}" not in self.challenge:
            _refuse(self, "challenge", "a template with {question} and {summary}")
        _number(self, "max_summary_chars", 1, integer=True)


@no_type_check
@dataclass(frozen=True)
class MethodConfig:
    """A row of the paper's table: who plays, whom they meet, what is rewarded. Defaults: Agon."""

    policies: int = 2  # 1: one policy in both roles, or plain GRPO without the challenge
    challenge: bool = True  # False: vanilla GRPO, every policy drafts alone
    roles: str = "rotate"  # rotate | fixed
    rival: str = "own"  # own: challenge j reads draft j | shared: the group reads one draft
    reward: str = "adv"  # coop | adv | margin
    group_size: int = 8  # N; without the challenge a group is 2N drafts, the same budget
    format_weight: float = 0.5  # lambda
    tie_break: float = 0.0  # lambda': both right and shorter than the rival
    learn: bool = True  # False: the pair as it stands, no update

    def __post_init__(self):
        _one_of(self, "policies", (1, 2))
        _boolean(self, "challenge", "learn")
        _one_of(self, "roles", ("rotate", "fixed"))
        _one_of(self, "rival", ("own", "shared"))
        _one_of(self, "reward", ("coop", "adv", "margin"))
        _number(self, "group_size", 2, integer=True)
        _number(self, "format_weight", 0)
        _number(self, "tie_break", 0)
        if not self.challenge and self.policies == 2:
            _refuse(self, "policies", "1 when method.challenge is False")

    @property
    def drafts(self) -> int:
        """Drafts a problem: N beside N challenges, or 2N alone."""
        return self.group_size if self.challenge else 2 * self.group_size


@no_type_check
@dataclass(frozen=True)
class GrpoConfig:
    """The policy gradient. Equations in agon_jax/grpo.py."""

    clip_low: float = 0.2  # (ours) ratio >= 1 - clip_low
    clip_high: float = 0.2  # (ours) ratio <= 1 + clip_high
    kl_coef: float = 0.0  # (ours) weight of the k3 estimate of KL(policy || base)
    loss_norm: str = (
        "grpo"  # grpo: mean of row means | dapo: token mean | dr_grpo: constant divisor
    )
    advantage_std: str = "sample"  # sample (ddof 1) | population (ddof 0) | none
    std_epsilon: float = 1e-4  # added to the std
    mask_truncated: bool = False  # True: completions cut at the cap give no loss
    importance_cap: float = 0.0  # truncated importance weight trainer/sampler; 0 = off
    inner_steps: int = 1  # optimizer steps on one batch of rollouts
    logprob_chunk: int = 1024  # tokens whose logits exist at once

    def __post_init__(self):
        _number(self, "clip_low", 0, 1)
        _number(self, "clip_high", 0)
        _number(self, "kl_coef", 0)
        _one_of(self, "loss_norm", ("grpo", "dapo", "dr_grpo"))
        _one_of(self, "advantage_std", ("sample", "population", "none"))
        _number(self, "std_epsilon", 0)
        _boolean(self, "mask_truncated")
        _number(self, "importance_cap", 0)
        _number(self, "inner_steps", 1, integer=True)
        _number(self, "logprob_chunk", 1, integer=True)


@no_type_check
@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and linear decay to 0, one state and one clipping per policy."""

    learning_rate: float = 5e-5
    warmup_fraction: float = 0.1
    decay: str = "linear"  # linear | constant (after the warm-up)
    clip_norm: float = 1.0  # (ours) of each policy's gradient; 0 = off
    b1: float = 0.9  # (ours)
    b2: float = 0.999  # (ours)
    epsilon: float = 1e-8  # (ours)
    weight_decay: float = 0.0  # (ours)
    micro_batch: int = 0  # rows of one policy in one backward pass; 0 = all at once

    def __post_init__(self):
        _number(self, "learning_rate", 0)
        _number(self, "warmup_fraction", 0, 1)
        _one_of(self, "decay", ("linear", "constant"))
        _number(self, "clip_norm", 0)
        _number(self, "b1", 0, 1)
        _number(self, "b2", 0, 1)
        _number(self, "epsilon", 0)
        _number(self, "weight_decay", 0)
        _number(self, "micro_batch", 0, integer=True)


@no_type_check
@dataclass(frozen=True)
class DataConfig:
    """The problems."""

    source: str = "arithmetic"  # arithmetic | jsonl
    path: str = ""  # of the JSONL file
    heldout_path: str = ""  # a JSONL file of held-out problems; empty: split from `path` by seed
    question_field: str = "question"
    answer_field: str = "answer"
    id_field: str = ""  # empty: the line number
    train_size: int = 3000
    heldout_size: int = 300
    seed: int = 0  # of the split and of the training order

    def __post_init__(self):
        _one_of(self, "source", ("arithmetic", "jsonl"))
        _text(self, "path", "heldout_path", "question_field", "answer_field", "id_field")
        _number(self, "train_size", 1, integer=True)
        _number(self, "heldout_size", 0, integer=True)
        _number(self, "seed", 0, integer=True)
        if self.source == "jsonl" and not self.path:
            _refuse(self, "path", "a JSONL file when data.source is 'jsonl'")


@no_type_check
@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the update's mesh; data = 0 takes what the others leave."""

    data: int = 0
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        _number(self, "data", 0, integer=True)
        _number(self, "fsdp", 1, integer=True)
        _number(self, "tensor", 1, integer=True)


@no_type_check
@dataclass(frozen=True)
class VerifierConfig:
    """The pool of worker processes that judge answers."""

    workers: int = 0  # 0: one per core
    timeout_s: int = 10  # wall seconds an answer may take before its worker is replaced
    max_answer_chars: int = 1000

    def __post_init__(self):
        _number(self, "workers", 0, integer=True)
        _number(self, "timeout_s", 1, integer=True)
        _number(self, "max_answer_chars", 1, integer=True)


@no_type_check
@dataclass(frozen=True)
class RunConfig:
    """One training run, whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    prompts: PromptConfig = field(default_factory=PromptConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    steps: int = 0  # optimizer steps; 0: `epochs` passes over the training problems
    epochs: int = 1  # (ours)
    problems_per_step: int = 16  # (ours)
    eval_every: int = (
        0  # steps between evaluations on the held-out problems; 0: none while training
    )
    eval_problems: int = 0  # held-out problems of such an evaluation; 0: all
    save_every: int = 50  # steps between checkpoints; 0: none, not even at the end
    keep_checkpoints: int = 2
    seed: int = 0  # of adapters and sampling

    def __post_init__(self):
        for f in dataclasses.fields(self):
            if f.name in SETTINGS and not isinstance(getattr(self, f.name), SETTINGS[f.name]):
                _refuse(self, f.name, f"a {SETTINGS[f.name].__name__}")
        for name in ("steps", "eval_every", "eval_problems", "save_every", "seed"):
            _number(self, name, 0, integer=True)
        for name in ("epochs", "problems_per_step", "keep_checkpoints"):
            _number(self, name, 1, integer=True)
        if self.problems_per_step > self.data.train_size:
            _refuse(self, "problems_per_step", f"at most data.train_size = {self.data.train_size}")

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run; a last batch that is not full is not made."""
        return self.steps or self.epochs * (self.data.train_size // self.problems_per_step)


SETTINGS = {
    "model": ModelConfig,
    "lora": LoraConfig,
    "sampling": SamplingConfig,
    "prompts": PromptConfig,
    "method": MethodConfig,
    "grpo": GrpoConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "mesh": MeshConfig,
    "verifier": VerifierConfig,
    "run": RunConfig,
}
