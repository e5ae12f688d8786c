"""Pages as a test reads them."""

from __future__ import annotations

import html.parser
import re

VOID = {"meta", "br", "link", "img"}


class Page(html.parser.HTMLParser):
    """Checks that every tag is closed in order, and gathers texts by tag."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.ids, self.addresses = [], {}, [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self._note(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self._note(attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def _note(self, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]


def check_self_contained(text):
    """Checks that a page loads nothing, has no id twice, and follows the screen; returns it."""
    page = Page(text)
    inside = {address[1:] for address in page.addresses if address.startswith("#")}
    assert all(address.startswith(("#", "data:image/png;")) for address in page.addresses)
    assert not re.search(r"url\((?!#)|@import|<script|https?://(?!www\.w3\.org/)", text)
    assert len(set(page.ids)) == len(page.ids), "no id is given twice"
    assert inside <= set(page.ids)
    assert 'name="viewport"' in text and "prefers-color-scheme:dark" in text
    return page
