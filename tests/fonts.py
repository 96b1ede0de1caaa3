"""Fonts made for a test."""

from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen


def made_font(path, characters):
    """A font that draws a square for each of these characters, and for no other."""
    pen = TTGlyphPen(None)
    for move, point in zip([pen.moveTo, *[pen.lineTo] * 3], [(0, 0), (0, 800), (800, 800), (800, 0)], strict=True):
        move(point)
    pen.closePath()
    square, names = pen.glyph(), {ord(c): f"u{ord(c):04X}" for c in characters}
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", *names.values()])
    builder.setupCharacterMap(names)
    builder.setupGlyf(dict.fromkeys([".notdef", *names.values()], square))
    builder.setupHorizontalMetrics(dict.fromkeys([".notdef", *names.values()], (1000, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": path.stem, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return path
