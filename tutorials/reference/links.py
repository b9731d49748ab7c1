"""A hook of mkdocs: warn of each link or image of the built site that leads to no file. In strict mode that fails."""
import logging
import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

LINK = re.compile(r'<[a-z]+\b[^>]*?\s(?:src|href)="(?![a-z]+:|/)([^"#?]+)')


def on_post_build(config):
    """Look at every page after all files are copied. mkdocs itself only tells of a file that it excludes."""
    site = Path(config["site_dir"])
    for page in sorted(site.rglob("*.html")):
        links = map(unquote, map(unescape, LINK.findall(page.read_text(encoding="utf-8"))))
        for link in dict.fromkeys(links):
            if not (page.parent / link).exists():
                logging.getLogger("mkdocs.hooks.links").warning(
                    "%s links to '%s', which is not in the site.", page.relative_to(site), link)
