"""Sphinx: the articles and notebooks as a site. tools/build_site.py lays out what it reads."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # pages.py

project = html_title = "ruvon"
author = copyright = "the authors of ruvon"
extensions = ["myst_nb", "pages"]
nb_execution_mode = "off"  # their outputs are committed, and compared by nbval
nb_merge_streams = True
myst_heading_anchors = 4
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["ruvon.css", "play.css"]
html_favicon = "favicon.svg"
html_baseurl = os.environ.get("RUVON_SITE", "")
html_search_scorer = str(Path(__file__).with_name("search.js"))
html_use_index = html_copy_source = html_show_sourcelink = html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
highlight_language = "text"  # a fence without a language: commands, outputs, sketches
pygments_style, pygments_dark_style = "friendly", "monokai"
