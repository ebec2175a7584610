"""The documents hold together: every page is in the site, every link and anchor resolves.

The site itself is built by ``make docs``; what is checked here needs nothing but the pages. A page
is read on the site and in the repository, which make anchors of headings by two rules: a link must
hold by both.
"""

import re
import subprocess
import sys
import tomllib
import unicodedata
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

from project_files import project_files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# Read in the repository; the site does not have them.
FRONT = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "examples/README.md",
    )
]
MARKDOWN = MarkdownIt("commonmark").enable("table")
GROUPS = ["Start", "Guides", "Reference", "How it works", "For those who build it"]


def leaves(nav):
    for entry in nav:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else leaves(target)


def test_every_page_is_in_the_navigation_once():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert [name for group in nav for name in group] == GROUPS
    assert sorted(leaves(nav)) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


# --- links ----------------------------------------------------------------------------------------


def on_the_site(heading):
    """The anchor that Python-Markdown makes of a heading."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def in_the_repository(heading):
    """The anchor that a forge makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def inline(text):
    """The inline tokens of a page, with the name of what they stand in."""
    tokens = MARKDOWN.parse(text)
    for before, token in zip(["", *tokens], tokens, strict=False):
        if token.type == "inline":
            yield getattr(before, "type", ""), token


def headings(text):
    for place, token in inline(text):
        if place == "heading_open":
            yield "".join(
                one.content for one in token.children if one.type in ("text", "code_inline")
            )


def anchors(text):
    """Anchors that both rules make of a page's headings."""
    named = list(headings(text))
    return {on_the_site(one) for one in named} & {in_the_repository(one) for one in named}


def links(text):
    for _, token in inline(text):
        for one in token.children:
            if one.type in ("link_open", "image"):
                yield unquote(one.attrGet("href") or one.attrGet("src"))


def wrong_links(page, text, pages):
    """The links of a page that lead nowhere, or out of the site."""
    for link in links(text):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        found = (page.parent / target).resolve() if target else page
        if not found.exists():
            yield f"{link}: there is no such file"
        elif page.is_relative_to(DOCS) and not found.is_relative_to(DOCS):
            yield f"{link}: the site does not have it"
        elif anchor and anchor not in anchors(pages.get(found) or text):
            yield f"{link}: the page has no such heading, or the two rules make two anchors of it"


def test_every_link_leads_somewhere():
    pages = {page: page.read_text() for page in [*PAGES, *FRONT]}
    wrong = [
        f"{page.relative_to(ROOT)}: {one}"
        for page, text in pages.items()
        for one in wrong_links(page, text, pages)
    ]
    assert not wrong, "\n".join(wrong)
    assert sum(len(list(links(text))) for text in pages.values()) > 250


@pytest.mark.parametrize(
    "text",
    [
        *("[a](no-such-page.md)", "[a](index.md#no-such-heading)", "[a](../README.md)"),
        *("![a](no-such-picture.svg)", "## a – b\n[a](#a-b)", "## a – b\n[a](#a--b)"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(text):
    index = DOCS / "index.md"
    assert list(wrong_links(index, text, {index: text}))


def test_two_headings_of_a_page_have_two_anchors():
    for page in PAGES:
        named = [on_the_site(one) for one in headings(page.read_text())]
        assert len(named) == len(set(named)), page.name


# --- what nothing may say -------------------------------------------------------------------------

INSTALL = re.compile(r"pip3?\s+install\b(?P<rest>(?:\\\n|[^\n`;&|])*)")
BARE = re.compile(r"""(?<![\w./-])outlast(?![\w./*-])(?:\[[\w,]*\])?(?!\[)(?![^\S\n]*@)""")


def bare_installs(text):
    """Commands that would have pip take the name outlast from PyPI: it is not ours there."""
    for found in INSTALL.finditer(text):
        named = BARE.search(found["rest"])
        if named and not re.search(r"--no-index|(?:-i|--index-url)[ =]", found["rest"]):
            yield found[0]


def test_nothing_has_pip_take_the_name_from_pypi():
    wrong = [
        f"{name}: {one}"
        for name in project_files()
        if (ROOT / name).suffix not in (".svg", ".gz", ".whl")
        if name != "tests/unit/test_documents.py"
        for one in bare_installs((ROOT / name).read_text(errors="replace"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("pip install outlast", True),
        ("pip install 'outlast[cloud]'", True),
        ("python -m pip install -U torch outlast==0.1.0", True),
        ("pip install --find-links dist outlast", True),
        ("pip install --no-index --find-links dist outlast", False),
        ("pip install ./outlast-0.1.0-py3-none-any.whl", False),
        ("pip install -e .", False),
        ("pip install 'outlast[cloud] @ file:///src/outlast'", False),
        ("pip install .; outlast demo", False),
        ("pip install obstore", False),
    ],
)
def test_a_command_that_names_it_alone_is_found(text, is_wrong):
    assert bool(list(bare_installs(text))) == is_wrong


# --- what is made from the source -----------------------------------------------------------------


def test_the_reference_says_what_the_source_says():
    made = subprocess.run(
        [sys.executable, "tools/reference.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr


# --- pictures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_a_picture_needs_no_font_and_follows_the_scheme(path):
    text = path.read_text()
    assert "<text" not in text
    assert "font-family" not in text
    assert "@media (prefers-color-scheme: dark)" in text
    assert re.search(r'role="img"><title>.{30,}</title>', text, re.DOTALL)
    assert f"--picture docs/{path.name}" in (ROOT / "Makefile").read_text()  # make pictures
