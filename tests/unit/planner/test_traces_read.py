"""Recorded traces: read as they are meant, and refused in one line that names the row."""

import json

import pytest

from outlast.errors import ConfigError
from outlast.planner.traces import read


def written(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_spot_fleet(tmp_path):
    trace = read(written(tmp_path, "0,add,a\n0,add,b\n60000,remove,a\n90000,add,c\n"))
    assert (trace.kind, trace.machines, trace.length_s) == ("fleet", 2, 90.0)
    assert [(one.at_s, one.came, one.went) for one in trace.changes] == [
        (0.0, ("a", "b"), ()),
        (60.0, (), ("a",)),
        (90.0, ("c",), ()),
    ]
    assert trace.losses == [60.0]


def test_failures_of_one_moment_are_one_with_the_longest_downtime(tmp_path):
    text = "t_hours,node,downtime_min\n1.0,3,30.0\n1.0,4,60.0\n2.5,3,1.0\n"
    trace = read(written(tmp_path, text))
    assert (trace.kind, trace.machines, trace.length_s) == ("failures", 2, 9000.0)
    assert trace.losses == [3600.0, 9000.0]
    assert trace.changes[0].back_s == 3600.0


def test_lifetimes(tmp_path):
    text = "name,zone,lifetime_s,idle\na,z,100.5,no\nb,z,7.0,no\n"
    trace = read(written(tmp_path, text))
    assert (trace.kind, trace.lifetimes_s) == ("lifetimes", (100.5, 7.0))


@pytest.mark.parametrize("where", ["top", "metadata"])
def test_availability_as_skypilot_records_it(tmp_path, where):
    raw = {"data": [1, 1, 0, 0, 1, 0]}
    raw |= {"gap_seconds": 600} if where == "top" else {"metadata": {"gap_seconds": 600}}
    trace = read(written(tmp_path, json.dumps(raw), "trace.json"))
    assert (trace.kind, trace.length_s, trace.losses) == ("fleet", 3600.0, [1200.0, 3000.0])
    assert [one.at_s for one in trace.changes if one.came] == [0.0, 2400.0]


@pytest.mark.parametrize(
    "text",
    [
        "\ufefft_hours,node,downtime_min\n1,3,30\n2,4,60\n",
        '"t_hours","node","downtime_min"\n1,"3",30\n2,"4",60\n',
        "t_hours, node, downtime_min\n1, 3, 30\n2, 4, 60\n\n\n",
    ],
    ids=["byte-order-mark", "quotes", "blanks"],
)
def test_what_spreadsheets_add_is_read_over(tmp_path, text):
    assert read(written(tmp_path, text)).losses == [3600.0, 7200.0]


def test_a_fleet_may_have_names_of_columns(tmp_path):
    trace = read(written(tmp_path, "time_ms,event,node\n0,add,a\n60000,remove,a\n"))
    assert (trace.kind, trace.losses) == ("fleet", [60.0])


def test_availability_in_numbers_of_machines(tmp_path):
    raw = '{"gap_seconds": 600, "data": [2, 2, 0, 3, 1]}'
    trace = read(written(tmp_path, raw, "trace.json"))
    assert trace.machines == 3
    assert [(one.at_s, len(one.came), len(one.went)) for one in trace.changes] == [
        (0.0, 2, 0),
        (1200.0, 0, 2),
        (1800.0, 3, 0),
        (2400.0, 0, 2),
    ]


REFUSED = {
    "times-out-of-order": ("5000,add,a\n4000,add,b\n", "row 2 is at 4 s, before 5 s"),
    "a-gap": ("0,add,a\n\n5,add,b\n", "row 2 is empty; a gap"),
    "no-number": ("0,add,a\nsoon,add,b\n", "row 2 has 'soon' where a number"),
    "not-finite": ("0,add,a\nnan,add,b\n", "row 2 has 'nan' where a number from 0"),
    "negative": ("-1,add,a\n", "row 1 has '-1' where a number from 0"),
    "goes-unseen": ("0,add,a\n5,remove,b\n", "row 2 says that b goes without having come"),
    "comes-twice": ("0,add,a\n5,add,a\n", "row 2 says that a comes again"),
    "another-word": ("0,add,a\n5,drop,a\n", "row 2 is '5,drop,a'"),
    "nothing-known": ("hello\n", "'hello' begins no trace"),
    "empty": ("", "'an empty file' begins no trace"),
    "lanl-out-of-order": (
        "t_hours,node,downtime_min\n2,1,1\n1,1,1\n",
        "row 3 is at 3600 s, before 7200 s",
    ),
    "lanl-short-row": ("t_hours,node,downtime_min\n2,1\n", "row 2 has 2 values"),
    "lanl-empty-value": ("t_hours,node,downtime_min\n2,1,\n", "row 2 has '' where a number"),
    "lifetime-of-nothing": ("name,lifetime_s\na,0\n", "row 2 has a lifetime of 0 s"),
    "no-lifetimes": ("name,lifetime_s\n", "holds no lifetime"),
    "json-gap": (
        '{"gap_seconds": 60, "data": [1, null, 1]}',
        "value 2 of data, 60 s after the start, is None",
    ),
    "json-less-than-none": ('{"gap_seconds": 60, "data": [1, -1]}', "is -1 and no number of mach"),
    "json-words": ('{"gap_seconds": 60, "data": [1, "1"]}', "is '1' and no number of mach"),
    "after-all-time": ("0,add,a\n1e300,remove,a\n", "row 2 is at 1e+297 s, which is no time"),
    "json-no-step": ('{"data": [1]}', "gap_seconds is 0"),
    "json-step-of-words": ('{"gap_seconds": "x", "data": [1]}', "gap_seconds is 'x'"),
    "json-no-data": ('{"gap_seconds": 60}', "data is no list"),
    "json-broken": ('{"gap_seconds": 60', "is not JSON"),
    "json-never-there": ('{"gap_seconds": 60, "data": [0, 0]}', "nothing to replay"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_is_wrong_is_said_in_one_line(tmp_path, case):
    text, words = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        read(written(tmp_path, text, "odd.csv"))
    assert words in str(error.value)
    assert str(error.value).startswith("odd.csv")
    assert "\n" not in str(error.value)


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(tmp_path / "none.csv")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        read(tmp_path / "bytes")
