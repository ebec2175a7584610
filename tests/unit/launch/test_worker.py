"""What the first frame of a worker does with the script's end."""

import json
import runpy
import sys

import pytest

from outlast.errors import StorageError
from outlast.launch import worker


@pytest.mark.parametrize(
    ("code", "exit_code", "printed"),
    [
        (None, 0, ""),
        (0, 0, ""),
        (3, 3, ""),
        (True, 1, ""),
        ("a reason", 1, "a reason\n"),
        ((1, 2), 1, "(1, 2)\n"),
    ],
)
def test_exit_codes_are_those_of_the_interpreter(code, exit_code, printed, capsys):
    assert worker._exit_code(SystemExit(code)) == exit_code
    assert capsys.readouterr().err == printed


@pytest.fixture
def _as_main(monkeypatch, tmp_path):
    """The test runner's own ``__main__`` and path come back after the test."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["train.py", "x"])
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_as_main")
def test_a_script_runs_as_main(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import __main__, sys\n"
        "assert __name__ == '__main__' and __main__.__file__ == __file__ == 'train.py'\n"
        "here, arguments = sys.path[0], sys.argv[1:]\n"
        "def later(): return here\n"
    )
    worker.run_script("train.py")
    main = sys.modules["__main__"]
    assert (main.here, main.arguments) == (str(tmp_path), ["x"])
    assert main.later() == main.here  # its globals outlive the run


def frames(error):
    # The first frame is this test's.
    trace, names = worker._without_us(error.__traceback__.tb_next), []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return names


@pytest.mark.usefixtures("_as_main")
def test_a_traceback_begins_in_the_script(tmp_path):
    (tmp_path / "train.py").write_text("def inner():\n    1 / 0\ninner()\n")
    with pytest.raises(ZeroDivisionError) as caught:
        worker.run_script("train.py")
    assert frames(caught.value) == ["<module>", "inner"]
    with pytest.raises(ZeroDivisionError) as caught:
        runpy.run_module("train", run_name="__main__")
    assert frames(caught.value) == ["<module>", "inner"]


@pytest.mark.usefixtures("_as_main")
def test_a_script_that_cannot_be_compiled_has_no_frames_of_ours(tmp_path):
    (tmp_path / "train.py").write_text("def :\n")
    with pytest.raises(SyntaxError) as caught:
        worker.run_script("train.py")
    assert frames(caught.value) == []


def test_an_error_reaches_the_agent(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    worker._record(ValueError("boom"), "Traceback: all of it")
    record = json.loads(path.read_text())["message"]
    assert record["message"] == "ValueError: boom"
    assert record["extraInfo"]["py_callstack"] == "Traceback: all of it"
    assert int(record["extraInfo"]["timestamp"]) > 0
    worker._record(StorageError("the disk went"), "")
    assert json.loads(path.read_text())["message"]["message"] == "the disk went"


def test_telling_the_agent_never_fails(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    worker._record(ValueError("boom"), "")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    worker._record(ValueError("boom"), "")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    worker._record(OSError(2, "No such file", "/data/\udcff"), "Traceback \udcff")
    assert json.loads((tmp_path / "error.json").read_text())


def test_what_a_handler_raises_while_an_exception_is_told_is_told(monkeypatch):
    format_exception = worker.traceback.format_exception

    def interrupted(error):
        if isinstance(error, RuntimeError):
            return format_exception(error)
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    monkeypatch.setattr(worker.traceback, "format_exception", interrupted)
    try:
        raise ConnectionResetError("reset")
    except ConnectionResetError as first:
        error, text = worker._in_words(first)
    assert isinstance(error, RuntimeError)
    assert "ConnectionResetError: reset" in text
    assert "is killed by signal: Killed." in text
