"""The hidden-states backend ``stagetap`` of speculators."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from hs_connectors import HiddenStatesBackend

from stagetap.errors import Refused
from stagetap.taps import STREAM_MIXTURE, STREAM_PREFIX_SUM, STREAM_RESIDUAL
from stagetap.training.metrics_file import write_metrics_to
from stagetap.training.reads import check_dataset, check_target, draft_reads
from stagetap.training.resume import check_resumed, check_started_from
from stagetap.training.summary import say_at_the_end
from stagetap.training.tally import Tally
from stagetap.training.training_rows import check_learnt_from
from stagetap.training.transfer import Source, StageTapTransfer
from stagetap.wording import counted

BACKEND = "stagetap"

logger = logging.getLogger("speculators")


@HiddenStatesBackend.register(BACKEND)
class StageTapBackend(HiddenStatesBackend):
    """Reads a directory or a Mooncake run that StageTap has captured."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Flags of ``speculators train``; all of them are for this backend."""
        parser.add_argument(
            "--stagetap-store",
            default=None,
            help="The dataset: a directory, file:///directory or mooncake://MASTER:PORT/RUN.",
        )
        parser.add_argument("--stagetap-run", default=None, help="One run of the dataset alone.")
        parser.add_argument(
            "--stagetap-stream",
            default=None,
            choices=(STREAM_RESIDUAL, STREAM_PREFIX_SUM, STREAM_MIXTURE),
            help="The stream kind that the draft will be served on. Default: what it says itself.",
        )
        parser.add_argument(
            "--stagetap-verify",
            default="auto",
            choices=("auto", "sizes", "checksums"),
            help="What is compared of each sample that is read: sizes and token ids always, and "
            "every byte or not. Default: every byte out of Mooncake, where it has a checksum.",
        )
        parser.add_argument(
            "--stagetap-wait-s",
            type=float,
            default=0.0,
            help="How long a row may wait for its sample, while it is being captured, and the "
            "trainer for the dataset to begin. Default: 0.",
        )
        parser.add_argument(
            "--stagetap-target",
            default="same",
            choices=("same", "any"),
            help="Whether the verifier's folder must be the very checkpoint that was captured.",
        )
        parser.add_argument(
            "--stagetap-min-loss-tokens",
            type=int,
            default=0,
            help="Leave out rows with fewer tokens to learn from, and count them. Default: none.",
        )
        parser.add_argument(
            "--stagetap-after-read",
            default="keep",
            choices=("keep", "remove"),
            help="Whether a sample leaves the store once it was read: for one epoch of training "
            "on what is captured meanwhile.",
        )
        parser.add_argument(
            "--stagetap-metrics",
            default=None,
            help="A file to which every step's loss and metrics are appended, as lines of JSON.",
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """None: the engine is started by StageTap's own command."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> StageTapTransfer:
        """The transfer of these arguments, its dataset held against draft and rows.

        Raises:
            Refused: no dataset was named, it does not fit draft, target or rows, or the checkpoint
                to go on with is of another draft.
            StageTapError: as ``open_dataset``.
        """
        if args.stagetap_store is None:
            raise Refused(
                f"--hidden-states-backend {BACKEND} needs --stagetap-store: a directory or "
                "mooncake://MASTER:PORT/RUN"
            )
        from speculators.train.distributed import get_rank

        remove = args.stagetap_after_read == "remove"
        if remove and args.epochs != 1:
            raise Refused(
                f"--stagetap-after-read remove and --epochs {args.epochs}: a second epoch would "
                "find nothing: give --epochs 1, or keep the samples"
            )
        reads = draft_reads(args)
        check_started_from(args)
        done = check_resumed(args, reads)
        source = Source(
            uri=args.stagetap_store,
            run=args.stagetap_run,
            stream=reads.stream,
            verify={"auto": None, "sizes": False, "checksums": True}[args.stagetap_verify],
            wait_s=args.stagetap_wait_s,
        )
        stored = source.open_invariant()
        check_dataset(source.uri, stored, reads)
        if args.stagetap_target == "same":
            check_target(source.uri, stored, args.verifier_name_or_path)
        may_miss = args.on_missing in ("skip", "warn")
        tally = Tally() if may_miss else None
        transfer = StageTapTransfer(
            source,
            data_path,
            reads.columns,
            may_miss=may_miss,
            tally=tally,
            total_seq_len=args.total_seq_len,
            min_loss_tokens=args.stagetap_min_loss_tokens,
            remove=remove,
        )
        loss_tokens = transfer.loss_tokens()
        check_learnt_from(loss_tokens, data_path, args.total_seq_len)
        short = _short_rows(loss_tokens, data_path, args.stagetap_min_loss_tokens)
        if remove:
            _check_each_row_once(transfer, data_path)
        _check_rows(transfer, source, data_path)
        if get_rank() == 0:
            if short is not None:
                logger.info(short)
                say_at_the_end(short)
            if done is not None:
                say_at_the_end(done)
            if tally is not None:
                say_at_the_end(lambda: _missed(tally))
            # Behind speculators' own set-up of logging, which would drop it.
            if args.stagetap_metrics is not None:
                write_metrics_to(Path(args.stagetap_metrics))
        return transfer

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Raises Refused: speculators' launcher cannot start an engine that StageTap patches."""
        raise Refused("start the engine with stagetap serve or stagetap capture")


def _short_rows(loss_tokens: list[int], data_path: str, min_loss_tokens: int) -> str | None:
    """What there is to say of rows with too few tokens to learn from; None of none unasked.

    Raises:
        Refused: all of them are left out.
    """
    rows = f"{counted(len(loss_tokens), 'row')} of {data_path}"
    if not min_loss_tokens:
        idle = loss_tokens.count(0)
        return f"{idle} of {rows} have no token to learn from" if idle else None
    short = sum(tokens < min_loss_tokens for tokens in loss_tokens)
    found = (
        f"{short} of {rows} left out for having fewer than {min_loss_tokens} tokens to learn from"
    )
    if short == len(loss_tokens):
        raise Refused(f"{found}: nothing is left to train on; give a lower number, or longer rows")
    return found


def _missed(tally: Tally) -> str | None:
    """How many rows had no sample when the trainer asked for them; None of none. Ends the count."""
    missed, asked = tally.missed(), tally.asked()
    tally.remove()
    if not missed:
        return None
    rows = counted(asked, "row")
    return f"left out for having no sample: {missed} of {rows} that the trainer asked for"


def _check_each_row_once(transfer: StageTapTransfer, data_path: str) -> None:
    """Refuse rows of which the second would find its sample removed."""
    if (repeated := transfer.repeated_rows()) is not None:
        raise Refused(
            f"--stagetap-after-read remove: rows {repeated[0]} and {repeated[1]} of {data_path} "
            "have the same tokens, and the second would find nothing: write each of them once, or "
            "keep the samples"
        )


def _check_rows(transfer: StageTapTransfer, source: Source, data_path: str) -> None:
    """Say how many rows have no sample, and refuse where training on the rest was not asked for."""
    absent = transfer.rows_without_sample()
    if not absent:
        return
    found = (
        f"{len(absent)} of {counted(transfer.row_count, 'row')} of {data_path} have no sample in "
        f"{source.uri}, row {absent[0]} the first"
    )
    awaited = source.wait_s > 0
    if not awaited and len(absent) == transfer.row_count:
        raise Refused(f"{found}: write rows of this dataset with stagetap rows")
    if not awaited and not transfer.may_miss:
        raise Refused(
            f"{found}: capture them, wait for them with --stagetap-wait-s, or leave them out with "
            "--on-missing skip or warn"
        )
    logger.warning(found)
