"""What was given comes back: through YAML, and through what Kubernetes replaces in it."""

import re

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.cli import init as recipes
from outlast.cli.init import Kubernetes, Sky, Training
from outlast.errors import ConfigError

WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
NASTY = ("", "a: b", "# no", "- x", "'", '"', "\\", "a\nb", "\r", "\t", "\x85\u2028\ufeff", "😀")
VARIABLES = {"HOME": "/root", "OUTLAST_DIR": "/elsewhere"}


def kubernetes_expands(text):
    """As its documentation says: $(NAME) becomes the variable's value, $$ becomes $."""

    def replaced(found):
        if found.group(0) == "$$":
            return "$"
        return VARIABLES.get(found.group(1), found.group(0))

    return re.sub(r"\$\$|\$\(([^()]*)\)", replaced, text)


@given(WORDS)
@example("$(HOME)")
@example("$$(HOME)")
@example("$")
@example("no")
@example("1e3")
def test_an_argument_comes_back_from_a_manifest(argument):
    text = f"args:\n  - {recipes.kubernetes(argument)}\n"
    (found,) = yaml.safe_load(text)["args"]
    assert kubernetes_expands(found) == argument
    assert text.count("\n") == 2


@pytest.mark.parametrize("argument", NASTY)
def test_nasty_arguments_come_back_from_a_manifest(argument):
    assert kubernetes_expands(yaml.safe_load(recipes.kubernetes(argument))) == argument


@given(st.lists(WORDS, max_size=4))
def test_arguments_stay_themselves_in_every_manifest(arguments):
    training = Training(name="job", script="train.py", arguments=tuple(arguments))
    for kind in ("job", "jobset", "trainjob"):
        text = Kubernetes(training=training, kind=kind, image="i", claim="c").render()
        last = list(yaml.safe_load_all(text))[-1]["spec"]
        found = {
            "job": lambda spec: spec["template"]["spec"]["containers"][0],
            "jobset": lambda spec: spec["replicatedJobs"][0]["template"]["spec"]["template"][
                "spec"
            ]["containers"][0],
            "trainjob": lambda spec: spec["trainer"],
        }[kind](last)["args"]
        assert [kubernetes_expands(each) for each in found][-len(arguments) - 1 :] == [
            "train.py",
            *arguments,
        ]


@given(WORDS)
def test_bash_in_a_task_is_one_line_of_yaml(argument):
    training = Training(name="job", script="train.py", arguments=(argument,))
    run = yaml.safe_load(Sky(training=training, accelerator="H100", bucket="s3://b").render())[
        "run"
    ]
    assert f"  train.py {recipes.bash(argument)} || code=$?" in run.split("\n")


@pytest.mark.parametrize(("argument", "why"), [("a\0b", "zero byte"), ("\udcff", "not UTF-8")])
def test_what_no_process_can_be_given_is_refused(argument, why):
    with pytest.raises(ConfigError, match=why):
        Training(name="job", script="train.py", arguments=(argument,))
