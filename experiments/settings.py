"""The gin edge: a run's settings from gin files and `--set`, and a workdir's claim on them.

Files hold `section.setting = value` and `include 'FILE.gin'`, nothing else: gin would take a line
with a scope or a misspelt macro and then ignore it, so those are refused here. The values are
checked by the dataclasses of agon_jax/config.py, which know no gin.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import json
import os
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

from agon_jax.config import SETTINGS, RunConfig, SettingError
from agon_jax.data.jsonl import DataError

CONFIGS = Path(__file__).parent / "configs"
SECTIONS: dict[str, Callable[..., Any]] = {
    section: gin.external_configurable(cls, name=section) for section, cls in SETTINGS.items()
}
DEFAULTS = {  # section -> setting -> default; the sections of `run` are assembled and never set
    section: {f.name: f.default for f in dataclasses.fields(cls) if f.name not in SETTINGS}
    for section, cls in SETTINGS.items()
}
MAY_CHANGE = (  # of a run that is resumed: its length, its rhythm, and how the machine is used
    "run.steps",
    "run.epochs",
    "run.eval_every",
    "run.eval_problems",
    "run.save_every",
    "run.keep_checkpoints",
    *(f"mesh.{setting}" for setting in DEFAULTS["mesh"]),
    "model.remat",
    "sampling.rows_per_device",
    "optimizer.micro_batch",
    "grpo.logprob_chunk",
    "verifier.workers",
)


def add_setting_arguments(
    parser: argparse.ArgumentParser,
    default: Sequence[str] | None = None,
    config: argparse._ArgumentGroup | None = None,
) -> None:
    """`--config FILE ...` and `--set NAME=VALUE ...`, for `load_run`.

    Without a default --config is required, and with one it replaces it; `config` is a group of
    options of which it is one.
    """
    (config or parser).add_argument(
        "--config",
        nargs="+",
        action=_ReplaceThenExtend,
        metavar="FILE",
        required=default is None and config is None,
        default=default,
        help="gin files, read in this order: one of models/, of tasks/ and of methods/, or your"
        " own; looked for from here and in experiments/configs"
        + (f" (default: {' '.join(default)})" if default else ""),
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        metavar="NAME=VALUE",
        default=[],
        help="settings that win over the files, such as method.reward=coop run.steps=40;"
        " agon_jax/config.py lists them all",
    )


class _ReplaceThenExtend(argparse.Action):
    """A repeated option adds to what was given, but not to the default."""

    def __call__(self, parser, namespace, values, option_string=None):
        given = getattr(namespace, self.dest)
        kept = [] if given is None or given is self.default else given
        setattr(namespace, self.dest, [*kept, *(values or ())])


def load_run(files: Sequence[str], settings: Sequence[str] = ()) -> RunConfig:
    """The run that gin `files`, in order, and then `settings` ("name=value") describe.

    Raises SettingError, naming the setting, its value, what is allowed and where it stands.
    """
    gin.clear_config()
    origins: dict[str, str] = {}
    read: set[Path] = set()
    for file in files:
        _bind_file(_find(file, Path.cwd()), origins, read)
    for text in settings:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals:
            raise SettingError(f"--set {text}: must be NAME=VALUE, such as method.reward=coop")
        _check_name(name, value)
        _bind(name, _as_value(name, value), origins, "--set")
    try:
        sections = {section: SECTIONS[section]() for section in SETTINGS if section != "run"}
        return SECTIONS["run"](**sections)
    except SettingError as error:
        reason = _first_line(error)
        origin = origins.get(reason.partition(" = ")[0])
        raise SettingError(f"{reason} ({origin})" if origin else reason) from None


def _bind_file(path: Path, origins: dict[str, str], read: set[Path]) -> None:
    """Binds a file's settings; one that was read is not read again, so includes never undo."""
    if path in read:
        return
    read.add(path)
    for statement in _statements(path):
        where = f"{path}, line {statement.location.line_num}"
        if isinstance(statement, config_parser.IncludeStatement):
            _bind_file(_find(statement.filename, path.parent), origins, read)
        elif isinstance(statement, config_parser.BindingStatement):
            scope, section, setting, value, _ = statement
            name = f"{section}.{setting}" if setting else section
            try:
                _check_name(f"{scope}/{name}" if scope else name, repr(value))
            except SettingError as error:
                raise SettingError(f"{error} ({where})") from None
            _bind(name, value, origins, where)
        elif isinstance(statement, config_parser.ImportStatement):
            raise SettingError(f"{where}: a settings file imports nothing")


def _statements(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8") as file:
            parser: Any = config_parser.ConfigParser(file, _Literals())
            try:
                yield from parser
            except _NoLiteral as error:
                line = parser.current_token.start[0]
                raise SettingError(f"{path}, line {line}: {_first_line(error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path}: cannot be read: {error}") from None
    except SyntaxError as error:
        raise SettingError(
            f"{path}, line {error.lineno}: {(error.text or '').strip()!r} is neither"
            " `section.setting = value`, with text in quotes, nor `include 'FILE'`"
        ) from None
    except tokenize.TokenError as error:
        reason, (line, _) = error.args
        raise SettingError(f"{path}, line {line}: {reason}") from None


class _NoLiteral(ValueError):
    pass


class _Literals(config_parser.ParserDelegate):
    """Refuses gin's references and macros."""

    def configurable_reference(self, scoped_configurable_name, evaluate):
        raise _NoLiteral(f"@{scoped_configurable_name} is a reference, and no value")

    def macro(self, macro_name):
        raise _NoLiteral(f"%{macro_name} is a macro, and no value")


def _first_line(error: Exception) -> str:
    """The message as it was raised: gin adds lines of its own on the way."""
    return str(error).partition("\n")[0]


def _bind(name: str, value: Any, origins: dict[str, str], where: str) -> None:
    gin.bind_parameter(name, value)
    origins[name] = where


def _find(file: str, beside: Path) -> Path:
    for folder in (beside, CONFIGS):
        if (folder / file).is_file():
            return (folder / file).resolve()
    known = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.gin"))
    raise SettingError(
        f"{file}: no such file in {beside} or in experiments/configs{_closest(file, known)};"
        f" there are {', '.join(known)}"
    )


def _check_name(name: str, value: str) -> None:
    section, _, setting = name.partition(".")
    if setting in DEFAULTS.get(section, ()):
        return
    names = [f"{s}.{known}" for s, settings in DEFAULTS.items() for known in settings]
    elsewhere = [each for each in names if each.partition(".")[2] == (setting or section)]
    if section in DEFAULTS and setting:
        allowed = f"{section} has {', '.join(DEFAULTS[section])}"
    else:
        allowed = f"sections are {', '.join(DEFAULTS)}"
    hint = f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else _closest(name, names)
    raise SettingError(f"{name} = {value}: no such setting{hint}; {allowed}")


def _closest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _as_value(name: str, text: str) -> Any:
    """A value typed in a shell: quotes may be left out, commas make a tuple where one is due."""
    section, _, setting = name.partition(".")
    default = DEFAULTS[section][setting]
    text = text.strip()
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = tuple(text.split(",")) if isinstance(default, tuple) else text
    if isinstance(default, str) and not isinstance(value, str):
        return text
    return (value,) if isinstance(default, tuple) and isinstance(value, str) else value


def as_flat(run: RunConfig) -> dict[str, Any]:
    """Every setting by its full name."""
    return {
        f"{section}.{setting}": getattr(run if section == "run" else getattr(run, section), setting)
        for section, settings in DEFAULTS.items()
        for setting in settings
    }


def from_flat(flat: dict[str, Any]) -> RunConfig:
    """The run that `as_flat` gave; a setting that is not in it has its default."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in SETTINGS}
    for name, value in flat.items():
        _check_name(name, repr(value))
        section, _, setting = name.partition(".")
        sections[section][setting] = value
    assembled = {name: SETTINGS[name](**sections[name]) for name in SETTINGS if name != "run"}
    return RunConfig(**assembled, **sections["run"])


def claim_workdir(workdir: Path, run: RunConfig) -> bool:
    """Makes `workdir` the run's own: writes settings.json and config.gin there.

    True when it already held this run, which then goes on. Raises SettingError when it holds a run
    whose settings differ beyond MAY_CHANGE, or files that are no run.
    """
    record = workdir / "settings.json"
    resumed = record.exists()
    if resumed:
        _refuse_other_settings(workdir, read_workdir(workdir), run)
    elif workdir.exists() and (not workdir.is_dir() or _holds_files(workdir)):
        raise SettingError(f"--workdir {workdir}: holds other files, and no run; name a new folder")
    workdir.mkdir(parents=True, exist_ok=True)
    _write(record, json.dumps(as_flat(run), indent=2) + "\n")
    lines = [f"{name} = {value!r}\n" for name, value in as_flat(run).items()]
    _write(workdir / "config.gin", "# Every setting of this run.\n" + "".join(lines))
    return resumed


def read_workdir(workdir: Path) -> RunConfig:
    """The settings of the run that `workdir` holds."""
    try:
        return from_flat(json.loads((workdir / "settings.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise SettingError(
            f"--workdir {workdir}: its settings.json cannot be read, so it holds no run of this"
            f" version: {error}"
        ) from None


def load_workdir(workdir: Path, settings: Sequence[str]) -> RunConfig:
    """The settings of the run that `workdir` holds, with some set otherwise."""
    read_workdir(workdir)  # says so where there is none
    return load_run([str((workdir / "config.gin").resolve())], settings)


def _refuse_other_settings(workdir: Path, old_run: RunConfig, run: RunConfig) -> None:
    old, new = as_flat(old_run), as_flat(run)
    differing = [
        f"{name} {old[name]!r} -> {new[name]!r}"
        for name in new
        if old[name] != new[name] and name not in MAY_CHANGE
    ]
    if differing:
        raise SettingError(
            f"--workdir {workdir}: holds a run with other settings: {'; '.join(differing)}. Name"
            f" another folder, or keep them; these may change: {', '.join(MAY_CHANGE)}"
        )


def _holds_files(workdir: Path) -> bool:
    return any(not path.name.startswith(".") for path in workdir.iterdir())


def _write(path: Path, text: str) -> None:
    """All or nothing: a run that is killed meanwhile leaves the old file."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def refusing(main: Callable[..., int]) -> Callable[..., int]:
    """A wrong setting or data file ends `main` with one line and exit code 2, not a traceback."""

    @functools.wraps(main)
    def wrapped(*args: Any, **kwargs: Any) -> int:
        try:
            return main(*args, **kwargs)
        except (SettingError, DataError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return wrapped
