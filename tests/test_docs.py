"""The documents say what is so: commands, flags, files, links and the Python they show."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# What set-up makes; it need not exist before.
MADE_BY_SETUP = {".venv", "runs"}


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    """Fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)


def commands(document: str) -> list[list[str]]:
    """Commands of bash blocks as words: lines joined at backslashes, split at && and &."""
    found = []
    for block in blocks(document, "bash"):
        lexer = shlex.shlex(block.replace("\\\n", " "), posix=True, punctuation_chars="&;|\n")
        lexer.whitespace = " \t"
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        for token in lexer:
            if set(token) <= set("&;|\n"):
                found.append(words)
                words = []
            else:
                words.append(token)
        found.append(words)
    return [words for words in found if words]


def scripts(document: str) -> list[tuple[str, list[str]]]:
    """(script, flags) of every command that runs a script of experiments/."""
    found = []
    for words in commands(document):
        for position, word in enumerate(words):
            if word.startswith("experiments/") and word.endswith(".py"):
                flags = [w.split("=")[0] for w in words[position + 1 :] if w.startswith("--")]
                found.append((word, flags))
    return found


def missing_files(document: str) -> list[str]:
    """Paths in commands and `code` that look like files of the repository and are not there."""
    named = set(re.findall(r"`([\w.-]+(?:/[\w.*-]+)+/?|[\w-]+\.(?:py|md|toml))`", document))
    named |= {
        word
        for words in commands(document)
        for word in words
        if re.fullmatch(r"(experiments|tests|\.ci)/[\w./-]+", word)
    }
    known_elsewhere = {path.name for path in ROOT.glob("[a-z]*/**/*.py")}
    return sorted(
        path
        for path in named
        if path.split("/")[0] not in MADE_BY_SETUP | {".."}
        and not list(ROOT.glob(path.rstrip("/")))
        and path not in known_elsewhere
    )


def anchors(document: str) -> set[str]:
    """Anchors that GitHub makes of headings."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", document, flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: str, own_name: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = ROOT / (path or own_name)
        if not file.exists() or (
            anchor and anchor not in anchors(file.read_text(encoding="utf-8"))
        ):
            broken.append(target)
    return broken


# One process for all scripts: each would import jax and the library anew.
ALL_HELP = """
import contextlib, io, json, runpy, sys

texts = {}
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            assert not stop.code, (script, stop.code)
        else:
            raise AssertionError(f"{script} --help runs on")
    texts[script] = shown.getvalue()
print(json.dumps(texts))
"""


@pytest.fixture(scope="module")
def flags_of() -> dict[str, set[str]]:
    """The flags that the documents' scripts have, by their own --help."""
    named = sorted({script for name in DOCUMENTS for script, _ in scripts(text(name))})
    environment = os.environ | {"COLUMNS": "400", "JAX_PLATFORMS": "cpu", "NO_COLOR": "1"}
    shown = subprocess.run(
        [sys.executable, "-c", ALL_HELP, *named],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT / "experiments")},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    found = {}
    for script, told in json.loads(shown.stdout.splitlines()[-1]).items():
        flags = set(re.findall(r"--[a-z][\w.-]*", told))
        # Every switch comes with its --no- form.
        found[script] = {f for f in flags if f.replace("--no-", "--") not in flags - {f}}
    return found


def test_readme_has_exactly_two_marked_commands_and_they_install_from_nothing():
    marked = re.findall(
        r"^<!-- command: (\w+) -->\n```bash\n(.*?)\n```$", text("README.md"), re.MULTILINE
    )
    assert [name for name, _ in marked] == ["run", "test"]
    for _, command in marked:
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    installs = [words for words in commands(text("README.md")) if "install" in words]
    assert len(installs) == 2


def test_extras_that_the_documents_name_exist():
    project = tomllib.loads(text("pyproject.toml"))["project"]
    extras = set(project["optional-dependencies"])
    named = {
        extra
        for name in DOCUMENTS
        for group in re.findall(r"\.\[([\w,]+)\]", text(name))
        for extra in group.split(",")
    }
    assert {"cpu", "test"} <= named <= extras


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_in_the_documents_exist(name):
    assert missing_files(text(name)) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_resolve(name):
    assert broken_links(text(name), name) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_flags_in_commands_exist(name, flags_of):
    for script, flags in scripts(text(name)):
        assert set(flags) <= flags_of[script], script


def test_readme_tells_every_flag_of_the_training_script(flags_of):
    rows = re.findall(r"^\| (`--.*?) \|", text("README.md"), re.MULTILINE)
    told = [flag for row in rows for flag in re.findall(r"`(--[\w.-]+)", row)]
    assert len(told) == len(set(told))
    assert set(told) == flags_of["experiments/train.py"] - {"--help"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_python_in_the_documents_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one draws a picture
    for block in blocks(text(name), "python"):
        exec(compile(ast.parse(block), name, "exec"), {})


# The checks themselves, each seen to fail.


def test_the_checks_catch_what_they_are_for():
    bad = (
        "See `sparsejax/no_such.py`, [gone](NOWHERE.md), [gone too](README.md#no-such-heading).\n"
        "```bash\n"
        ".venv/bin/python experiments/none.py --steps 3 \\\n  --flag=1 && echo --not-a-flag\n"
        "```\n"
    )
    assert missing_files(bad) == ["experiments/none.py", "sparsejax/no_such.py"]
    assert broken_links(bad, "README.md") == ["NOWHERE.md", "README.md#no-such-heading"]
    assert scripts(bad) == [("experiments/none.py", ["--steps", "--flag"])]
    assert broken_links("[run](README.md#run-it) [here](#layout)", "README.md") == []
