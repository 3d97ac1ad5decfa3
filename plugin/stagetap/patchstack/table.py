"""The table in ``patches/README.md``: how much each patch adds to vLLM. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from stagetap.errors import StageTapError
from stagetap.patchstack.series import Series

LINE_BUDGET = 300


def render_table(series: Series) -> str:
    """Markdown: one row a patch, and the sum against the budget."""
    rows = [
        f"### vLLM {series.version}",
        "",
        "| patch | files | added | removed | forwarded |",
        "|---|--:|--:|--:|---|",
    ]
    rows += [
        f"| {patch.name.removesuffix('.patch')} | {len(patch.changes)} | {patch.added} "
        f"| {patch.removed} | {patch.tags.get('Forwarded', '?')} |"
        for patch in series.patches
    ]
    added = sum(patch.added for patch in series.patches)
    removed = sum(patch.removed for patch in series.patches)
    files = len(series.lock.files)
    rows.append(f"| **all, at most {LINE_BUDGET} added** | {files} | {added} | {removed} | |")
    return "\n".join(rows)


def put_tables(text: str, all_series: Iterable[Series]) -> str:
    """``text`` with fresh tables between its markers. Raises StageTapError without markers."""
    tables = "\n\n".join(render_table(series) for series in all_series)
    return put_block(text, "table", tables, "patches/README.md")


def put_block(text: str, name: str, content: str, where: str) -> str:
    """``text`` with ``content`` between the markers ``<!-- NAME: begin -->`` and ``end``.

    Raises StageTapError, naming the file ``where``, when it lacks the markers.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    block = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if block.search(text) is None:
        raise StageTapError(f"{where} lacks the markers {begin} and {end}")
    return block.sub(lambda _: f"{begin}\n\n{content}\n\n{end}", text, count=1)
