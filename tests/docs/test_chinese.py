"""The Chinese pages have the code, headings, tables, figures and links of the English ones."""
import os
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = [(Path("README.md"), Path("tutorials/README_CN.md")),
         (Path("tutorials/guide/first-hour.md"), Path("tutorials/guide/first-hour-cn.md")),
         (Path("tutorials/guide/contract.md"), Path("tutorials/guide/contract-cn.md"))]
TEXT = {page: (ROOT / page).read_text(encoding="utf-8") for pair in PAIRS for page in pair}
of_each_pair = pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=("readme", "first-hour", "contract"))

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r" *#.*$", re.MULTILINE)
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
ITEM = re.compile(r"(?:\A|\n\n)\s*[^\s-]|^- ", re.MULTILINE)  # a paragraph or an item of a list
LINK = re.compile(r"\]\(([^)]*)\)")
CODE_SPAN = re.compile(r"`[^`]+`")
TIMES = "\N{MULTIPLICATION SIGN}"
FIGURE = re.compile(r"(\d+(?:[.,]\d+)*(?:e-?\d+)?)(?:\s*(" + TIMES + r"|倍|%|MiB|MB|ms|s|M)(?![A-Za-z]))?")


def facts(text):
    """Every number with its unit, and the code spans.

    In any order, for Chinese puts words in another; 倍 is how prose says "times", and a sentence may need a span twice.
    """
    numbers = FIGURE.findall(CODE_SPAN.sub("", LINK.sub("]", text)))
    return Counter((number, TIMES if unit == "倍" else unit) for number, unit in numbers), set(CODE_SPAN.findall(text))


def outline(text):
    """What is alike in both languages: the code without comments, and what each section holds."""
    code = [(language, COMMENT.sub("", code)) for language, code in BLOCK.findall(text)]
    sections = []
    for section in re.split(r"^(?=#)", BLOCK.sub("", text), flags=re.MULTILINE):
        level, prose = len(re.match("#*", section)[0]), TABLE.sub("", HEADING.sub("", section))
        rows = [(row.count("|"), *facts(row)) for table in TABLE.findall(section) for row in table.splitlines()]
        sections.append((level, rows, *facts(prose), len(ITEM.findall(prose))))
    return code, sections


def anchors(text):
    """What GitHub calls each heading, in order."""
    titles = [title for _, title in HEADING.findall(BLOCK.sub("", text))]
    return ["#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def targets(text, page):
    """Where links lead, from the root, to English pages; an anchor of a translated page is its heading's number.

    Not that on top, to the other language.
    """
    found = []
    for link in LINK.findall(BLOCK.sub("", text))[1:]:
        file, _, anchor = link.partition("#")
        path = (ROOT / page.parent / file).resolve().relative_to(ROOT) if file else page
        if "://" in link:
            found.append(link.replace("/zh-CN/", "/en/").removesuffix("mindspore.cn/en").removesuffix("mindspore.cn/"))
        elif path in TEXT:
            number = anchors(text if path == page else TEXT[path]).index("#" + anchor) if anchor else 0
            found.append(f"{path.as_posix().replace('-cn.md', '.md')} {number}".removesuffix(" 0"))
        else:
            found.append(path.as_posix() + "#" * bool(anchor) + anchor)
    return sorted(set(found))


DAMAGES = [
    (r"(```diff\n)", r"\1import os\n"), (r"```bash", "```sh"), (r"```\n(?:.*\n)+?```\n\n", ""),
    (r"(?m)^## ", "### "), (r"(?m)^## .*\n", ""),
    (r"(?m)^\| [^|\n]*\|[^|\n]*\|[^|\n]*\|\n", ""), (r"(?m)^(\|.*)\|[^|\n]*\|$", r"\1|"),
    (r"(?m)^(\|.*?)=4", r"\1=5"), (r"(?m)^(\|.*?`)", r"\1x"),
    (r"\d\.\d\d (?=" + TIMES + ")", "9.99 "), (r"(\d) " + TIMES, r"\1"), (r"`check_equivalence`", "`check`"),
    (r"(?m)^- .*\n", ""),
    (r"\n\n(?=[^\W\d_])(?!`).+\n", "\n")]


@of_each_pair
def test_both_languages_agree(english, chinese):
    assert outline(TEXT[chinese]) == outline(TEXT[english])


def test_a_damage_is_seen():
    text = TEXT[PAIRS[0][1]]
    for pattern, damage in DAMAGES:
        damaged, count = re.subn(pattern, damage, text, count=1)
        assert count == 1, pattern
        assert outline(damaged) != outline(text), pattern


@of_each_pair
def test_links_lead_to_the_same_places_which_exist(english, chinese):
    wanted = targets(TEXT[english], english)
    assert targets(TEXT[chinese], chinese) == wanted
    paths = [re.split("[# ]", target)[0] for target in wanted if "://" not in target]
    assert len(paths) >= 3
    assert [path for path in paths if not (ROOT / path).exists()] == []
    damaged = re.sub(r"#[\w-]+\)", ")", TEXT[chinese], count=1)
    assert damaged != TEXT[chinese]
    assert targets(damaged, chinese) != wanted
    with pytest.raises(ValueError, match="'#no-such-heading' is not in list"):
        targets(TEXT[chinese] + "\n[b](#no-such-heading)\n", chinese)
    for page, other, word in ((english, chinese, "中文"), (chinese, english, "English")):
        assert TEXT[page].splitlines()[2] == f"[{word}]({os.path.relpath(other, page.parent)})"
