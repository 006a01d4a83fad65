"""Pages for readers: each is one file of HTML that holds its tables and pictures."""

import base64
import os
from collections.abc import Sequence
from html import escape

from cdt_fast.files import write_text

_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: auto; padding: 0 1rem 2rem; color: #222 }}
table {{ border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums }}
td, th {{ padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd }}
td:first-child, th:first-child {{ text-align: left; padding-left: 0 }}
td {{ white-space: nowrap }} th {{ vertical-align: bottom }}
.wide, figure {{ overflow-x: auto; margin: 1rem 0 }}
img {{ max-width: 100%; min-width: 36rem }} figcaption {{ color: #555 }}
code {{ background: #f3f3f3; padding: .1rem .3rem; overflow-wrap: anywhere }}
</style>
<h1>{title}</h1>
"""


def heading(text: str) -> str:
    """Return a heading of a part of the page."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph; what is in backticks is code."""
    parts = [f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(escape(text).split("`"))]
    return f"<p>{''.join(parts)}</p>"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table, the heading first; on a narrow screen it scrolls by itself, as pictures do."""
    lines = []
    for row in rows:
        cell = "td" if lines else "th"
        lines.append("<tr>" + "".join(f"<{cell}>{escape(words)}</{cell}>" for words in row) + "</tr>")
    return "\n".join(['<div class="wide"><table>', *lines, "</table></div>"])


def picture(png: bytes, caption: str) -> str:
    """Return a picture with its caption."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    words = escape(caption)
    return f'<figure><img src="{source}" alt="{words}"><figcaption>{words}</figcaption></figure>'


def write_page(path: str | os.PathLike[str], title: str, parts: Sequence[str]) -> None:
    """Write a page of these parts."""
    text = _HEAD.format(title=escape(title)) + "\n".join(parts) + "\n</html>\n"
    write_text(path, text.encode("utf-8", "backslashreplace").decode())  # names of files may be in any encoding
