"""What a store holds, seen without torch and without an engine."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stagetap.errors import ForeignStore, Refused
from stagetap.manifest import Manifest, token_digest
from stagetap.prompts import TokenPrompt
from stagetap.stores.base import CommitEntry, StoreReader, file_root, open_store_reader
from stagetap.stores.file_jobs import CaptureNote, read_note, write_note


def live_commits(reader: StoreReader) -> list[CommitEntry]:
    """The commits that count, in order: not deleted, and the earliest of each sample.

    Raises StoreError, CorruptLog.
    """
    commits, deletes = reader.poll()
    gone = {(entry.run_id, entry.sample_id, entry.attempt) for entry in deletes}
    counting: dict[tuple[str, str], CommitEntry] = {}
    for entry in sorted(commits, key=lambda entry: entry.order):
        if (entry.run_id, entry.sample_id, entry.attempt) not in gone:
            counting.setdefault((entry.run_id, entry.sample_id), entry)
    return list(counting.values())


class CommittedSamples:
    """The samples of one run in a directory; none where there is no store yet.

    Raises StoreError when there is a store whose commits cannot be read.
    """

    def __init__(self, uri: str, run_id: str) -> None:
        self._root = file_root(uri)
        self._run_id = run_id
        self._entries: dict[str, CommitEntry] = {}
        self._reader: StoreReader | None = None
        try:
            self._reader = open_store_reader(uri)
        except ForeignStore:
            return  # The engine claims the directory, or says why it cannot.
        self._entries = {
            entry.sample_id: entry for entry in live_commits(self._reader) if entry.run_id == run_id
        }

    def __len__(self) -> int:
        return len(self._entries)

    def check(self, asked: CaptureNote) -> None:
        """Hold what is there against a job that would go on with it.

        Args:
            asked: what decides rows and values of the job's samples.

        Raises:
            Refused: the run was asked for something else.
            StoreError: what the run was asked for cannot be read.
        """
        if not self._entries:
            return
        note = read_note(self._root, self._run_id)
        if note is None:
            raise Refused(
                f"run {self._run_id!r} of {self._root} was not captured by `stagetap capture`, so "
                "what its samples should hold is not known; choose another --run"
            )
        if note != asked:
            raise Refused(
                f"run {self._run_id!r} of {self._root} was captured with {_in_words(note)}, not "
                f"with {_in_words(asked)}; ask for the same, or choose another --run"
            )

    def leave_note(self, asked: CaptureNote) -> None:
        """Say in the store what its run is asked for; the store is there. Raises StoreError."""
        if read_note(self._root, self._run_id) != asked:
            write_note(self._root, self._run_id, asked)

    def missing(self, prompts: Iterable[TokenPrompt]) -> list[TokenPrompt]:
        """The prompts that are not committed.

        Raises:
            Refused: an id is committed with another prompt: resuming would mix two files up.
            StoreError: the token ids of one cannot be read.
        """
        missing = []
        for prompt in prompts:
            entry = self._entries.get(prompt.sample_id)
            if entry is None or self._reader is None:
                missing.append(prompt)
            elif not _is_of(self._reader, self._reader.manifest(entry), prompt):
                raise Refused(
                    f"line {prompt.number}: sample {prompt.sample_id!r} is committed with another "
                    "prompt; give the line another id, or choose another --run"
                )
        return missing


def _is_of(reader: StoreReader, manifest: Manifest, prompt: TokenPrompt) -> bool:
    if manifest.prompt_token_count != len(prompt.token_ids):
        return False
    if manifest.token_count == manifest.prompt_token_count:
        return manifest.token_digest == token_digest(prompt.token_ids)
    # The digest covers output tokens as well; the ids lie in one of the fragments.
    fragment = next(each for each in manifest.fragments if each.input_ids)
    ids = np.frombuffer(reader.fragment(manifest, fragment).input_ids or b"", "<i8")
    return np.array_equal(ids[: manifest.prompt_token_count], prompt.token_ids)


def _in_words(note: CaptureNote) -> str:
    said = [f"{name}={value}" for name, value in note.engine_args.items()]
    return ", ".join([f"--include-output {note.include_output}", *said])
