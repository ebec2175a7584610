"""``outlast config``: by section, in the file's units; what differs from the default is marked."""


def test_it_is_by_section_and_marks_what_is_not_the_default(outlast, job):
    (job.place / "outlast.toml").write_text('[checkpoint]\nevery = "5 min"\nkeep = 3\n')
    code, out, err = outlast("config", "--explain")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["setting", "value", "from"]
    sections = [line for line in lines if line.startswith("[")]
    assert len(sections) == len(set(sections)) == 11
    rows = [line.split() for line in lines]
    assert [row for row in rows if row[:1] == ["*"]] == [["*", "every", "5", "min", "outlast.toml"]]
    assert ["keep", "3", "outlast.toml"] in rows
    assert ["back_off", "5", "min", "default"] in rows
    assert "outlast.toml" not in outlast("config")[1]


def test_the_sections_are_those_that_the_file_takes(outlast, job):
    """The lines below a heading, put into a file, are its section."""
    _, out, _ = outlast("config")
    file, section = [], ""
    for line in out.splitlines():
        name, *value = line.removeprefix("*").split(maxsplit=1)[:2] if line else [""]
        section = name if name.startswith("[") else section
        if section and section != "[tier]" and (name.startswith("[") or value):
            file.append(name if name.startswith("[") else f"{name} = '{value[0].rstrip()}'")
    (job.place / "outlast.toml").write_text("\n".join(file))
    code, again, err = outlast("config")
    assert code == 0, err
    assert again.partition("[tier]")[0] == out.partition("[tier]")[0]
