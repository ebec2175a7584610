"""The public names: what a script may rely on. A change of this list is a change for everybody."""

import inspect
import re

import outlast
import outlast.data

NAMES = {
    "CheckpointInvalid",
    "ConfigError",
    "LocalUpdates",
    "OutlastError",
    "ResumeRefused",
    "SameBits",
    "Session",
    "StateMismatch",
    "StorageError",
    "__version__",
    "data",
    "dcp_reader",
    "dcp_writer",
    "session",
}
SESSION = {
    "adapted",
    "observers",
    "begins_at",
    "cannot_repeat",
    "epochs",
    "log",
    "resumed",
    "save",
    "step",
    "steps",
}
ARGUMENTS = {
    "dir",
    "every",
    "init_except",
    "init_from",
    "keep",
    "keep_new",
    "named",
    "resume",
    "unnamed",
}


def test_the_package():
    assert set(outlast.__all__) == NAMES
    assert outlast.__all__ == sorted(outlast.__all__)
    for name in outlast.__all__:
        assert getattr(outlast, name) is not None
    assert set(outlast.data.__all__) >= {"Loader", "Stream"}


def test_the_session():
    public = {name for name in vars(outlast.Session) if not name.startswith("_")}
    made_with = inspect.getsource(outlast.Session.__init__)
    set_later = set(re.findall(r"self\.([a-z]\w*)", made_with))
    assert public | set_later == SESSION
    parameters = inspect.signature(outlast.session).parameters
    assert set(parameters) == ARGUMENTS
    kinds = {one.kind.name for one in parameters.values()}
    assert "POSITIONAL_OR_KEYWORD" not in kinds
