"""pyproject.toml says all about the package but its long description: the README, whose relative links and images lead
to the repository, since readers on PyPI have no files beside it."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r'(\]\(|\bsrc="|\bsrcset=")(?!https?:|#)([^)"\s]+)')  # [text](docs/…), and the images of <picture>


def description() -> str:
    """The README with no relative address left."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))["project"]
    address = project["urls"]["Repository"].rstrip("/")

    def absolute(at: re.Match[str]) -> str:
        return f"{at[1]}{address}/{'raw' if at[2].endswith(('.png', '.svg')) else 'blob'}/main/{at[2]}"

    return LINK.sub(absolute, (HERE / "README.md").read_text("utf-8"))


setup(long_description=description(), long_description_content_type="text/markdown")
