"""Patches made ready for a pull request to vLLM: each alone, with its test, without our tags.

A candidate is a patch whose tag ``Forwarded`` says ``no``. Its tests lie in ``patches/upstream``, a
folder for each patch, called like the patch without its number, with the paths of vLLM's repository
in it. What it needs of the series goes before it, as a commit of its own: the patches that create a
module which it imports.
"""

from __future__ import annotations

import re
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stagetap.errors import Refused
from stagetap.patchstack.checkout import PRISTINE_TAG
from stagetap.patchstack.gitrun import Contents, git, write_files
from stagetap.patchstack.patchfile import Patch
from stagetap.patchstack.series import Series
from stagetap.patchstack.tree import compile_error
from stagetap.patchstack.workshop import FORMAT_PATCH, build_repository

FOLDER = "upstream"
_ADDED = re.compile(r"^\+(?!\+\+ )(.*)$", re.MULTILINE)
_SIGN_OFF = re.compile(r"^[^<>\n]+ <[^<>@\s]+@[^<>@\s]+>$")


@dataclass(frozen=True)
class Candidate:
    """One file for ``git am``.

    Attributes:
        name: file name, ``SUBJECT.patch``.
        data: its commits in git's mail format, what it needs first.
        patches: the patches of the series that are in it.
        tests: the files that its commits add below ``tests/``.
    """

    name: str
    data: bytes
    patches: tuple[str, ...]
    tests: tuple[str, ...]


def candidates(series: Series) -> list[Patch]:
    """The patches that nobody has offered upstream yet and that upstream could want.

    Raises Refused for two patches of one ``slug``: their files and tests would be the same.
    """
    of_slug: dict[str, Patch] = {}
    for patch in series.patches:
        if (earlier := of_slug.setdefault(slug(patch), patch)) is not patch:
            raise Refused(
                f"{earlier.name} and {patch.name} have one subject, and so one file and one folder "
                "of tests; reword a commit of `stagetap patch checkout` and export it"
            )
    return [patch for patch in series.patches if patch.tags.get("Forwarded") == "no"]


def slug(patch: Patch) -> str:
    """The patch's name without number and ending; the same in every series that carries it."""
    return patch.name[len("0000-") :].removesuffix(".patch")


def needs(patch: Patch, series: Series) -> list[Patch]:
    """The earlier patches that create a module which ``patch`` imports, in their order."""
    added = "\n".join(_ADDED.findall(patch.data.decode("utf-8")))
    found = []
    for earlier in series.patches[: series.patches.index(patch)]:
        created = [change.path for change in earlier.changes if change.kind == "create"]
        modules = [path.removesuffix(".py").replace("/", ".") for path in created]
        if any(f"from {module} import" in added for module in modules):
            found += [one for one in needs(earlier, series) if one not in found]
            found.append(earlier)
    return found


def message(patch: Patch, sign_off: str | None) -> str:
    """The commit's message for upstream: subject and reason, signed off when asked for."""
    reason = patch.body.strip().rpartition("\n\n")[0]
    paragraphs = [patch.subject, *([reason] if reason else [])]
    paragraphs.append(textwrap.fill(patch.tags["Description"], 72))
    if sign_off is not None:
        paragraphs.append(f"Signed-off-by: {sign_off}")
    return "\n\n".join(paragraphs) + "\n"


def check_sign_off(sign_off: str) -> str:
    """Raises Refused when it is not of the form ``Name <mail@example.org>``."""
    if _SIGN_OFF.match(sign_off) is None:
        raise Refused(f"--sign-off {sign_off!r}: write 'Name <mail@example.org>'")
    return sign_off


def read_tests(root: Path, patch: Patch) -> Mapping[str, bytes]:
    """The tests of a candidate by path in vLLM's repository.

    Raises Refused when it has none, or one outside of ``tests/``.
    """
    folder = root / FOLDER / slug(patch)
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
    if not found:
        raise Refused(f"{patch.name} has no test: put one into {folder}/tests/")
    for path in found:
        if not path.startswith("tests/"):
            raise Refused(f"{folder}/{path} is not below tests/")
    return found


def export_candidate(
    patch: Patch,
    series: Series,
    pristine: Contents,
    tests: Mapping[str, Mapping[str, bytes]],
    sign_off: str | None = None,
) -> Candidate:
    """Make one stand-alone patch; proven to apply to the release and to compile there.

    Args:
        pristine: the release's Python files, or those that the series touches.
        tests: by patch name, for the candidate and what it needs.
        sign_off: ``Name <mail>``, author of the commits as well.

    Raises:
        Refused: it does not stand alone, that is, without the rest of the series.
        GitError: what it needs does not apply.
    """
    parts = [*needs(patch, series), patch]
    with tempfile.TemporaryDirectory(prefix="stagetap-upstream-") as temporary:
        folder = Path(temporary).resolve() / "vllm"
        files = {path: pristine.get(path) for path in series.paths}
        build_repository(folder, files, Series((), series.lock))
        for part in parts:
            git("am", "--quiet", "--keep-cr", cwd=folder, stdin=part.data)
            write_files(folder, tests[part.name])
            git("add", "--all", "--force", cwd=folder)
            author = [f"--author={sign_off}"] if sign_off is not None else []
            text = message(part, sign_off).encode()
            git("commit", "--quiet", "--amend", *author, "--file=-", cwd=folder, stdin=text)
            _compile(folder, part, [*(change.path for change in part.changes), *tests[part.name]])
        data = git(*FORMAT_PATCH, f"{PRISTINE_TAG}..HEAD", cwd=folder)
    paths = tuple(path for part in parts for path in tests[part.name])
    return Candidate(f"{slug(patch)}.patch", data, tuple(part.name for part in parts), paths)


def _compile(folder: Path, patch: Patch, paths: Iterable[str]) -> None:
    for path in paths:
        if error := compile_error(path, (folder / path).read_bytes()):
            raise Refused(f"{patch.name}: {error}")
