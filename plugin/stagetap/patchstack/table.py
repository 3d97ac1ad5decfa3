"""The table in ``patches/README.md``: how much each patch adds to vLLM. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from stagetap.errors import StageTapError
from stagetap.patchstack.series import Series

LINE_BUDGET = 300

_BEGIN, _END = "<!-- table: begin -->", "<!-- table: end -->"
_BLOCK = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)


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
    if _BLOCK.search(text) is None:
        raise StageTapError(f"patches/README.md lacks the markers {_BEGIN} and {_END}")
    tables = "\n\n".join(render_table(series) for series in all_series)
    return _BLOCK.sub(lambda _: f"{_BEGIN}\n\n{tables}\n\n{_END}", text, count=1)
