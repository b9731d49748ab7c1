"""Hooks of mkdocs: version, licence and repository on each page; a warning for each link of the site to no file."""
import logging
import os
import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

LINK = re.compile(r'<[a-z]+\b[^>]*?\s(?:src|href)="(?![a-z]+:|/)([^"#?]+)')
INIT = Path(__file__).parents[2] / "ms_accum" / "__init__.py"


def on_config(config):
    """Write the footer. If MS_ACCUM_REPOSITORY holds an address, link to it, and from each page to its source."""
    version = re.search(r'^__version__ = "(.+)"$', INIT.read_text(encoding="utf-8"), re.MULTILINE)[1]
    config["copyright"] = f"ms_accum {version}, licence Apache-2.0"
    repository = os.environ.get("MS_ACCUM_REPOSITORY")
    if repository:
        config["repo_url"], config["repo_name"] = f"{repository.rstrip('/')}/", "Repository"
        config["edit_uri"] = "edit/main/tutorials/"
    return config


def on_post_build(config):
    """Look at every page after all files are copied. mkdocs itself only tells of a file that it excludes."""
    site = Path(config["site_dir"])
    for page in sorted(site.rglob("*.html")):
        links = map(unquote, map(unescape, LINK.findall(page.read_text(encoding="utf-8"))))
        for link in dict.fromkeys(links):
            if not (page.parent / link).exists():
                logging.getLogger("mkdocs.hooks.links").warning(
                    "%s links to '%s', which is not in the site.", page.relative_to(site), link)
