"""The steps of ``stagetap demo-train``, each by the command that its users have."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stagetap.cli.child import run_module
from stagetap.cli.demo_train_prompts import held_out_prompts, training_prompts
from stagetap.cli.folders import make_folder, write_file
from stagetap.errors import Refused
from stagetap.stores.file_io import naming
from stagetap.training.loss_curve import LossCurve
from stagetap.training.rows import METADATA_KEY

if TYPE_CHECKING:
    from stagetap.prompts import TokenPrompt

TAPS = (2, 15, 27)
ANSWER_TOKENS = 180
SERVED_DTYPE = "float32"
"""Of target and draft where tokens are compared. A step that checks a draft has more rows than one
without, which is rounded otherwise; in bfloat16 that decides near ties, which SmolLM2 meets often:
nine of the twelve held-out prompts go on otherwise in bfloat16 than in float32, without a draft."""
OURS = (
    *("prompts.jsonl", "answered.jsonl", "dataset", "rows", "dspark", "eagle3"),
    *("dspark.png", "eagle3.png", "logs"),
)

_TRAINING = (
    *("--target-layer-ids", *TAPS, "--draft-vocab-size", 4096, "--total-seq-len", 512),
    *("--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--optimizer", "adamw"),
    # Nothing is chosen by validation here, and so few rows are all wanted for training.
    *("--num-workers", 0, "--seed", 0, "--train-data-ratio", 0.98),
)


@dataclass(frozen=True)
class Method:
    """One kind of draft: how it is trained, and how it is served.

    Attributes:
        name: what speculators and vLLM call it.
        arguments: of speculators, for its shape.
        speculative_tokens: how many are drafted at a time.
        epochs: passes over the rows.
        runner: the model runner that can serve it, and the faster one if both can.
        held_out: how many prompts it is measured on, and ``tokens`` how many are decoded for each.
    """

    name: str
    arguments: tuple[object, ...]
    speculative_tokens: int
    epochs: int
    runner: str
    held_out: int
    tokens: int


DSPARK = Method(
    name="dspark",
    arguments=(
        *("--num-layers", 2, "--full-attention-indices", 0, 1, "--block-size", 4),
        # <empty_output>: a token of SmolLM2 that no text of its has.
        *("--markov-rank", 64, "--max-anchors", 96, "--mask-token-id", 16),
    ),
    speculative_tokens=4,
    epochs=12,
    runner="v2",
    held_out=12,
    tokens=48,
)
EAGLE3 = Method(
    name="eagle3",
    arguments=("--num-layers", 1, "--full-attention-indices", 0, "--ttt-steps", 3),
    speculative_tokens=3,
    epochs=9,
    runner="v1",
    held_out=24,
    tokens=96,
)


@dataclass(frozen=True)
class Served:
    """What decoding the held-out prompts gave.

    Attributes:
        outputs: the tokens of each prompt.
        drafts: how often tokens were drafted, ``drafted`` and ``accepted`` how many.
        accepted_at: of those, by position in the draft.
    """

    outputs: list[list[int]]
    drafts: int
    drafted: int
    accepted: int
    accepted_at: list[int]

    @classmethod
    def of(cls, result: dict[str, Any]) -> Served:
        """From what the engine wrote; without a draft nothing was counted."""
        counted = result["counted"]
        return cls(
            outputs=result["outputs"],
            drafts=int(counted.get("drafts", 0)),
            drafted=int(counted.get("draft_tokens", 0)),
            accepted=int(counted.get("accepted_tokens", 0)),
            accepted_at=[int(count) for count in counted.get("accepted_tokens_per_pos", [])],
        )

    @property
    def accepted_share(self) -> float:
        """Of the drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_length(self) -> float:
        """Tokens that one step of the target gives: its own and the accepted ones."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


@dataclass(frozen=True)
class Report:
    method: Method
    curve: LossCurve
    picture: Path
    plain: Served
    untrained: Served
    trained: Served
    seconds: dict[str, float]
    captured: str

    @property
    def same_tokens(self) -> bool:
        """Whether drafts changed nothing of what was decoded."""
        return self.plain.outputs == self.untrained.outputs == self.trained.outputs

    @property
    def passed(self) -> bool:
        """What the demo is there to show."""
        return self.same_tokens and self.trained.accepted_share > self.untrained.accepted_share


class Demo:
    def __init__(self, model: str, out: Path, method: Method, epochs: int) -> None:
        self._model = model
        self._out = out
        self._method = method
        self._epochs = epochs
        self._seconds: dict[str, float] = {}

    def run(self, notify: Callable[[str], None]) -> Report:
        out, method = self._out, self._method
        for name in ("rows", method.name, f"{method.name}.png"):
            _remove(out / name)
        for folder in (out / "logs", self._folder):
            make_folder(folder)
        self._capture(notify)
        with self._timed("training", notify, f"training a {method.name} draft"):
            self._train("untrained", "--dry-run")
            self._train("trained", *self._reading())
        curve = self._curve()
        picture = out / f"{method.name}.png"
        with naming("write", str(picture)):
            curve.draw(picture, f"SmolLM2-135M, {method.name}")
        with self._timed("serving", notify, "decoding held-out prompts, without a draft and with"):
            served = {
                name: self._serve(name, draft)
                for name, draft in (
                    ("plain", None),
                    ("untrained", self._folder / "untrained"),
                    ("trained", self._folder / "trained" / str(self._epochs - 1)),
                )
            }
        return Report(
            method=method,
            curve=curve,
            picture=picture,
            plain=served["plain"],
            untrained=served["untrained"],
            trained=served["trained"],
            seconds=self._seconds,
            captured=self._captured(),
        )

    @property
    def _folder(self) -> Path:
        return self._out / self._method.name

    @property
    def _metrics(self) -> Path:
        return self._folder / "metrics.jsonl"

    def _capture(self, notify: Callable[[str], None]) -> None:
        answered = self._out / "answered.jsonl"
        if not answered.exists():
            with self._timed("answering", notify, "letting the target answer the prompts"):
                self._answer(answered)
        with self._timed("capturing", notify, "capturing prompts and answers, two stages"):
            self._stagetap(
                *("capture", "--model", self._model, "--prompts", answered),
                *("--out", self._out / "dataset", "--resume", "--pp", 2),
                *("--layers", ",".join(map(str, (*TAPS, "last")))),
            )
            self._stagetap(
                *("rows", self._out / "dataset", "--out", self._out / "rows"),
                *("--learn-from", "metadata"),
            )

    def _answer(self, file: Path) -> None:
        """Write prompts with their greedy answers, as ``stagetap capture`` takes them."""
        prompts = self._tokenized(self._out / "prompts.jsonl", training_prompts())
        result = self._decode(
            "answers", "v1", prompts=[prompt.token_ids for prompt in prompts], tokens=ANSWER_TOKENS
        )
        lines = [
            {
                "id": prompt.sample_id,
                "prompt_token_ids": [*prompt.token_ids.tolist(), *answer],
                "metadata": {METADATA_KEY: len(prompt.token_ids)},
            }
            for prompt, answer in zip(prompts, result["outputs"], strict=True)
        ]
        write_file(file, "".join(json.dumps(line) + "\n" for line in lines))

    def _train(self, name: str, *arguments: object) -> None:
        self._stagetap(
            *("train", "--speculator-type", self._method.name, *self._method.arguments),
            *("--verifier-name-or-path", self._model, "--data-path", self._out / "rows"),
            *(*_TRAINING, "--epochs", self._epochs, "--save-path", self._folder / name),
            *arguments,
            log=name,
        )

    def _reading(self) -> tuple[object, ...]:
        return (
            *("--hidden-states-backend", "stagetap", "--stagetap-store", self._out / "dataset"),
            *("--stagetap-metrics", self._metrics, "--checkpoint-freq", self._epochs),
        )

    def _curve(self) -> LossCurve:
        lines = self._metrics.read_text("utf-8").splitlines()
        return LossCurve.of_reports([json.loads(line) for line in lines])

    def _serve(self, name: str, draft: Path | None) -> Served:
        method = self._method
        prompts = self._tokenized(
            self._folder / "held-out.jsonl", held_out_prompts(method.held_out)
        )
        speculative_config = (
            {
                "model": str(draft.resolve()),
                "method": method.name,
                "num_speculative_tokens": method.speculative_tokens,
            }
            if draft
            else None
        )
        result = self._decode(
            f"serve-{name}",
            method.runner,
            prompts=[prompt.token_ids for prompt in prompts],
            tokens=method.tokens,
            dtype=SERVED_DTYPE,
            speculative_config=speculative_config,
        )
        return Served.of(result)

    def _decode(
        self,
        name: str,
        runner: str,
        prompts: Sequence[np.ndarray],
        tokens: int,
        dtype: str = "auto",
        speculative_config: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What an engine of its own says; see :mod:`stagetap.cli.demo_train_engine`."""
        spec = {
            "model": self._model,
            "runner": runner,
            "dtype": dtype,
            "max_len": 512,
            "max_tokens": tokens,
            "prompts": [ids.tolist() for ids in prompts],
            "speculative_config": speculative_config,
        }
        spec_file, result_file = self._folder / f"{name}.json", self._folder / f"{name}-said.json"
        write_file(spec_file, json.dumps(spec))
        run_module(*("stagetap.cli.demo_train_engine", spec_file, result_file), log=self._log(name))
        return dict(json.loads(result_file.read_text("utf-8")))

    def _tokenized(self, file: Path, lines: Sequence[dict[str, Any]]) -> list[TokenPrompt]:
        from stagetap.cli.tokenized import load_prompts

        write_file(file, "".join(json.dumps(line) + "\n" for line in lines))
        return load_prompts(file, self._model)

    def _captured(self) -> str:
        from stagetap import open_dataset

        dataset = open_dataset(self._out / "dataset")
        stages = dataset.manifest(0).tapped.pp_size
        return f"{len(dataset)} samples captured on {stages} stages"

    def _stagetap(self, *arguments: object, log: str | None = None) -> None:
        run_module("stagetap", *arguments, log=self._log(log or str(arguments[0])))

    def _log(self, name: str) -> Path:
        return self._out / "logs" / f"{self._method.name}-{name}.log"

    @contextmanager
    def _timed(self, phase: str, notify: Callable[[str], None], what: str) -> Iterator[None]:
        notify(what)
        started = time.monotonic()
        yield
        self._seconds[phase] = time.monotonic() - started


def check_folder(out: Path) -> None:
    """Raises Refused when something else than an earlier demo is there."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise Refused(f"{out} is no folder; choose another --out")
    if out.is_dir() and (others := [each.name for each in out.iterdir() if each.name not in OURS]):
        raise Refused(f"{out} holds {sorted(others)[0]}, which no demo made; choose another --out")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
