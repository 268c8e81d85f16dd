"""The command line: its help, its commands by every name, and what it says without an extra."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys

import pytest

import cute_attention
from cute_attention import cli

# What the extras bring, and nothing else needs.
EXTRAS = ("hypothesis", "matplotlib", "pycute", "pynvml", "rich", "tensor_layouts", "tqdm")

# Prints, for each list of words, the exit code and the output of `python -m` with those words.
WITHOUT_EXTRAS = """
import contextlib, io, json, runpy, sys

commands, missing = map(json.loads, sys.argv[1:])
sys.modules.update(dict.fromkeys(missing))  # importing one raises ModuleNotFoundError
for words in commands:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        sys.argv = words
        try:
            runpy.run_module(words[0], run_name="__main__")
        except SystemExit as exit:
            code = exit.code
    print(json.dumps([code, output.getvalue()]))
"""


def subcommands(name: str) -> list[str]:
    """The subcommands of `bench` or `layouts`: [] where the extra is not installed."""
    try:
        return list(importlib.import_module(f"cute_attention.{name}.commands").RUN)
    except ModuleNotFoundError:
        return []


def run_without(missing: list[str], commands: list[list[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each command, where the missing modules cannot be imported."""
    arguments = [json.dumps(commands), json.dumps(missing)]
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_without_an_argument_it_prints_help(capsys):
    assert cli.main([]) == 0
    help_ = capsys.readouterr().out
    assert help_.startswith("usage: cute-attention [-h]")
    for name, command in cli.COMMANDS.items():
        assert f"    {name:<9} {command.summary}\n" in help_
    for command in ("bench", "layouts"):
        assert cli.main([command]) == 0
        assert capsys.readouterr().out.startswith(f"usage: cute-attention {command} [-h]")


def test_the_console_script_is_this_command_line():
    scripts = importlib.metadata.distribution("cute-attention").entry_points
    (script,) = scripts.select(group="console_scripts")
    assert (script.name, script.load()) == ("cute-attention", cli.main)


def test_version_and_mistakes(capsys):
    for arguments, code in ((["--version"], 0), (["benhc"], 2)):
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        assert exit_.value.code == code
    output = capsys.readouterr()
    assert output.out == f"cute-attention {cute_attention.__version__}\n"
    assert "'benhc'" in output.err and "'layouts'" in output.err


def test_help_of_everything_needs_no_extra():
    whole = ["cute_attention"]
    names = [[*whole], [*whole, "info"], ["cute_attention.bench"], ["cute_attention.layouts"]]
    names += [[*whole, "tune"]]
    for name in ("bench", "layouts"):
        names += [[*whole, name], *([*whole, name, each] for each in subcommands(name))]
    results = run_without(list(EXTRAS), [[*words, "--help"] for words in names])
    assert len(results) == len(names) >= 6
    for words, (code, output) in zip(names, results, strict=True):
        assert (code, words) == (0, words), output
        assert output.startswith(f"usage: python -m {' '.join(words)} "), output


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["bench", "contenders"], "rich"),
        (["bench", "compare", "a.json", "b.json"], "matplotlib"),
        (["bench", "speed"], "pynvml"),
        (["layouts", "check"], "matplotlib"),
        (["layouts", "check"], "numpy"),
        (["layouts", "check"], "pycute"),
    ],
)
def test_a_missing_extra_says_what_installs_it(words, missing):
    dotted = [f"cute_attention.{words[0]}", *words[1:]]
    results = run_without([missing], [["cute_attention", *words], dotted])
    for name, (code, output) in zip((f" {words[0]}", f".{words[0]}"), results, strict=True):
        assert code == 1
        assert f"python -m cute_attention{name}: " in output
        assert missing in output
        assert f'pip install "cute-attention[{words[0]}]"' in output
        assert ("nvidia-cutlass==4.2.0.0" in output) == (words[0] == "layouts")


def test_tune_says_which_extra_it_needs():
    for missing in ("rich", "matplotlib", "pynvml"):
        ((code, output),) = run_without([missing], [["cute_attention", "tune", "--arch", "sm80"]])
        assert code == 1
        assert "python -m cute_attention tune: " in output and missing in output
        assert 'pip install "cute-attention[bench]"' in output


@pytest.mark.parametrize("name", ["bench", "layouts"])
def test_each_subcommand_has_options_and_a_function(name):
    parser = importlib.import_module(f"cute_attention.cli.{name}").make_parser()
    known = [action.choices for action in parser._actions if action.dest == "command"]
    pytest.importorskip("rich" if name == "bench" else "pycute")
    assert [sorted(names) for names in known] == [sorted(subcommands(name))]


def test_info_reports_what_is_installed(capsys):
    assert cli.main(["info"]) == 0
    report = capsys.readouterr().out
    assert report.startswith(f"cute_attention {cute_attention.__version__}, ")
    for heading in ("Libraries", "Devices", "Forward on cpu", "Backward on cpu"):
        assert f"\n\n{heading}\n" in report
