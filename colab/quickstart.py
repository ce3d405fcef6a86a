# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Two rivals learn to add
#
# Agon trains two policies on the same problems. One drafts; the other reads the draft's summary,
# with the answer withheld, and solves the problem too. A right answer is worth more where the rival
# was wrong. Here both are adapters on a tiny Qwen3 that adds numbers and slips: two CPU cores need
# about five minutes for the whole notebook.
#
# On Colab, bring a checkout of this repository, make it the working folder (`%cd agon_jax`) and
# install it; on a GPU runtime write `.[cuda]`, on a TPU `.[tpu]`.

# %%
# %pip install --quiet --editable .

# %% [markdown]
# ## Settings
#
# A run is a model, a task and a method, each a gin file, and settings that win over the files.
# `agon_jax/config.py` has all of them; a wrong name or value is refused. With other settings, take
# another folder.

# %%
from pathlib import Path

from rich.console import Console

from agon_jax.metrics import read_metrics
from agon_jax.trainer import train
from experiments.evaluate import stage_table
from experiments.settings import claim_workdir, load_run
from experiments.table import as_exchange

WORKDIR = Path("runs/quickstart")
SETTINGS = ["run.steps=24", "run.eval_every=8", "run.eval_problems=100", "run.seed=0"]

run = load_run(["demo.gin", "methods/agon.gin"], SETTINGS)

# %% [markdown]
# ## Train
#
# Drafts, summaries, challenges, verdicts, rewards, one update of both policies; then roles rotate.
# If the kernel stops, run the notebook again: it goes on from the newest checkpoint.

# %%
claim_workdir(WORKDIR, run)
report = train(run, WORKDIR)

# %% [markdown]
# ## What came of it
#
# Each policy alone, and the cascade both ways, on problems that training never saw. The intervals
# are exact; repairs are right answers to what the draft had wrong, harms the reverse.

# %%
assert report is not None, "data.heldout_size = 0: nothing was held out"
Console(width=132).print(stage_table(report.numbers()))

# %% [markdown]
# Held-out pass@1 as training went, for the same problems and sampling keys each time:

# %%
for row in read_metrics(WORKDIR, "eval"):
    rates = ", ".join(f"{name} {stage['pass@1']:.0%}" for name, stage in row["stages"].items())
    print(f"step {row['step']:3d}: {rates}")

# %% [markdown]
# And one problem as the pair met it:

# %%
print(as_exchange(report))
