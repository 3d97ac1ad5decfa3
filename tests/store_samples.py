"""Samples with known values, written to real stores through the production path.

`value(k, t, h)` differs for every layer, token and hidden position, so that a swapped layer, a
dropped row or a foreign column is seen.
"""

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stagetap
from stagetap.manifest import Fragment, Layer, Manifest, Tapped, token_digest
from stagetap.publish.publisher import FragmentJob, FragmentReport, Publisher
from stagetap.stores.base import Invariant, SampleRef, StoreCommitter, StoreWriter
from stagetap.stores.file_committer import FileStoreCommitter
from stagetap.stores.file_writer import FileStoreWriter
from stagetap.stores.kind import kind_of

LAYERS = 6
HIDDEN = 16
RUN = "run-1"

_attempts = itertools.count()


def tapped(
    layer_ids: Sequence[int] = (2, 0, 4, 6),
    pp_layers: Sequence[tuple[int, int]] = ((0, 3), (3, 6)),
    **changes: Any,
) -> Tapped:
    """What a 6-layer model with two stages and hidden size 16 would be described as."""
    fields: dict[str, Any] = {
        "model": "tiny",
        "weights_fingerprint": "sha256:" + "ab" * 32,
        "weight_version": "0",
        "adapter": None,
        "stream": "residual",
        "norm_state": "pre_norm",
        "id_convention": "after_layer",
        "layer_ids": tuple(layer_ids),
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vllm_version": "0.32.0",
        "series_digest": "sha256:" + "cd" * 32,
        "pp_size": len(pp_layers),
        "tp_size": 1,
        "pp_layers": tuple(pp_layers),
        "kv_cache_dtype": "auto",
        "dtype": "bfloat16",
    }
    return Tapped(**(fields | changes))


def owned(what: Tapped, stage: int) -> tuple[Layer, ...]:
    """The layers of a stage, ascending: start < k <= end, and 0 on the first stage."""
    start, end = what.pp_layers[stage]
    ids = [k for k in sorted(what.layer_ids) if start < k <= end or (k == 0 and stage == 0)]
    last = what.num_hidden_layers
    return tuple(Layer(id=k, role="last" if k == last else "aux") for k in ids)


def states(layer_id: int, tokens: int, seed: int = 0, hidden: int = HIDDEN) -> torch.Tensor:
    """[T, H] float32: what the layer of this id holds."""
    generator = torch.Generator().manual_seed(1000 * seed + layer_id)
    return torch.randn(tokens, hidden, generator=generator)


def token_ids(tokens: int, seed: int = 0) -> np.ndarray:
    """int64 [T]."""
    return np.random.default_rng(seed).integers(0, 500, tokens, dtype=np.int64)


def job(
    what: Tapped, ref: SampleRef, stage: int, tokens: int, seed: int = 0, **changes: Any
) -> FragmentJob:
    """The job that publishes one stage's states."""
    layers = owned(what, stage)
    dtype = getattr(torch, what.dtype)
    columns = [states(layer.id, tokens, seed, what.hidden_size) for layer in layers]
    rows = torch.stack(columns, dim=1).to(dtype)
    lowest = min(s for s in range(what.pp_size) if owned(what, s))

    def gather(start: int, end: int, out: torch.Tensor) -> None:
        out.copy_(rows[start:end])

    fields: dict[str, Any] = {
        "ref": ref,
        "stage": stage,
        "layers": layers,
        "dtype": dtype,
        "shape": (tokens, len(layers), what.hidden_size),
        "token_ids": token_ids(tokens, seed) if stage == lowest else None,
        "gather": gather,
    }
    return FragmentJob(**(fields | changes))


def manifest(
    what: Tapped,
    ref: SampleRef,
    fragments: Sequence[Fragment],
    tokens: int,
    seed: int = 0,
    **changes: Any,
) -> Manifest:
    """The manifest of an attempt with these fragments."""
    fields: dict[str, Any] = {
        "manifest_version": 1,
        "sample_id": ref.sample_id,
        "run_id": ref.run_id,
        "attempt": ref.attempt,
        "token_count": tokens,
        "prompt_token_count": tokens,
        "token_digest": token_digest(token_ids(tokens, seed)),
        "fragments": tuple(sorted(fragments, key=lambda fragment: fragment.stage)),
        "tapped": what,
        "created_at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "metadata": {"seed": seed},
    }
    return Manifest(**(fields | changes))


def drain(publisher: Publisher, count: int, timeout_s: float = 30) -> list[FragmentReport]:
    """The next `count` reports."""
    reports: list[FragmentReport] = []
    deadline = time.monotonic() + timeout_s
    while len(reports) < count:
        reports += publisher.poll().reports
        assert time.monotonic() < deadline, f"{len(reports)} of {count} reports"
        time.sleep(0.001)
    return reports


class Engine:
    """One engine's use of a store: a committer, and one publisher that serves all stages."""

    def __init__(
        self,
        root: Path | tuple[StoreCommitter, StoreWriter],
        what: Tapped | None = None,
        run: str = RUN,
        invariant: Invariant | None = None,
        slots: int = 2,
        slot_bytes: int = 1 << 16,
    ) -> None:
        """`root`: a directory, or both sides of another store."""
        self.tapped = what or tapped()
        self.run = run
        self.committer: StoreCommitter
        self.writer: StoreWriter
        if isinstance(root, tuple):
            self.committer, self.writer = root
        else:
            self.committer = FileStoreCommitter(str(root))
            self.writer = FileStoreWriter(str(root))
        self.committer.leave_nonce(f"nonce-{run}")
        assert f"nonce-{run}" in self.writer.read_nonces()
        self.committer.begin_run(invariant or kind_of(self.tapped))
        self.publisher = Publisher(
            self.writer, slots, slot_bytes, writer_threads=2, refuse_nonfinite=True
        )

    def ref(self, sample_id: str) -> SampleRef:
        """A fresh attempt, in all processes of a test."""
        attempt = f"attempt-{os.getpid()}-{next(_attempts)}"
        return SampleRef(run_id=self.run, sample_id=sample_id, attempt=attempt)

    def publish(
        self, ref: SampleRef, tokens: int, seed: int = 0, ids: np.ndarray | None = None
    ) -> Manifest:
        """Write all fragments and return the manifest, not committed."""
        stages = [s for s in range(self.tapped.pp_size) if owned(self.tapped, s)]
        for stage in stages:
            made = job(self.tapped, ref, stage, tokens, seed)
            if ids is not None and made.token_ids is not None:
                made = replace(made, token_ids=ids)
            self.publisher.submit(made)
        reports = drain(self.publisher, len(stages))
        assert [report.error for report in reports] == [None] * len(stages), reports
        fragments = [report.fragment for report in reports if report.fragment is not None]
        return manifest(self.tapped, ref, fragments, tokens, seed)

    def export(self, sample_id: str, tokens: int = 7, seed: int = 0) -> Manifest:
        """Write and commit one sample."""
        made = self.publish(self.ref(sample_id), tokens, seed)
        self.committer.commit(made)
        return made

    def close(self) -> None:
        """End as an engine ends."""
        assert self.publisher.shutdown(10) == []
        self.committer.close()
        self.writer.close()


def visible(root: Path) -> list[str]:
    """Samples that a reader of the store sees."""
    return stagetap.open_dataset(root, verify=True).sample_ids


def files(root: Path) -> set[str]:
    """Every file below a directory, named from there."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
