"""Test the changes to the site's pages that Markdown cannot make."""

from __future__ import annotations

from documentation import hook  # type: ignore[attr-defined]


def test_flags_are_marked_in_text_and_not_in_tags() -> None:
    html = '<p title="--in-a-tag">a--b <code>--to torch_dist</code> <!-- comment --></p>'
    assert hook.on_page_content(html) == html.replace("<code>--to", '<code><span class="flag">--to</span>')
