import argparse
import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from agon_jax.config import SETTINGS, LoraConfig, MethodConfig, RunConfig, SettingError
from experiments import settings
from experiments.settings import (
    CONFIGS,
    MAY_CHANGE,
    add_setting_arguments,
    as_flat,
    claim_workdir,
    from_flat,
    load_run,
    read_workdir,
    refusing,
)

FILES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.gin"))
AGON = ("models/embedded.gin", "tasks/arithmetic.gin", "methods/agon.gin")


def gin_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.gin"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refused(files, bindings=()) -> str:
    with pytest.raises(SettingError) as caught:
        load_run(files, bindings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_and_then_set_override_in_order(tmp_path):
    path = gin_file(
        tmp_path, "method.reward = 'coop'\nlora:\n  rank = 4\nlora.targets = ('q_proj',)\n"
    )
    run = load_run([path])
    assert (run.method, run.lora) == (
        MethodConfig(reward="coop"),
        LoraConfig(rank=4, targets=("q_proj",)),
    )
    assert load_run([path], ["method.reward=margin"]).method.reward == "margin"
    assert load_run([path, "methods/agon.gin"]).method.reward == "adv"
    assert load_run([]) == RunConfig()  # nothing of an earlier load is left


def test_a_run_is_made_of_the_plain_dataclasses(tmp_path):
    run = load_run(AGON)
    assert type(run) is RunConfig and type(run.method) is MethodConfig
    assert pickle.loads(pickle.dumps(run)) == run


def test_an_include_is_found_from_anywhere_and_undoes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = gin_file(tmp_path, "include 'base.gin'\nlora.rank = 3\n")
    assert load_run([path, "methods/agon.gin"]).lora.rank == 3  # agon.gin includes base.gin again
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "inner.gin").write_text("lora.rank = 5\n")
    (tmp_path / "more" / "outer.gin").write_text("include 'inner.gin'\n")
    assert load_run(["more/outer.gin"]).lora.rank == 5  # beside the file that includes it


@pytest.mark.parametrize(
    ("binding", "value"),
    [
        ("method.reward=coop", "coop"),
        ("method.reward='coop'", "coop"),
        ("optimizer.learning_rate=1e-4", 1e-4),
        ("method.learn=False", False),
        ("run.steps = 40", 40),
        ("data.path=a b=c.jsonl", "a b=c.jsonl"),
        ("data.path=2024", "2024"),
        ("prompts.system=", ""),
        ("prompts.withheld=[x]", "[x]"),
        ("lora.targets=q_proj,v_proj", ("q_proj", "v_proj")),
        ("lora.targets=('q_proj',)", ("q_proj",)),
        ("lora.targets=q_proj", ("q_proj",)),
    ],
)
def test_values_as_a_shell_passes_them(binding, value):
    name = binding.partition("=")[0].strip()
    found = as_flat(load_run([], [binding]))[name]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("binding", "parts"),
    [
        ("metod.reward=coop", ["metod.reward = coop", "method.reward", "sections are model, lora"]),
        ("method.rewrd=coop", ["method.rewrd = coop", "did you mean method.reward", "group_size"]),
        ("steps=40", ["steps = 40", "did you mean run.steps?"]),
        ("optimizer.rank=4", ["optimizer.rank = 4", "did you mean lora.rank?", "learning_rate"]),
        ("run.method=agon", ["run.method = agon", "run has steps, epochs"]),
        ("method.reward=best", ["method.reward = 'best'", "one of 'coop', 'adv', 'margin'"]),
        ("method.reward=2", ["method.reward = '2'", "'coop'"]),
        ("method.group_size=1", ["method.group_size = 1", "whole number >= 2"]),
        ("method.group_size=8.0", ["method.group_size = 8.0", "whole number"]),
        ("method.policies=True", ["method.policies = True", "one of 1, 2"]),
        ("method.learn=true", ["method.learn = 'true'", "True or False"]),
        ("lora.targets=5", ["lora.targets = 5", "q_proj"]),
        ("lora.targets=nose", ["lora.targets", "'nose'", "q_proj"]),
        ("data.source=jsonl", ["data.path = ''", "a JSONL file"]),
        ("method.reward", ["--set method.reward", "NAME=VALUE"]),
        ("=3", [" = 3", "no such setting"]),
        ("a/method.reward=coop", ["a/method.reward = coop", "did you mean method.reward?"]),
    ],
)
def test_a_wrong_set_is_refused_with_name_value_and_what_is_allowed(binding, parts):
    message = refused([], [binding])
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("\nmethod.rewrd = 'adv'\n", ["method.rewrd = 'adv'", "method.reward", "line 2"]),
        ("method:\n  rewrd = 'adv'\n", ["method.rewrd = 'adv'", "method.reward", "line 2"]),
        ("method.reward = 'best'\n", ["method.reward = 'best'", "'coop'", "mine.gin, line 1"]),
        ("method.reward = adv\n", ["line 1", "method.reward = adv", "quotes"]),
        ("steps = 3\n", ["steps = 3", "run.steps", "line 1"]),
        ("eval/method.reward = 'adv'\n", ["eval/method.reward", "no such setting"]),
        ("method.reward = %BEST\n", ["%BEST", "line 1"]),
        ("method.reward = @lora()\n", ["@lora", "line 1"]),
        ("lora.targets = [@method]\n", ["@method", "line 1"]),
        ("import os\n", ["imports nothing", "line 1"]),
        ("include 'bas.gin'\n", ["bas.gin: no such file", "did you mean base.gin"]),
        ("lora.targets = ('q_proj',\n", ["mine.gin", "line"]),
        ("method.reward\n", ["mine.gin, line 1", "method.reward"]),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path, text, parts):
    message = refused([gin_file(tmp_path, text)])
    assert all(part in message for part in parts), message


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    assert "did you mean methods/agon.gin" in refused(["methods/agn.gin"])
    path = tmp_path / "weights.gin"
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refused([str(path)])


@pytest.mark.parametrize("file", FILES)
def test_every_config_loads_and_its_head_tells_command_time_and_figure(file):
    needed = ["data.path=x.jsonl"] if file == "tasks/jsonl.gin" else []
    load_run([file], needed)
    head = (CONFIGS / file).read_text().partition("\n\n")[0].lower()
    assert all(word in head for word in ("command", "time", "figure"))


def test_base_gin_is_the_defaults():
    assert load_run(["base.gin"]) == RunConfig()


def test_a_method_file_leaves_nothing_of_another_method():
    methods = {f: load_run([f]).method for f in FILES if f.startswith("methods/")}
    assert len(set(methods.values())) == len(methods) == 10
    for first in methods:
        for last, method in methods.items():
            assert load_run([first, last]).method == method


def test_flat_settings_survive_json_and_gin(tmp_path):
    run = load_run(AGON, ['prompts.system=say "it\'s"\n\\done é', "lora.targets=q_proj"])
    assert from_flat(json.loads(json.dumps(as_flat(run)))) == run
    claim_workdir(tmp_path / "run", run)
    assert load_run([str(tmp_path / "run" / "config.gin")]) == run == read_workdir(tmp_path / "run")


def test_may_change_names_settings_that_exist():
    assert set(MAY_CHANGE) <= set(as_flat(RunConfig()))
    assert set(settings.SECTIONS) == set(SETTINGS)


def test_a_workdir_goes_on_with_the_same_settings(tmp_path):
    run = load_run(AGON)
    assert claim_workdir(tmp_path / "deep" / "run", run) is False
    assert claim_workdir(tmp_path / "deep" / "run", run) is True
    longer = dataclasses.replace(run, steps=run.total_steps + 10, eval_every=7)
    assert claim_workdir(tmp_path / "deep" / "run", longer) is True
    assert read_workdir(tmp_path / "deep" / "run") == longer


def test_a_workdir_with_other_settings_is_refused_and_kept(tmp_path):
    claim_workdir(tmp_path, load_run(AGON))
    with pytest.raises(SettingError) as caught:
        claim_workdir(
            tmp_path, load_run(AGON, ["method.reward=coop", "lora.rank=4", "run.steps=9"])
        )
    assert "lora.rank 16 -> 4; method.reward 'adv' -> 'coop'. " in str(caught.value)
    assert "run.steps" in str(caught.value).partition("these may change")[2]
    assert read_workdir(tmp_path) == load_run(AGON)


def test_a_workdir_that_is_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(SettingError, match="holds other files, and no run"):
        claim_workdir(tmp_path, RunConfig())
    with pytest.raises(SettingError, match="no run"):
        claim_workdir(tmp_path / "thesis.tex", RunConfig())
    with pytest.raises(SettingError, match=r"settings\.json cannot be read"):
        read_workdir(tmp_path)
    (tmp_path / "settings.json").write_text('{"method.wisdom": 3}')
    with pytest.raises(SettingError, match=r"method\.wisdom"):
        read_workdir(tmp_path)


def test_config_may_be_given_twice_and_replaces_the_default():
    parser = argparse.ArgumentParser()
    add_setting_arguments(parser, default=["demo.gin"])
    assert parser.parse_args([]).config == ["demo.gin"]
    given = parser.parse_args(
        ["--config", "a", "b", "--set", "x=1", "--config", "c", "--set", "y=2"]
    )
    assert (given.config, given.set) == (["a", "b", "c"], ["x=1", "y=2"])


def test_a_refused_setting_is_one_line_and_exit_code_2(capsys):
    @refusing
    def main() -> int:
        load_run([], ["method.reward=best"])
        return 0

    assert main() == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("error: method.reward = 'best': must be one of")


def test_the_edge_loads_no_jax():
    code = "import sys, experiments.settings; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CONFIGS.parents[1])
