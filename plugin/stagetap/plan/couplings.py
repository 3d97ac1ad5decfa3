"""Settings that only make sense together: those of a server, its store and its consumers. Pure.

Each rule compares what a configuration says in one place with what it says, or what a draft or a
consumer needs, in another. What cannot be told is said as such, and what would lose samples or
train on other layers is a problem with its cure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stagetap.findings import Finding
from stagetap.stores.mooncake_uri import MooncakeOptions
from stagetap.wording import plain

MASTER_LEASE_S = 10.0
"""What a mooncake_master gives a reader unless it was started with another
``--default_kv_lease_ttl``."""

_LOOPBACK = ("127.", "localhost:", "[::1]:")


@dataclass(frozen=True)
class Served:
    """What the couplings of a server's configuration rest on.

    Attributes:
        layer_ids: captured, in the order in which the reader gives them back.
        num_hidden_layers: N; None where the model is not on this machine.
        token_bytes: taps of one token and its id, in the store; None likewise.
        max_len: longest sequence in tokens, None where it is vLLM's to derive.
        max_num_seqs: sequences that run at once; None where the configuration leaves it to vLLM.
        workers: processes that run layers, over all hosts.
        hosts: how many those are.
        publish_timeout_s: seconds from the end of a request to its commit.
    """

    layer_ids: tuple[int, ...]
    num_hidden_layers: int | None
    token_bytes: int | None
    max_len: int | None
    max_num_seqs: int | None
    workers: int
    hosts: int
    publish_timeout_s: float


@dataclass(frozen=True)
class Expected:
    """What is expected of a Mooncake store and of those who read from it.

    Attributes:
        lease_s: how long the master keeps what was read from being removed, in seconds.
        lent_bytes: memory that others than the engine's workers lend; None where nobody said.
        tokens_in_flight: tokens captured and not yet removed, at the worst; None counts what the
            engine itself may hold, full sequences in every place.
        consume_s: seconds from a sample's commit to its removal; None where nobody said.
    """

    lease_s: float = MASTER_LEASE_S
    lent_bytes: int | None = None
    tokens_in_flight: int | None = None
    consume_s: float | None = None


def check_draft(served: Served, draft_ids: Sequence[int], where: str) -> Iterator[Finding]:
    """Whether a draft finds what it reads, at the place where it looks.

    ``draft_ids`` are StageTap's, in the order of the draft's configuration; ``where`` names it.
    Trainers hand a draft the columns of ``hidden_states`` as they come: the captured ids without N.
    """
    last = served.num_hidden_layers
    columns = [layer for layer in served.layer_ids if layer != last]
    read = [layer for layer in draft_ids if layer != last]
    missing = [layer for layer in draft_ids if layer not in served.layer_ids]
    if missing:
        wrong = f"; {_ids(missing)} of these {'is' if len(missing) == 1 else 'are'} not captured"
    elif columns != read:
        wrong = f"; hidden_states holds {_ids(columns)}, and is handed to it as it is"
    else:
        wrong = ""
    also = [layer for layer in served.layer_ids if layer == last and layer not in draft_ids]
    yield Finding(
        "layers and draft",
        f"{where} reads {_ids(draft_ids)}{wrong}",
        f"capture {_ids([*draft_ids, *also])}" if wrong else None,
    )


def check_memory(served: Served, store: MooncakeOptions, expected: Expected) -> Iterator[Finding]:
    """Whether the memory that is lent holds what is in flight at the worst.

    A store that is full makes writes wait, and then fails their samples.
    """
    check = "memory and tokens in flight"
    tokens = _tokens_in_flight(served, expected)
    if tokens is None:
        yield Finding(
            check,
            "the configuration bounds neither sequences nor their length, so anything may be in "
            "flight",
            "set max-num-seqs and max-model-len, or say --tokens-in-flight",
        )
        return
    if served.token_bytes is None:
        yield Finding(check, "not told: the model's config.json is not on this machine")
        return
    needed, flight = bytes_in_flight(tokens, served.token_bytes, store)
    lent = served.workers * store.global_segment_size + (expected.lent_bytes or 0)
    if not lent:
        yield Finding(
            check,
            f"{flight}; the workers lend nothing (global_segment_size=0), and what others lend "
            "is not said",
            f"say --lent SIZE: what `stagetap store up --lend` was given, at least {needed:,}",
        )
        return
    if not expected.lent_bytes:
        yield from check_copies(store, served.workers)
    lenders = f"{served.workers} workers lend {store.global_segment_size:,} B each"
    if expected.lent_bytes:
        lenders = f"{lenders}, others {expected.lent_bytes:,} B"
    yield Finding(
        check,
        f"{flight}; {lenders}",
        f"lend {needed:,} B in all: {_more(needed, served, store, expected)}, or --max-num-seqs "
        f"{_sequences_that_fit(lent, served, store)}"
        if needed > lent
        else None,
    )


def _more(needed: int, served: Served, store: MooncakeOptions, expected: Expected) -> str:
    """How so much comes to be lent: whoever lends now lends more."""
    others = expected.lent_bytes or 0
    if others and not store.global_segment_size:
        return f"store up --lend {needed}"
    return f"global_segment_size={-(-max(needed - others, 0) // served.workers)}"


def bytes_in_flight(tokens: int, token_bytes: int, store: MooncakeOptions) -> tuple[int, str]:
    """What so many tokens take in a store, all copies counted, and the sum in words."""
    needed = tokens * token_bytes * store.replicas
    copies = f" in {store.replicas} copies" if store.replicas > 1 else ""
    return needed, f"{tokens:,} tokens of {token_bytes:,} B{copies} are {needed:,} B"


def check_copies(store: MooncakeOptions, lenders: int) -> Iterator[Finding]:
    """Whether every copy of an object finds a segment of its own."""
    if store.replicas > lenders:
        yield Finding(
            "copies and lenders",
            f"each object is stored in {store.replicas} copies (replicas), each with another "
            f"lender, and {lenders} lend",
            f"set replicas to at most {lenders}",
        )


def check_times(served: Served, store: MooncakeOptions, expected: Expected) -> Iterator[Finding]:
    """Whether leases, pins and timeouts outlast what they have to."""
    lease = (
        f"the master's lease is {plain(expected.lease_s)} s, lease_wait {plain(store.lease_wait)} s"
    )
    short = not store.force_remove and store.lease_wait <= expected.lease_s
    yield Finding(
        "lease and removal",
        lease,
        f"a removal would give up while its own read still holds a lease: set lease_wait above "
        f"{plain(expected.lease_s)}, or give the master a shorter lease"
        if short
        else None,
    )
    longest_write = store.space_wait + store.put_timeout
    yield Finding(
        "publishing",
        f"a write may take {plain(longest_write)} s (space_wait and put_timeout), a sample "
        f"{plain(served.publish_timeout_s)} s (publish_timeout_s)",
        f"set publish_timeout_s above {plain(longest_write)}, or space_wait lower: a sample would "
        "fail before its store says why"
        if served.publish_timeout_s <= longest_write
        else None,
    )
    yield _consumed(store, expected)


def check_hosts(served: Served, store: MooncakeOptions) -> Iterator[Finding]:
    """Whether workers on other hosts can reach the store's master."""
    if served.hosts == 1:
        return
    loopback = store.master.startswith(_LOOPBACK)
    yield Finding(
        "hosts and store",
        f"{served.hosts} hosts, master {store.master}",
        "only one host reaches that master: name an address that all of them reach"
        if loopback
        else None,
    )


def _consumed(store: MooncakeOptions, expected: Expected) -> Finding:
    check = "time until consumed"
    if expected.consume_s is None:
        return Finding(check, "not told: say --consume-time to have waits and pins compared")
    seconds = f"a sample is removed {plain(expected.consume_s)} s after its commit"
    if not store.hard_pin:
        lost = store.soft_pin < expected.consume_s
        return Finding(
            check,
            f"{seconds}; nothing is pinned hard, soft_pin {plain(store.soft_pin)} s",
            f"eviction would take samples that nobody has read: set soft_pin above "
            f"{plain(expected.consume_s)}, or hard_pin=on"
            if lost
            else None,
        )
    impatient = store.space_wait < expected.consume_s
    return Finding(
        check,
        f"{seconds}; a write to a full store waits {plain(store.space_wait)} s (space_wait)",
        f"a full store would fail samples before its consumer makes room: set space_wait to at "
        f"least {plain(expected.consume_s)}"
        if impatient
        else None,
    )


def _tokens_in_flight(served: Served, expected: Expected) -> int | None:
    """At least one sequence of full length, where that is known."""
    if expected.tokens_in_flight is not None:
        return max(expected.tokens_in_flight, served.max_len or 0)
    if served.max_num_seqs is None or served.max_len is None:
        return None
    return served.max_num_seqs * served.max_len


def _sequences_that_fit(lent: int, served: Served, store: MooncakeOptions) -> int:
    sequence = (served.max_len or 1) * (served.token_bytes or 1) * store.replicas
    return lent // sequence


def _ids(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))
