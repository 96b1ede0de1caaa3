"""Demo pages: deterministic, in hands that differ, from a font or none; and pictures of packed lines."""

import numpy as np
import pytest

import nbtools as nb
from nbtools import figures
from nbtools.tasks import hwdb
from nbtools.tasks.hwdb.data import image_of, lines_of, text_of_codes
from nbtools.tasks.hwdb.demo import pool


@pytest.fixture(autouse=True)
def fontless(monkeypatch):
    monkeypatch.setattr(figures, "findSystemFonts", list)


def lines_in(folder, part=""):
    """Page → (text, image) of each of its lines."""
    pages = sorted(folder.rglob(f"*{part}*/*.dgrl"))
    each = {path.relative_to(folder).as_posix(): lines_of(path.read_bytes(), path.name) for path in pages}
    return {name: [(text_of_codes(line.codes)[0], image_of(line)) for line in lines] for name, lines in each.items()}


def test_the_demo_is_real_pages_in_train_and_test_folders_that_share_no_writer(tmp_path):
    pages = lines_in(hwdb.demo(tmp_path, 100, height=24))
    assert sum(map(len, pages.values())) == 100
    assert next(iter(pages)) == "HWDB2.0Test/002-P16.dgrl"
    hands = {part: {name.split("/")[1][:3] for name in pages if part in name} for part in ("Train", "Test")}
    assert hands["Train"]
    assert not hands["Test"] & hands["Train"]
    lines = [line for each in pages.values() for line in each]
    assert all(4 <= len(text) <= 12 and image.min() < 150 and np.mean(image == 255) > 0.4 for text, image in lines)
    slope = np.polyfit([len(text) for text, _ in lines], [image.shape[1] for _, image in lines], 1)[0]
    assert 0.4 * 24 < slope < 1.2 * 24  # longer texts are wider, by about a character each
    texts = "".join(text for each in lines_in(tmp_path, "Train").values() for text, _ in each)
    assert set(texts) == set(pool()[:60])  # every character, as soon as there are as many train lines


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("own_cache")
def test_new_writers_are_read_by_the_advised_plan(tmp_path):
    """The demo's promise: CER ≤ 0.25 on writers held out."""
    pages = hwdb.demo(tmp_path / "pages", 900, characters=30)
    pack = hwdb.pack(pages, height=32, into=tmp_path / "pack", progress=False)
    run = nb.fit(hwdb, pack, nb.advise(hwdb, pack, measure=False).plan, run=tmp_path / "run", receipt=False)
    assert nb.evaluate(run, pack, "test")["cer"] <= 0.25
