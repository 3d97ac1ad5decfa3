"""The Mooncake store against the least there is to do, and against hs-connectors 0.9.0.

One process writes and reads; the memory is lent by another one, over TCP, or by itself, which
Mooncake copies to. Everything is measured turn by turn in one run, so that a machine that gets
slower meanwhile favours nobody, and the fastest turns are compared: others on the machine can only
make a turn slower. What is published lies in pages, as in an engine.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from stagetap.engine.pages import page_pieces, page_reader, spanned_memory
from stagetap.manifest import Fragment, Layer, Manifest
from stagetap.options import ConnectorOptions
from stagetap.publish.publisher import FragmentJob, Publisher
from stagetap.reader.dataset import read_sample
from stagetap.stores.base import SampleRef
from stagetap.stores.kind import kind_of
from stagetap.stores.mooncake_client import MooncakeClient, open_client
from stagetap.stores.mooncake_committer import MooncakeStoreCommitter
from stagetap.stores.mooncake_layout import keys_of, page_key, sample_commit_key
from stagetap.stores.mooncake_processes import Master, MemoryHost
from stagetap.stores.mooncake_reader import MooncakeStoreReader
from stagetap.stores.mooncake_uri import parse_uri
from stagetap.stores.mooncake_writer import MooncakeStoreWriter
from store_samples import drain, manifest, tapped, token_ids

Lender = Literal["another process", "the worker"]
LENDERS: tuple[Lender, ...] = ("another process", "the worker")

MIB = 1 << 20
SIZES_MIB = (1, 4, 16, 64)
LENT_BYTES = 1024 * MIB
_LAYERS, _HIDDEN, _BLOCK = 4, 4096, 16  # a row is 32 KiB, a page half a MiB
_ROWS_PER_MIB = MIB // (_LAYERS * _HIDDEN * 2)

PUBLISH = ("direct", "direct, no checksum", "staged", "staged, no checksum")
AT_ONCE = 4

OVER_PLAIN = {
    **{f"publish {name}": "put_from" for name in PUBLISH},
    f"publish direct, {AT_ONCE} at once": "put_from",
    f"publish staged, {AT_ONCE} at once": "put_from",
    "read": "get_into",
    "read and verify": "get_into",
}
OVER_STAGED = {
    "publish direct": "publish staged",
    "publish direct, no checksum": "publish staged, no checksum",
    f"publish direct, {AT_ONCE} at once": f"publish staged, {AT_ONCE} at once",
}
OVER_HS = {
    "publish direct, no checksum": "hs write",
    "publish staged, no checksum": "hs write",
    "publish and commit": "hs write",
    "publish direct": "hs write",
    "read": "hs get",
}


@dataclass(frozen=True)
class MooncakeFigures:
    """Samples of one size, and of one lender.

    Attributes:
        seconds: of the fastest turn. `put_from` and `get_into` are one plain call for as much;
            `publish ...` is from a job's submission to its report, or a share of `AT_ONCE` jobs;
            `read` is a sample by our reader, from its manifest on. `hs put` is `put_sample` of
            hs-connectors from a contiguous tensor, `hs write` what its connector does: rows out of
            pages, a look for NaN, `put_sample`; `hs get` is `get_sample`.
        over_plain: bytes/s over those of the plain call (`OVER_PLAIN`).
        over_staged: from pages over the same through slots (`OVER_STAGED`).
        over_hs: the same over hs-connectors (`OVER_HS`); empty when that is not installed.
    """

    lender: Lender
    mib: int
    turns: int
    seconds: dict[str, float]
    over_plain: dict[str, float]
    over_staged: dict[str, float]
    over_hs: dict[str, float]


def measure(
    lender: Lender, turns: int, sizes_mib: Sequence[int] = SIZES_MIB
) -> list[MooncakeFigures]:
    """Start a store and measure each size, `turns` times after a round to warm up."""
    torch.set_num_threads(1)
    with _bench(lender) as bench:
        return [bench.measure(mib, turns) for mib in sizes_mib]


@contextmanager
def _bench(lender: Lender) -> Iterator[_Bench]:
    with ExitStack() as opened:
        master = opened.enter_context(Master())
        lent = LENT_BYTES
        if lender == "another process":
            opened.enter_context(MemoryHost(master.address, LENT_BYTES))
            time.sleep(2)  # it lends a moment after its start
            lent = 0
        client = open_client(
            parse_uri(f"mooncake://{master.address}/bench?global_segment_size={lent}"), "writer"
        )
        opened.callback(client.close)
        bench = _Bench(lender, client, _hs_store(client))
        opened.callback(bench.shut_down)
        yield bench


def _hs_store(client: MooncakeClient) -> Any | None:
    """The store of hs-connectors, on the same connection; None when it is not installed."""
    if importlib.util.find_spec("hs_connectors") is None:
        return None
    from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig

    store = MooncakeHiddenStatesStore(MooncakeStoreConfig())
    store._store = client._store
    return store


class _Bench:
    def __init__(self, lender: Lender, client: MooncakeClient, hs: Any | None) -> None:
        self._lender: Lender = lender
        self._client = client
        self._hs = hs
        self._numbers = itertools.count()
        self._tapped = tapped(
            layer_ids=range(1, _LAYERS + 1),
            pp_layers=((0, _LAYERS + 1),),
            num_hidden_layers=_LAYERS + 1,
            hidden_size=_HIDDEN,
        )
        self._committer = MooncakeStoreCommitter(client, "bench", 1.0)
        self._committer.leave_nonce("bench")
        self._committer.begin_run(kind_of(self._manifest(self._ref(), (), 1).tapped))
        self._reader = MooncakeStoreReader(
            lambda: client, "bench", lease_wait_s=1.0, force_remove=True
        )
        blocks = 1 + max(SIZES_MIB) * _ROWS_PER_MIB // _BLOCK
        self._pages = torch.randn(blocks, _BLOCK, _LAYERS, _HIDDEN).to(torch.bfloat16)
        self._buffer = np.ones(max(SIZES_MIB) * MIB, np.uint8)
        client.register(self._buffer.ctypes.data, self._buffer.nbytes, self._buffer)
        options = ConnectorOptions(layers=(0,), store="any")  # for their defaults
        self._publishers = {
            name: Publisher(
                MooncakeStoreWriter(client, "bench", 1.0),
                slots=options.slots,
                slot_bytes=options.slot_bytes,
                writer_threads=options.writer_threads,
                refuse_nonfinite=True,
                checksum="none" if name.endswith("no checksum") else "xxh3_64",
            )
            for name in PUBLISH
        }
        MooncakeStoreWriter(client, "bench", 1.0).use_memory(spanned_memory(self._pages))

    def measure(self, mib: int, count: int) -> MooncakeFigures:
        """The fastest of so many turns with samples of this size, after one to warm up."""
        tokens = mib * _ROWS_PER_MIB
        arms: dict[str, Callable[[int], dict[str, float]]] = {
            "plain": self._plain,
            **{name: lambda n, name=name: self._ours(name, n) for name in PUBLISH},
            **{
                f"{name} at once": lambda n, name=name: self._at_once(name, n)
                for name in ("direct", "staged")
            },
        }
        if self._hs is not None:
            arms["hs"] = self._theirs
        turns: list[dict[str, float]] = []
        for turn in range(count + 1):
            names = list(arms)
            found: dict[str, float] = {}
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                found |= arms[name](tokens)
            turns.append(found)
        seconds = {name: min(turn[name] for turn in turns[1:]) for name in turns[0]}

        def ratios(pairs: dict[str, str]) -> dict[str, float]:
            return {
                ours: seconds[theirs] / seconds[ours]
                for ours, theirs in pairs.items()
                if theirs in seconds
            }

        return MooncakeFigures(
            lender=self._lender,
            mib=mib,
            turns=count,
            seconds=seconds,
            over_plain=ratios(OVER_PLAIN),
            over_staged=ratios(OVER_STAGED),
            over_hs=ratios(OVER_HS),
        )

    def shut_down(self) -> None:
        """End what uses the client."""
        for publisher in self._publishers.values():
            publisher.shutdown(10)

    def _plain(self, tokens: int) -> dict[str, float]:
        size = tokens * MIB // _ROWS_PER_MIB
        key, address = f"plain-{next(self._numbers)}", self._buffer.ctypes.data
        store, config = self._client._store, self._client._config()
        codes = []
        found = {
            "put_from": _seconds(lambda: codes.append(store.put_from(key, address, size, config))),
            "get_into": _seconds(lambda: codes.append(store.get_into(key, address, size))),
        }
        assert codes == [0, size], codes
        self._client.remove([key], force=True)
        return found

    def _ours(self, name: str, tokens: int) -> dict[str, float]:
        (made,), seconds = self._publish(name, tokens, 1)
        found = {f"publish {name}": seconds}
        verify = made.fragments[0].checksum != "none"
        index = self._committer._known_index()
        page = page_key("bench", index.writer, index.next_seq)
        committed = _seconds(lambda: self._committer.commit(made))
        if name == "direct, no checksum":
            found["publish and commit"] = seconds + committed
        started = time.perf_counter()
        sample = read_sample(self._reader, made, verify)
        taken = time.perf_counter() - started
        if name.startswith("direct"):
            found["read and verify" if verify else "read"] = taken
        assert torch.equal(sample.hidden_states, self._rows(tokens))
        commit = sample_commit_key("bench", made.sample_id)
        self._client.remove([*keys_of(made), commit, page], force=True)
        return found

    def _at_once(self, name: str, tokens: int) -> dict[str, float]:
        made, seconds = self._publish(name, tokens, AT_ONCE)
        for each in made:
            self._client.remove(keys_of(each), force=True)
        return {f"publish {name}, {AT_ONCE} at once": seconds / AT_ONCE}

    def _publish(self, name: str, tokens: int, count: int) -> tuple[list[Manifest], float]:
        """So many samples, submitted at once, and how long the last one took."""
        block_ids = range(1, 1 + tokens // _BLOCK)
        publisher, ids = self._publishers[name], token_ids(tokens)
        for _ in range(count):
            publisher.submit(
                FragmentJob(
                    ref=self._ref(),
                    stage=0,
                    layers=tuple(Layer(id=k, role="aux") for k in self._tapped.layer_ids),
                    dtype=torch.bfloat16,
                    shape=(tokens, _LAYERS, _HIDDEN),
                    token_ids=ids,
                    gather=page_reader(self._pages, block_ids),
                    pieces=page_pieces(self._pages, block_ids) if "direct" in name else None,
                )
            )
        reports = drain(publisher, count)
        made = []
        for report in reports:
            assert report.fragment is not None, report.error
            made.append(self._manifest(report.ref, (report.fragment,), tokens))
        return made, max(report.seconds for report in reports)

    def _rows(self, tokens: int) -> torch.Tensor:
        """What is published: [tokens, L, H]."""
        return self._pages[1 : 1 + tokens // _BLOCK].flatten(0, 1)

    def _theirs(self, tokens: int) -> dict[str, float]:
        from hs_connectors.mooncake_store import assert_finite, packed_layout

        assert self._hs is not None
        ids = torch.from_numpy(token_ids(tokens))
        # Pages as vLLM has them: [num_blocks, L, block_size, H].
        pages = self._pages.transpose(1, 2)
        slots = torch.arange(_BLOCK, _BLOCK + tokens)
        tensors = {"hidden_states": self._rows(tokens), "token_ids": ids}
        layout, size = packed_layout({n: (tuple(t.shape), t.dtype) for n, t in tensors.items()})
        said = {
            "handle": f"theirs-{next(self._numbers)}",
            "version": 1,
            "tensors": layout,
            "metadata": {"total_aligned_bytes": size},
        }
        again = {**said, "handle": f"theirs-{next(self._numbers)}"}

        def write() -> None:
            rows = pages[slots // _BLOCK, :, slots % _BLOCK]  # vLLM's extract_from_kv_cache
            assert_finite("hidden_states", rows)
            self._hs.put_sample(again, {"hidden_states": rows, "token_ids": ids})

        found = {
            "hs put": _seconds(lambda: self._hs.put_sample(said, tensors)),
            "hs write": _seconds(write),
            "hs get": _seconds(lambda: self._hs.get_sample(said)),
        }
        for each in (said, again):
            self._hs.delete_sample(each["handle"])
        return found

    def _ref(self) -> SampleRef:
        number = next(self._numbers)
        return SampleRef(run_id="bench", sample_id=f"s{number}", attempt=f"a{number}")

    def _manifest(self, ref: SampleRef, fragments: Sequence[Fragment], tokens: int) -> Manifest:
        return manifest(self._tapped, ref, fragments, tokens)


def _seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
