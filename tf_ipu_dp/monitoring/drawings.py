"""What all drawings share: colours, file types, and one self-contained HTML page for light and dark screens.

Imports matplotlib only to draw. The same drawing, the same bytes: nothing of the clock gets into a file.
"""

from __future__ import annotations

import io
import re
import shlex
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Sequence

from tf_ipu_dp import cli, missing_packages
from tf_ipu_dp.runs import safe_files

FORMATS = (".png", ".svg", ".html")
# Told apart by readers with any colour vision (Okabe and Ito), then wine and grey.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#777777")
# Unlike all other colours of a drawing, so that a page can replace them by those of a dark screen.
INK, PAPER, FAINT = "#1a1c1f", "#fefefe", "#d0d3d7"
_DARK = {INK: "#e4e6e9", PAPER: "#16181c", FAINT: "#3a3e45", PALETTE[0]: "#4aa3df", PALETTE[6]: "#cf6fa4"}
STYLE = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "grid.color": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
}
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_CLIP = re.compile(rb'<clipPath id="([^"]+)"')
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_PAGE_STYLE = (
    "body{font:15px/1.5 sans-serif;margin:1.5em auto;max-width:80em;padding:0 1em;"
    "color:var(--ink);background:var(--paper)}"
    "h1{font-size:1.5em}h2{font-size:1.15em;margin:1.5em 0 .3em}p{margin:.4em 0}"
    "svg{width:100%;height:auto;display:block}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;padding:.3em .6em;border-bottom:1px solid var(--faint);vertical-align:top}"
    "td{overflow-wrap:anywhere}"
)


def check_file(flag: str, path: Path, formats: Sequence[str] = FORMATS, drawn: Sequence[str] = FORMATS) -> None:
    """Raises a UsageError for a file that cannot be written, before any work is done for it."""
    if path.suffix.lower() not in formats:
        raise cli.UsageError(f"--{flag}={path} has an unknown file type. Use one of {', '.join(formats)}.")
    if not path.absolute().parent.is_dir():
        raise cli.UsageError(
            f"--{flag}={path} cannot be written: there is no folder {path.absolute().parent}. "
            f"Make it with: mkdir -p {shlex.quote(str(path.absolute().parent))}"
        )
    if path.suffix.lower() not in drawn:
        return
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        missing_packages.restart()
        raise cli.UsageError(
            f"--{flag}={path} needs matplotlib ({error}). Install it with: pip install 'matplotlib>=3.6,<3.10'"
        ) from error


def write_file(flag: str, path: Path, content: bytes) -> None:
    """Writes a file, or raises a UsageError that names the flag."""
    try:
        safe_files.write_durably(path, content)
    except OSError as error:
        raise cli.UsageError(f"--{flag}={path} cannot be written ({error.strerror}). Use another path.") from error


def render_figure(figure: Any, kind: str, name: str) -> bytes:
    """Returns a figure as PNG or SVG. The name goes into the ids of an SVG, unlike those of other drawings."""
    import matplotlib

    stream = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        warnings.simplefilter("ignore")  # a name may have characters that the font lacks
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(stream, format=kind, dpi=120, facecolor=PAPER, metadata=metadata)
    return _number_clips(stream.getvalue(), name) if kind == "svg" else stream.getvalue()


def make_inline(drawing: str, titles: Mapping[str, Sequence[str]], label: str) -> str:
    """Returns an SVG drawing to stand inside a page.

    Colours become those of the page. `titles` has, by the id of a group in the drawing, the texts that are shown when
    the pointer is over its elements: one text for the whole group, or one for each of its marks.
    """
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    root = ET.fromstring(drawing)  # noqa: S314 - drawn here
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{{{_SVG}}}metadata":
                parent.remove(child)
    for group in list(root.iter(f"{{{_SVG}}}g")):
        _add_titles(group, titles.get(group.get("id", ""), ()))
    used = set(_used_ids(root))
    for element in root.iter():
        if element.get("id") and element.get("id") not in used:
            del element.attrib["id"]  # the same in every drawing
    root.attrib.pop("width", None)
    root.attrib.pop("height", None)
    root.set("role", "img")
    root.set("aria-label", label)
    text = ET.tostring(root, encoding="unicode")
    for colour, variable in _variables().items():
        text = text.replace(colour, f"var({variable})")
    return text


def render_page(title: str, body: str, style: str = "") -> str:
    """Returns one self-contained HTML page: it loads nothing, and follows the reader's choice of light or dark."""
    names = _variables()
    light = "".join(f"{name}:{colour};" for colour, name in names.items())
    dark = "".join(f"{name}:{_DARK[colour]};" for colour, name in names.items() if colour in _DARK)
    colours = f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{colours}{_PAGE_STYLE}{style}</style></head><body>{body}</body></html>\n"
    )


def _number_clips(drawing: bytes, name: str) -> bytes:
    """Returns an SVG whose clip paths have numbers as ids.

    matplotlib makes these ids from addresses in memory and from the last bits of coordinates, which change from one
    drawing of a figure to the next.
    """
    ids = list(dict.fromkeys(_CLIP.findall(drawing)))
    for number, each in enumerate(ids):
        drawing = drawing.replace(each, f"{name}-clip{number}".encode())
    return drawing


def _variables() -> Dict[str, str]:
    """Returns the name of the CSS variable for each colour that a page may change."""
    names = {INK: "--ink", PAPER: "--paper", FAINT: "--faint"}
    return {**names, **{colour: f"--colour{number}" for number, colour in enumerate(PALETTE)}}


def _add_titles(group: Any, texts: Sequence[str]) -> None:
    if not texts:
        return
    # matplotlib draws marks of one shape as references to it, and shapes of their own as paths.
    defined = {id(shape) for shapes in group.iter(f"{{{_SVG}}}defs") for shape in shapes.iter()}
    marks = list(group.iter(f"{{{_SVG}}}use"))
    marks = marks or [shape for shape in group.iter(f"{{{_SVG}}}path") if id(shape) not in defined]
    if len(texts) != len(marks) or len(texts) == 1:
        marks, texts = [group], texts[:1]
    for mark, text in zip(marks, texts):
        title = ET.Element(f"{{{_SVG}}}title")
        title.text = text
        mark.insert(0, title)


def _used_ids(root: Any) -> Iterator[str]:
    for element in root.iter():
        reference = element.get(f"{{{_XLINK}}}href", "")
        if reference.startswith("#"):
            yield reference[1:]
        for value in element.attrib.values():
            yield from _REFERENCE.findall(value)
