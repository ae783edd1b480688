"""One JupyterLab for all tests of this folder."""

import os

import pytest

from tests.browser import lab as browser


# Of this folder and no longer: while playwright runs, asyncio takes its loop for the running one, and other tests ask for that.
@pytest.fixture(scope="package")
def lab(tmp_path_factory):
    if browser.CHROMIUM is None:
        why = "there is no chromium, chromium-browser or google-chrome on the PATH"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    with browser.start(tmp_path_factory.mktemp("lab")) as lab:
        yield lab
