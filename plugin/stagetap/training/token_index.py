"""Which sample holds the states of a sequence of tokens."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from stagetap.errors import SampleNotFound
from stagetap.reader.dataset import HiddenStatesDataset


class TokenIndex:
    """Token digest -> sample id, over what a dataset has shown so far. May be pickled.

    Of several samples of the same tokens the first one counts. So a row of training data finds its
    states by what it is, in whatever order rows and samples lie.
    """

    def __init__(self) -> None:
        self._sample_of: dict[str, str] = {}
        self._known: set[tuple[str, str, str]] = set()
        self._looked_at = 0  # entries of this process's dataset

    def find(self, digest: str) -> str | None:
        """The sample of these tokens, if one was seen."""
        return self._sample_of.get(digest)

    def learn(self, dataset: HiddenStatesDataset) -> None:
        """Read the manifests of samples that were not seen before. Does not refresh.

        ``dataset`` is the same in every call of one process. Raises what reading a manifest raises.
        """
        entries = dataset.entries
        for position in range(self._looked_at, len(entries)):
            entry = entries[position]
            attempt = (entry.run_id, entry.sample_id, entry.attempt)
            if attempt not in self._known:
                self._known.add(attempt)
                with suppress(SampleNotFound):  # deleted meanwhile
                    manifest = dataset.manifest(position)
                    self._sample_of.setdefault(manifest.token_digest, manifest.sample_id)
        self._looked_at = len(entries)

    def __getstate__(self) -> dict[str, Any]:
        # Another process opens the dataset later, and may see another order.
        return self.__dict__ | {"_looked_at": 0}
