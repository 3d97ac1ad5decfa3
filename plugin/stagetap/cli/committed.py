"""What a store holds, seen without torch and without an engine."""

from __future__ import annotations

from collections.abc import Iterable

from stagetap.errors import ForeignStore, Refused
from stagetap.manifest import Manifest, token_digest
from stagetap.prompts import TokenPrompt
from stagetap.stores.base import CommitEntry, StoreReader, open_store_reader


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
    """The samples of one run in a store; none where there is no store yet.

    Raises StoreError when there is a store whose commits cannot be read.
    """

    def __init__(self, uri: str, run_id: str) -> None:
        self._uri = uri
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

    def missing(self, prompts: Iterable[TokenPrompt]) -> list[TokenPrompt]:
        """The prompts that are not committed.

        Raises:
            Refused: an id is committed with another prompt: resuming would mix two files up.
        """
        missing = []
        for prompt in prompts:
            entry = self._entries.get(prompt.sample_id)
            if entry is None or self._reader is None:
                missing.append(prompt)
            elif not _is_of(self._reader.manifest(entry), prompt):
                raise Refused(
                    f"line {prompt.number}: sample {prompt.sample_id!r} is committed with another "
                    "prompt; give the line another id, or choose another --run"
                )
        return missing


def _is_of(manifest: Manifest, prompt: TokenPrompt) -> bool:
    if manifest.prompt_token_count != len(prompt.token_ids):
        return False
    # The digest covers output tokens as well, so it speaks of the prompt only where there are none.
    with_output = manifest.token_count > manifest.prompt_token_count
    return with_output or manifest.token_digest == token_digest(prompt.token_ids)
