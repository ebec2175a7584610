"""What the documents tell a reader to type or to write can be typed and written.

Code is parsed, and what it takes from Outlast is there under that name, with those arguments.
Settings are loaded. Commands name subcommands, options, targets, scripts and tests that exist.
The tutorial and the reader of the format are executed: tests/real/test_tutorial.py,
tests/real/checkpoint/test_format_page.py.
"""

import ast
import configparser
import inspect
import json
import re
import shlex
import subprocess
import textwrap
from functools import cache
from itertools import pairwise
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt
from torch.distributed.run import get_args_parser

import outlast
from outlast import config
from outlast.cli import cli
from outlast.launch.arguments import add_own
from project_files import project_files

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MARKDOWN = MarkdownIt("commonmark").enable("table")
# Worked examples, which test_names_exist compares with the source; signatures made from the source.
OTHERS = {"architecture.md", "api.md"}
LANGUAGES = {"", "python", "toml", "json", "console", "bash", "ini", "diff"}


@cache
def fences():
    """(page, language, content) of each fence."""
    return [
        (page, token.info.strip(), textwrap.dedent(token.content))
        for page in PAGES
        for token in MARKDOWN.parse(page.read_text())
        if token.type == "fence"
    ]


def of(*languages):
    return [
        pytest.param(page, content, id=f"{page.name}-{number}")
        for number, (page, language, content) in enumerate(fences())
        if language in languages and page.name not in OTHERS
    ]


def test_every_fence_is_of_a_kind_that_is_checked():
    assert {language for _, language, _ in fences()} == LANGUAGES


# --- code -----------------------------------------------------------------------------------------


def code(text):
    """What a fence of Python says; an ellipsis stands for what the reader has."""
    text = text.replace("…", "...").rstrip()
    return ast.parse(f"{text} ..." if text.endswith(":") else text)


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts, node = [node.attr, *parts], node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else []


def wrong_code(text):
    """What a fence takes from Outlast, or gives it, that it has not or does not take."""
    known = {"outlast": outlast, "session": outlast.Session}
    for node in ast.walk(code(text)):
        if isinstance(node, ast.Attribute):
            name, *rest = dotted(node) or [""]
            found = known.get(name)
            for part in rest if found else ():
                if not hasattr(found, part) and not is_set_on(found, part):
                    yield f"{ast.unparse(node)}: there is no {part}"
                    break
                found = getattr(found, part, None)
                if found is None:
                    break
        if isinstance(node, ast.Call):
            name, *rest = dotted(node.func) or [""]
            found = known.get(name)
            for part in rest if found else ():
                found = getattr(found, part, None)
            if callable(found) and rest:
                yield from wrong_arguments(node, found)


def is_set_on(kind, name):
    """Whether objects of a class have it, though the class has not."""
    return isinstance(kind, type) and f"self.{name}" in inspect.getsource(kind)


def wrong_arguments(node, function):
    try:
        takes = inspect.signature(function).parameters.values()
    except ValueError:
        return
    if any(one.kind is one.VAR_KEYWORD for one in takes):
        return
    names = {one.name for one in takes}
    for keyword in node.keywords:
        if keyword.arg and keyword.arg not in names:
            yield f"{ast.unparse(node.func)} takes no {keyword.arg}"


@pytest.mark.parametrize(("page", "content"), of("python"))
def test_code_takes_what_is_there(page, content):
    assert not list(wrong_code(content)), page.name


@pytest.mark.parametrize(
    "text",
    [
        *("outlast.sesion(model=model)", "session.stepped", "outlast.data.Loader(d, batch_size=2)"),
        *("outlast.SameBits(model, shard=12)", "outlast.data.Loder(d)"),
    ],
)
def test_code_that_takes_what_is_not_there_is_found(text):
    assert list(wrong_code(text))


@pytest.mark.parametrize(("page", "content"), of("diff"))
def test_both_sides_of_a_difference_are_code(page, content):
    for side, other in ("+-", "-+"):
        kept = [line for line in content.splitlines() if not line.startswith(other)]
        text = textwrap.dedent("\n".join(line.replace(side, " ", 1) for line in kept))
        assert not list(wrong_code(text)), page.name


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "content"), of("toml"))
def test_settings_can_be_loaded(page, content, tmp_path):
    file = tmp_path / "outlast.toml"
    for name in ("cert", "key", "ca"):
        content = content.replace(f'tls_{name} = ""', "")
    file.write_text(content)
    config.load(environ={}, file=file)


@pytest.mark.parametrize(("page", "content"), of("json", "ini"))
def test_other_files_can_be_read(page, content):
    if content.lstrip().startswith("{"):
        json.loads(content)
    else:
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(content)
        assert parser["Service"]["ExecStart"]


# --- commands -------------------------------------------------------------------------------------

PROMPT = re.compile(r"^\$ ")
COMMENT = re.compile(r"\s#.*$")
TARGETS = set(
    re.findall(r"^([a-z][\w-]*(?: [a-z][\w-]*)*):", (ROOT / "Makefile").read_text(), re.M)
)
TARGETS = {name for names in TARGETS for name in names.split()}


QUESTIONS = cli.get_command(click.Context(cli), "plan").list_commands(click.Context(cli))


def commands():
    """(page, command) of each line that is typed: in fences, and between backticks."""
    for page, language, content in fences():
        if language in ("", "console", "bash"):
            for line in content.replace("\\\n", " ").splitlines():
                yield page, COMMENT.sub("", PROMPT.sub("", line)).strip()
    for page in PAGES:
        for token in MARKDOWN.parse(page.read_text()):
            for one in token.children or ():
                if one.type == "code_inline":
                    yield page, one.content
                    if page.name == "planner.md" and one.content.split()[0] in QUESTIONS:
                        yield page, "outlast plan " + re.sub("[][]", "", one.content)


@cache
def launch_options():
    parser = get_args_parser()
    add_own(parser)
    return set(parser._option_string_actions)


def wrong_outlast(words):
    """Words of a command of ours that it does not know."""
    command, known = cli, {"--help", "-h", "--version"}
    context, words = click.Context(cli), list(words)
    while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z][a-z0-9-]*", words[0]):
        name = words.pop(0)
        found = command.get_command(context, name)
        if found is None and command is not cli and isinstance(command, click.Group):
            break  # the group's own argument
        if found is None:
            yield f"outlast {name} is no command"
            return
        command = found
        known |= {option for one in command.params for option in one.opts}
    default = getattr(command, "default", None)  # the command that is meant where none is named
    if default is not None:
        meant = command.get_command(context, default)
        known |= {option for one in meant.params for option in one.opts}
    if command.name == "run":
        known |= launch_options()
        script = next(
            (i for i, word in enumerate(words) if word.endswith(".py") or word == "-m"), len(words)
        )
        words = words[:script]
    if "--" in words:
        words = words[: words.index("--")]
    for word in words:
        option = word.partition("=")[0]
        if re.fullmatch(r"--?[a-z][a-z-]*", option) and option not in known:
            yield f"outlast {command.name} has no {option}"


def wrong_script(words):
    script = ROOT / words[0]
    if not script.exists():
        yield f"there is no {words[0]}"
        return
    files = [script] if script.is_file() else sorted(script.glob("*.py"))
    text = "".join(file.read_text() for file in files)
    text += "".join(file.read_text() for file in (ROOT / "benchmarks/bench").glob("*.py"))
    for word in words[1:]:
        option = word.partition("=")[0]
        if option.startswith("--") and f'"{option}"' not in text:
            yield f"{words[0]} has no {option}"


@cache
def files_of_tests():
    return {
        name: f"{name}\n{(ROOT / name).read_text()}"
        for name in project_files("tests")
        if name.endswith(".py")
    }


def wrong_tests(words):
    """Files of a pytest command that are not there; words of its -k that name no test in them."""
    places, chosen, words = [], [], list(words)
    while words:
        word = words.pop(0)
        if word == "-k":
            chosen.append(words.pop(0))
        elif word in ("-m", "-n"):
            words.pop(0)
        elif word.startswith("tests"):
            places.append(word.partition("::")[0])
    for place in places:
        if not (ROOT / place).exists():
            yield f"there is no {place}"
    texts = [
        text for name, text in files_of_tests().items() if name.startswith(tuple(places) or "tests")
    ]
    for word in re.findall(r"[\w.\[\]-]+", " ".join(chosen)):
        if word not in ("or", "and", "not") and not any(word in text for text in texts):
            yield f"-k {word} names no test in {' '.join(places)}"


def wrong_words(words):
    match words:
        case ["outlast", "was", *_]:  # the beginning of a message
            pass
        case ["outlast", *rest]:
            yield from wrong_outlast(rest)
        case ["make", target, *_] if re.fullmatch(r"[a-z][a-z-]*", target):
            if target not in TARGETS:
                yield f"make has no {target}"
        case ["python" | "python3", script, *rest] if script.startswith(("benchmarks", "tools")):
            yield from wrong_script([script, *rest])
        case ["pytest", *rest]:
            yield from wrong_tests(rest)


def wrong_command(text):
    """What is wrong with a line that somebody may type; nothing where it is no command of ours."""
    if re.search(r"[↵│├└]", text):  # a drawing
        return
    for part in re.split(r"; |&& |\|\| |\| ", text):
        try:
            words = shlex.split(part.replace("…", "...").strip("() "))
        except ValueError:
            continue
        while words and (words[0] == "srun" or re.fullmatch(r"[A-Z_]+=.*", words[0])):
            words.pop(0)
        yield from wrong_words(words)


def test_commands_are_there():
    every = list(commands())
    wrong = [
        f"{page.relative_to(ROOT)}: {text}: {one}"
        for page, text in every
        for one in wrong_command(text)
    ]
    assert not wrong, "\n".join(wrong)
    ours = [
        text for _, text in every if re.match(r"(?:\w+=\S+ )?(outlast|pytest|make|python) ", text)
    ]
    assert len(ours) > 500


@pytest.mark.parametrize(
    "text",
    [
        *("outlast lunch train.py", "outlast run --no-such-flag train.py", "outlast plan --gpuz 4"),
        *("outlast checkpoints export --too torch", "make tests", "python benchmarks/savings.py"),
        *("python benchmarks/saving.py --no-such", "pytest tests/unit/test_nothing.py"),
        *("pytest tests/unit/test_units.py -k no_such_test", "cd x && outlast rum"),
    ],
)
def test_a_command_that_is_not_there_is_found(text):
    assert list(wrong_command(text))


def test_what_the_planner_answers_is_what_its_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = [content for page, _, content in fences() if page.name == "planner.md"]
    asked = 0
    for typed, printed in pairwise(shown):
        command = shlex.split(COMMENT.sub("", typed.strip().splitlines()[-1]))
        if command[:1] == ["outlast"]:
            asked += 1
            said = CliRunner().invoke(cli, command[1:]).output
            assert printed in said
    assert asked == 2


@pytest.mark.parametrize(("page", "content"), of("bash"))
def test_a_script_of_the_shell_is_one(page, content):
    subprocess.run(["bash", "-n"], input=content, text=True, check=True)
