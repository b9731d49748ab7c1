"""The Chinese quick start has README's code, headings, tables, figures and links. Each view sees its own damage."""
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = Path("README.md"), Path("tutorials/README_CN.md")
TEXT = {page: (ROOT / page).read_text(encoding="utf-8") for page in (ENGLISH, CHINESE)}

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r" *#.*$", re.MULTILINE)
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
LINK = re.compile(r"\]\(([^)]*)\)")
CODE_SPAN = re.compile(r"`[^`]+`")
TIMES = "\N{MULTIPLICATION SIGN}"
FIGURE = re.compile(r"(\d+(?:[.,]\d+)*(?:e-?\d+)?)(?:\s*(" + TIMES + r"|倍|%|MiB|MB|ms|s|M)(?![A-Za-z]))?")


def blocks(text):
    """Each code block's language and content without comments, in order."""
    return [(language, COMMENT.sub("", code).replace("本仓库的 URL", "URL of this repository"))
            for language, code in BLOCK.findall(text)]


def levels(text):
    """The headings' levels, in order."""
    return [len(marks) for marks, _ in HEADING.findall(BLOCK.sub("", text))]


def figures(text):
    """Every number with its unit, in any order, for Chinese puts words in another; 倍 is how prose says "times"."""
    without_names = CODE_SPAN.sub("", LINK.sub("]", text))
    return Counter((number, TIMES if unit == "倍" else unit) for number, unit in FIGURE.findall(without_names))


def tables(text):
    """The number of columns, the figures and the code spans of each table's rows."""
    return [[(row.count("|"), figures(row), Counter(CODE_SPAN.findall(row))) for row in table.splitlines()]
            for table in TABLE.findall(BLOCK.sub("", text))]


def sections(text):
    """The figures, code spans (a sentence may need one twice) and number of paragraphs and items below each heading."""
    prose = HEADING.sub("\0", TABLE.sub("", BLOCK.sub("", text))).split("\0")
    start = re.compile(r"(?:\A|\n\n)\s*[^\s-]|^- ", re.MULTILINE)
    return [(figures(section), set(CODE_SPAN.findall(section)), len(start.findall(section))) for section in prose]


def anchors(text):
    """What GitHub calls each heading, in order."""
    titles = [title for _, title in HEADING.findall(BLOCK.sub("", text))]
    return ["#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def targets(text, page):
    """Where links lead, from the root; of an anchor, the heading's number. Not those from one language to the other."""
    found = []
    for link in LINK.findall(BLOCK.sub("", text)):
        if link.startswith("#"):
            found.append(f"heading {anchors(text).index(link)}")
        elif "://" in link:
            found.append(link.replace("/zh-CN/", "/en/").removesuffix("mindspore.cn/en").removesuffix("mindspore.cn/"))
        else:
            found.append((ROOT / page.parent / link).resolve().relative_to(ROOT).as_posix())
    return sorted(set(found) - {ENGLISH.as_posix(), CHINESE.as_posix()})


def missing(text, page):
    """The page's relative links and anchors that lead nowhere."""
    local = [link for link in LINK.findall(BLOCK.sub("", text)) if "://" not in link]
    return [link for link in local if link not in anchors(text) and (
        link.startswith("#") or not (ROOT / page.parent / link.partition("#")[0]).exists())]


DAMAGES = {
    blocks: [(r"(```python\n)", r"\1import os\n"), (r"```bash", "```sh"), (r"```\n(?:.*\n)+?```\n\n", "")],
    levels: [(r"(?m)^## ", "### "), (r"(?m)^## .*\n", "")],
    tables: [(r"(?m)^\| [^|\n]*\|[^|\n]*\|[^|\n]*\|\n", ""), (r"(?m)^(\|.*)\|[^|\n]*\|$", r"\1|"),
             (r"(?m)^(\|.*?)=4", r"\1=5"), (r"(?m)^(\|.*?`)", r"\1x")],
    sections: [(r"0\.04", "0.05"), (r"(\d) " + TIMES, r"\1"), (r"`check_equivalence`", "`check`"), (r"(?m)^- .*\n", ""),
               (r"\n\n(?=[^\W\d_])(?!`).+\n", "\n")],
}


@pytest.mark.parametrize("view", [blocks, levels, tables, sections], ids=lambda view: view.__name__)
def test_both_languages_agree_and_a_damage_is_seen(view):
    assert view(TEXT[CHINESE]) == view(TEXT[ENGLISH])
    for pattern, damage in DAMAGES[view]:
        damaged, count = re.subn(pattern, damage, TEXT[CHINESE], count=1)
        assert count == 1, pattern
        assert view(damaged) != view(TEXT[ENGLISH]), pattern


def test_links_lead_to_the_same_places():
    assert targets(TEXT[CHINESE], CHINESE) == targets(TEXT[ENGLISH], ENGLISH)
    damaged = TEXT[CHINESE].replace("(index.md)", "(guide/check.md)", 1)
    assert damaged != TEXT[CHINESE]
    assert targets(damaged, CHINESE) != targets(TEXT[ENGLISH], ENGLISH)


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=str)
def test_every_relative_link_leads_somewhere(page):
    assert missing(TEXT[page], page) == []
    assert missing(TEXT[page] + "\n[a](no/such.md) [b](#no-such-heading)\n", page) == ["no/such.md", "#no-such-heading"]


def test_each_language_links_to_the_other():
    assert TEXT[ENGLISH].splitlines()[2] == f"[中文]({CHINESE})"
    assert TEXT[CHINESE].splitlines()[2] == "[English](../README.md)"
