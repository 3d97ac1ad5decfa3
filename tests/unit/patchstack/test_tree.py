"""States follow from hashes alone: every mixture of files has one answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stagetap.patchstack.series import Lock, Pin, Series, sha256
from stagetap.patchstack.tree import file_states, first_foreign, overall_state, pristine_contents


def _series(**files: tuple[bytes | None, bytes]) -> Series:
    pins = {
        path: Pin(sha256(before), sha256(after) or "") for path, (before, after) in files.items()
    }
    return Series((), Lock("0.32.0", "", pins))


WANTED = _series(a=(b"a0", b"a1"), b=(b"b0", b"b1"), new=(None, b"n1"))
OLDER = _series(a=(b"a0", b"a-old"), c=(b"c0", b"c-old"))
KNOWN = [WANTED, OLDER]
PRISTINE = {"a": b"a0", "b": b"b0", "c": b"c0", "new": None}
APPLIED = PRISTINE | {"a": b"a1", "b": b"b1", "new": b"n1"}

_contents = {
    "a": ["pristine", "applied", "outdated"],
    "b": ["pristine", "applied"],
    "c": ["pristine", "outdated"],
    "new": ["pristine", "applied"],
}
_bytes = {
    ("a", "outdated"): b"a-old",
    ("c", "outdated"): b"c-old",
    **{(path, "pristine"): data for path, data in PRISTINE.items()},
    **{(path, "applied"): data for path, data in APPLIED.items() if path != "c"},
}
_mixtures = st.fixed_dictionaries({path: st.sampled_from(s) for path, s in _contents.items()})


@given(_mixtures)
def test_every_mixture_of_known_files_has_one_state(mixture: dict[str, str]) -> None:
    files = {path: _bytes[path, state] for path, state in mixture.items()}
    states = file_states(files, WANTED, KNOWN)
    assert states == mixture
    assert first_foreign(states) is None
    if files == APPLIED:
        expected = "applied"
    elif files == PRISTINE:
        expected = "pristine"
    else:
        expected = "outdated" if "outdated" in mixture.values() else "partial"
    assert overall_state(states, WANTED) == expected


@given(_mixtures, st.sampled_from(sorted(PRISTINE)), st.sampled_from([b"foreign", None]))
def test_one_foreign_file_makes_the_package_foreign(
    mixture: dict[str, str], path: str, data: bytes | None
) -> None:
    if (path, data) == ("new", None):
        return  # that is its pristine state
    files = {name: _bytes[name, state] for name, state in mixture.items()} | {path: data}
    states = file_states(files, WANTED, KNOWN)
    assert overall_state(states, WANTED) == "foreign"
    assert (first_foreign(states) or "").startswith(f"{path} ")


def test_pristine_files_need_no_patch_to_be_undone() -> None:
    assert pristine_contents(PRISTINE, KNOWN) == PRISTINE
