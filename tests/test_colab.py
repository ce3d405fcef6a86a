"""The notebooks: each is the script beside it, and the script runs."""

import runpy
from pathlib import Path

import jupytext
import pytest

COLAB = Path(__file__).parent.parent / "colab"
SCRIPTS = sorted(COLAB.glob("*.py"))
SMALL = """["run.steps=2", "run.eval_every=1", "run.problems_per_step=2", "method.group_size=2",
    "run.eval_problems=2", "data.train_size=8", "data.heldout_size=3", "lora.rank=2",
    "sampling.max_new_tokens=12", "sampling.rows_per_device=4", "verifier.workers=1"]"""


def cells(path: Path) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


def test_every_notebook_has_its_script():
    assert {path.stem for path in SCRIPTS} == {path.stem for path in COLAB.glob("*.ipynb")}
    assert SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_is_its_script(script):
    assert cells(script.with_suffix(".ipynb")) == cells(script)


@pytest.mark.slow
def test_the_quickstart_trains_and_shows_an_exchange(tmp_path, monkeypatch, capsys):
    source = (COLAB / "quickstart.py").read_text()
    settings = source.partition("SETTINGS = ")[2].partition("\n")[0]
    script = tmp_path / "quickstart.py"
    script.write_text(source.replace(settings, SMALL))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))
    shown = capsys.readouterr().out
    assert "3 held-out problems" in shown
    assert "step   0: A " in shown and "step   2: A " in shown
    assert "Summary the rival read" in shown
