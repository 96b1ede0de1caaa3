"""Captchas small enough that even the guide's network is quick, and lines."""

import pytest

from nbtools.tasks import captcha


@pytest.fixture(scope="module", autouse=True)
def packs(tmp_path_factory, one_cache):
    """60 captchas of four digits, and 40 lines."""
    letters = "0123456789abcdefghijklmnopqrstuvwxyz"
    demos = {
        "fixed": captcha.demo(tmp_path_factory.mktemp("fixed"), 60, size=(24, 64)),
        "lines": captcha.demo(tmp_path_factory.mktemp("lines"), 40, alphabet=letters, length=(4, 8)),
    }
    return {layout: captcha.pack(folder, progress=False) for layout, folder in demos.items()}


@pytest.fixture
def fixed(packs):
    return packs["fixed"]


@pytest.fixture
def lines(packs):
    return packs["lines"]


@pytest.fixture(params=["fixed", "lines"])
def pack(request, packs):
    return packs[request.param]
