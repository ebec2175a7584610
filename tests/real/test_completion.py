"""Completion by a real bash, switched on as docs/running.md says."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

RUNNING = Path(__file__).parents[2] / "docs" / "running.md"
ASKED = """
{switched_on}
for words in {asked}; do
  read -ra COMP_WORDS <<< "$words"
  [[ $words == *' ' ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)) COMPREPLY=()
  compopt() {{ printf '[%s %s] ' "$@"; }}
  _outlast_completion outlast
  echo "${{COMPREPLY[*]}}"
done
"""
EXPECTED = {
    "outlast ch": "checkpoints",
    "outlast re": "report",
    "outlast checkpoints re": "repair",
    "outlast plan --check": "--checkpoint",
    "outlast run --pre": "--preflight",
    "outlast run --rdzv-e": "--rdzv-endpoint",
    "outlast run tr": "[-o default] ",
    "outlast run train.py --pre": "",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_files(floor, tmp_path):
    (line,) = re.findall(r"`(eval [^`]*bash_source[^`]*)`", RUNNING.read_text())
    script = tmp_path / "asked.sh"
    asked = " ".join(f"'{words}'" for words in EXPECTED)
    script.write_text(ASKED.format(switched_on=line, asked=asked))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = floor.cold("--norc", script, env={"PATH": path}, program="bash")
    assert process.wait() == 0, process.text
    found = dict(zip(EXPECTED, process.out.splitlines(), strict=True))
    assert found == EXPECTED, process.text
