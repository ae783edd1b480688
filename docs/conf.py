"""How the site looks: Sphinx's settings. build.py makes the pages that Sphinx reads."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import address
from docutils.nodes import SkipNode, Text
from latex2mathml.converter import convert
from sphinx.addnodes import pending_xref, pending_xref_condition

REPOSITORY = address.repository()
# The site's own address, such as https://someone.github.io/many-ranks/; a sitemap and previews of links need it.
ADDRESS = os.environ.get("SITE_ADDRESS") or address.site(REPOSITORY)

project = html_title = "Many Ranks"
author = "the authors of Many Ranks"
root_doc = "index"
extensions = ["myst_nb", "sphinx_copybutton", "notfound.extension"]
extensions += ["sphinxext.opengraph", "sphinx_sitemap"] if ADDRESS else []
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}

nb_execution_mode = "off"  # pages show what was stored
nb_merge_streams = True
nb_ipywidgets_js = {}
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 6
suppress_warnings = ["myst.header"]  # a lab may go from ## to ####
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
python_trailing_comma_in_multi_line_signatures = False
toc_object_entries = False  # 1,000 names, made ready for the contents of every page
copybutton_selector = "div.cell_input div.highlight pre, div.highlight-python pre, div.highlight-default pre"

html_theme = "sphinx_book_theme"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_js_files = [("explorer.js", {"defer": "defer"})]
html_show_sourcelink = html_copy_source = html_show_copyright = html_show_sphinx = False
html_baseurl = ADDRESS
html_theme_options = {
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "navbar_persistent": [],
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "repository_url": REPOSITORY,
    "use_repository_button": bool(REPOSITORY),
    "use_issues_button": bool(REPOSITORY),
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is

ogp_site_url = ADDRESS
ogp_site_name = project
ogp_image = "_images/chapter_10_explorer.png"
ogp_social_cards = {"enable": False}  # they need matplotlib
sitemap_url_scheme = "{link}"
sitemap_show_lastmod = False
notfound_urls_prefix = urlsplit(ADDRESS).path or "/"


def _formula(display: str):
    def visit(translator, node):
        translator.body.append(convert(node.astext(), display=display))
        raise SkipNode

    return visit, None


def _exact(app, page) -> None:
    """Links a type to the class of exactly this name, and shows its last word: Sphinx would take any with this ending."""
    for link in page.findall(pending_xref):
        for guess in ("refspecific", "py:module", "py:class"):
            link.attributes.pop(guess, None)
    for shown in page.findall(pending_xref_condition):
        shown[:] = [Text(shown.astext().rpartition(".")[2])]


_ICONS = {"Binder": "_static/images/logo_binder.svg", "Colab": "_static/images/logo_colab.png", "Codespaces": "fab fa-github"}


def _launch(app, page, template, context, doctree) -> None:
    """A notebook's page has buttons that run it elsewhere. The theme's own don't know Codespaces."""
    links = address.launches(REPOSITORY, page + context.get("page_source_suffix", ""))
    about = {"type": "link", "tooltip": "Run this notebook, without installing anything"}
    buttons = [about | {"text": name, "url": link, "icon": _ICONS[name]} for name, link in links.items()]
    if buttons:
        shown = {"tooltip": about["tooltip"], "icon": "fas fa-rocket", "label": "launch-buttons"}
        context["header_buttons"].append(shown | {"type": "group", "buttons": buttons})


def setup(app) -> None:
    """Formulas are MathML, which browsers draw without a script."""
    app.connect("html-page-context", _launch, priority=900)  # after the theme, which makes header_buttons
    app.connect("doctree-read", _exact)
    app.add_html_math_renderer("mathml", _formula("inline"), _formula("block"))


html_math_renderer = "mathml"
