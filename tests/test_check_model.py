import shutil
from pathlib import Path

import numpy as np
import pytest

from agon_jax.models import convert
from experiments import check_model

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture
def directory(tmp_path) -> Path:
    """A copy of the tied golden, for a test to spoil."""
    shutil.copytree(GOLDENS / "tied", tmp_path / "tied")
    return tmp_path / "tied"


def check(directory: Path, golden: Path | None = None, *arguments: str) -> int:
    golden = golden or directory / "golden.npz"
    return check_model.main([str(directory), "--golden", str(golden), *arguments])


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_sound_checkpoint_agrees_in_every_part(name, capsys):
    assert check(GOLDENS / name, None, "--tolerance", "1e-4") == 0
    out = capsys.readouterr().out
    layers = {"tied": 3, "untied": 2}[name]
    assert f"{layers} layers" in out
    assert out.count(" ok ") == 4 + layers + 1
    assert "16/16" in out and "48/48" in out
    assert "all parts agree" in out


def test_a_wrong_layer_is_the_first_that_is_off(directory, capsys):
    config, params = convert.load(directory, "float32")
    params["layers"]["k_norm"]["scale"][1] *= 1.5
    (directory / "golden.npz").rename(directory.parent / "golden.npz")
    convert.save(directory, config, params)
    assert check(directory, directory.parent / "golden.npz") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("off: logits, right padding, logits, left padding, greedy")
    assert "input of layer 1" not in last
    assert "input of layer 2" in last
    # A tolerance wide enough for that is wide enough for the whole.
    assert check(directory, directory.parent / "golden.npz", "--tolerance", "1000") == 0


def test_what_the_golden_does_not_hold_is_not_compared(directory, capsys):
    with np.load(directory / "golden.npz") as golden:
        arrays = dict(golden)
    np.savez(directory / "part.npz", **{n: arrays[n] for n in ("lids", "lmask", "lpos", "llogits")})
    assert check(directory, directory / "part.npz") == 0
    assert capsys.readouterr().out.count(" ok ") == 1


@pytest.mark.parametrize(
    ("remove", "replace", "message"),
    [
        (("gen_ids",), {}, "has gen_logits, but not the gen_ids"),
        (("gen_prompt", "gen_logits"), {}, "has hidden_0, but not the gen_prompt"),
        ((), {"ids": np.full((3, 21), 64)}, "ids (3, 21) is not of this model"),
        ((), {"hidden_4": np.zeros((1, 11, 16))}, "hidden_4 (1, 11, 16) is not of this model"),
        ((), {"logits": np.zeros((3, 21, 9))}, "logits (3, 21, 9) is not of this model"),
        ((), {"llogits": np.zeros((3, 20, 64))}, "llogits (3, 20, 64)"),
    ],
)
def test_a_golden_that_does_not_fit_is_refused(directory, capsys, remove, replace, message):
    with np.load(directory / "golden.npz") as golden:
        arrays = {name: golden[name] for name in golden if name not in remove}
    np.savez(directory / "other.npz", **(arrays | replace))
    assert check(directory, directory / "other.npz") == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_read_is_one_line(directory, capsys):
    (directory / "other.npz").write_text("no zip")
    assert check(directory, directory / "other.npz") == 2
    assert check(directory, directory / "none.npz") == 2
    assert check(directory / "nowhere", directory / "golden.npz") == 2
    np.savez(directory / "nothing.npz", other=np.zeros(3))
    assert check(directory, directory / "nothing.npz") == 2
    errors = capsys.readouterr().err.splitlines()
    wanted = ("other.npz: is not a whole .npz", "none.npz: is missing", "config.json", "none of")
    assert len(errors) == len(wanted)
    for error, part in zip(errors, wanted, strict=True):
        assert error.startswith("error: ") and part in error


def test_a_greedy_token_may_differ_only_where_the_reference_was_in_doubt():
    expected = np.array([[[0.0, 1.0, 0.9999], [5.0, 1.0, 0.0]]])
    greedy = np.array([[1, 0]])
    ours = expected.copy()
    ours[0, 0] = [0.0, 0.9998, 0.9999]
    part = check_model.measure("part", ours, expected, 1e-3, greedy)
    assert part.agrees and part.tokens == "1/2"
    ours[0, 1] = [0.0, 0.0, np.nan]
    assert not check_model.measure("part", ours, expected, 1e-3, greedy).agrees


def test_the_reference_is_transformers_where_torch_is_installed(directory, tmp_path, capsys):
    pytest.importorskip("torch")
    written = tmp_path / "written.npz"
    assert check_model.main([str(directory), "--write", str(written)]) == 0
    assert check(directory, written) == 0
    assert "all parts agree" in capsys.readouterr().out


def test_without_torch_the_message_says_what_to_do(directory, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert check_model.main([str(directory)]) == 2
    assert "needs torch: pip install torch, or give a golden" in capsys.readouterr().err
