"""Clients of a soak: each sends one request after the other, and remembers how it ended."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

KINDS = {
    "prefill_only": 5,
    "include_output": 3,
    "accepted": 1,
    "stream": 1,
    "ordinary": 3,
    "abort": 3,
    "duplicate": 1,
    "bad": 1,
}
"""What a client does next, and how often."""

VOCABULARY = 500


@dataclass
class Ledger:
    """How every exporting request ended, as its sender saw it."""

    ended: Counter[str] = field(default_factory=Counter)
    unknown: list[tuple[str, str]] = field(default_factory=list)  # (what it is else, sample id)
    committed: list[str] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    ordinary: int = 0
    suspended: int = 0  # of the refused ones, those that met an open breaker
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def sent(self) -> int:
        """Exporting requests."""
        return sum(self.ended.values()) + len(self.unknown)

    def settle(self, readable: set[str]) -> None:
        """What a sender could not know: whether an accepted or aborted sample was committed."""
        for otherwise, name in self.unknown:
            self.ended["committed" if name in readable else otherwise] += 1
        self.unknown.clear()
        missing = [name for name in self.committed if name not in readable]
        self.surprises += [f"{name} was committed and cannot be read" for name in missing[:5]]


class Client(threading.Thread):
    """Sends until told to stop."""

    def __init__(self, number: int, seed: int, http: httpx.Client, ledger: Ledger):
        super().__init__(name=f"client-{number}", daemon=True)
        self._number = number
        self._random = random.Random(f"{seed}/{number}")
        self._http = http
        self._ledger = ledger
        self._count = 0
        self._told_to_stop = threading.Event()

    def stop(self) -> None:
        self._told_to_stop.set()

    def run(self) -> None:
        while not self._told_to_stop.is_set():
            (kind,) = self._random.choices(list(KINDS), list(KINDS.values()))
            self._count += 1
            try:
                self._send(kind, f"c{self._number}-{self._count}")
            except httpx.HTTPError as error:
                with self._ledger.lock:
                    self._ledger.surprises.append(f"{kind}: {error!r}")

    def _send(self, kind: str, name: str) -> None:
        rng = self._random
        body: dict[str, Any] = {
            "model": "soak",
            "prompt": [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 120))],
            "max_tokens": rng.randrange(1, 24),
            "temperature": 0,
            "ignore_eos": True,
        }
        if kind == "ordinary":
            answer = self._http.post("/v1/completions", json=body)
            with self._ledger.lock:
                self._ledger.ordinary += 1
                if answer.status_code != 200:
                    self._ledger.surprises.append(f"ordinary: {answer.text[:300]}")
            return
        options: dict[str, Any] = {"sample_id": name}
        if kind in ("prefill_only", "include_output"):
            options[kind] = True
        if kind == "accepted":
            options["completion"] = "accepted"
        if kind == "bad":
            options["sampel"] = name
        body["kv_transfer_params"] = {"stagetap": options}
        if kind == "abort":
            body["max_tokens"] = rng.choice([1, 60])
            self._abort(name, body, rng.uniform(0, 0.5))
            return
        if kind == "stream":
            self._stream(name, body)
            return
        if kind == "duplicate":
            with self._ledger.lock:
                taken = self._ledger.committed[-1:]
            if taken:
                options["sample_id"] = taken[0]
        self._note(kind, options["sample_id"], self._http.post("/v1/completions", json=body))

    def _abort(self, name: str, body: dict[str, Any], after: float) -> None:
        """Go away after a while, whatever the request does then."""
        try:
            timeout = httpx.Timeout(60, read=max(after, 0.001))
            answer = self._http.post("/v1/completions", json=body, timeout=timeout)
        except httpx.TimeoutException:
            with self._ledger.lock:
                self._ledger.unknown.append(("aborted", name))
        else:
            self._note("abort", name, answer)

    def _stream(self, name: str, body: dict[str, Any]) -> None:
        with self._http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        with self._ledger.lock:
            if answer.status_code in (400, 503):
                self._ledger.ended["refused"] += 1
            elif any('"error"' in line for line in lines):
                self._ledger.ended["failed"] += 1
            elif lines and lines[-1] == "data: [DONE]":
                self._ledger.ended["committed"] += 1
                self._ledger.committed.append(name)
            else:
                self._ledger.surprises.append(f"stream: {answer.status_code} {lines[-1:]}")

    def _note(self, kind: str, name: str, answer: httpx.Response) -> None:
        with self._ledger.lock:
            if answer.status_code == 200:
                state = answer.json()["kv_transfer_params"]["stagetap"]["state"]
                if state == "accepted":
                    self._ledger.unknown.append(("failed", name))
                    return
                self._ledger.ended[state] += 1
                self._ledger.committed.append(name)
            elif answer.status_code == 500 and "stagetap" in answer.text:
                self._ledger.ended["failed"] += 1
            elif answer.status_code in (400, 503) and "stagetap" in answer.text:
                self._ledger.ended["refused"] += 1
                self._ledger.suspended += answer.status_code == 503
            else:
                self._ledger.surprises.append(f"{kind}: {answer.status_code} {answer.text[:300]}")


def run_clients(http: httpx.Client, ledger: Ledger, seed: int, count: int, seconds: float) -> None:
    """Let ``count`` clients send for a while, and wait until each has its last answer."""
    clients = [Client(number, seed, http, ledger) for number in range(count)]
    for client in clients:
        client.start()
    time.sleep(seconds)
    for client in clients:
        client.stop()
    for client in clients:
        client.join(120)
        if client.is_alive():
            ledger.surprises.append(f"{client.name} got no answer within 120 s")
