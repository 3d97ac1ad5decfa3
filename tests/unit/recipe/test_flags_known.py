"""The tables of a recipe's flags, held against the parsers that read the flags."""

from __future__ import annotations

import argparse

import pytest

from stagetap.protected import contradictions
from stagetap.recipe.commands import ENGINE_KEYS, train_command
from stagetap.recipe.document import read_recipe
from stagetap.recipe.extra_arguments import _FREE, OTHER_ENGINE, OTHER_TRAINING, TRAINER_PLACES
from unit.recipe.recipes import filled

LEFT_TO_THE_TRAINER = {
    *_FREE,
    *("--help", "--deterministic-cuda", "--trust-remote-code", "--draft-attn-impl"),
    *("--hidden-states-dtype", "--num-workers", "--prefetch-factor", "--max-anchors"),
    *("--checkpoint-freq", "--save-best", "--no-resume-from-checkpoint", "--log-freq"),
    *("--gradient-checkpointing", "--max-steps"),
    *("--dflash-decay-gamma", "--per-position-loss-weight", "--dpace-alpha"),
    "--confidence-head-alpha",
}
WHOLE_GROUPS = ("generation", "loss", "optimizer", "scheduler", "logging")
OTHER_DRAFTS = ("dflash2", "xpress", "peagle", "mtp")
"""Groups whose flags speculators says to ignore for this draft."""


def trainer_groups() -> dict[str, set[str]]:
    """Title of a group of the trainer's flags -> its flags."""
    pytest.importorskip("speculators")
    from stagetap.training.register import register

    register()
    from speculators.train.config.resolution import build_parser

    return flags_by_group(build_parser())


def flags_by_group(parser: argparse.ArgumentParser) -> dict[str, set[str]]:
    return {
        str(group.title): {
            flag for action in group._group_actions for flag in action.option_strings
        }
        for group in parser._action_groups
    }


def test_every_flag_of_the_trainer_is_decided_or_left_to_it() -> None:
    groups = trainer_groups()
    known = {flag for flags in groups.values() for flag in flags if flag.startswith("--")}
    recipe = read_recipe(filled(), "recipe")
    own = set(train_command(recipe, {"mask_token_id": 0, "vocab_size": 1}))
    decided = {*TRAINER_PLACES, *OTHER_TRAINING, *(own - {*recipe.trainer.extra_args})} & known
    left = LEFT_TO_THE_TRAINER.union(*(groups[name] for name in (*WHOLE_GROUPS, *OTHER_DRAFTS)))
    assert {*TRAINER_PLACES, *OTHER_TRAINING} <= known
    assert decided & left == set()
    assert decided | left == known
    assert list(contradictions(left, {**TRAINER_PLACES, **OTHER_TRAINING})) == []


@pytest.mark.full
def test_every_flag_of_an_engine_that_is_refused_is_one() -> None:
    pytest.importorskip("vllm")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from stagetap.engine.compat import serve_parser

    groups = flags_by_group(serve_parser(FlexibleArgumentParser()))
    known = set().union(*groups.values())
    assert {*OTHER_ENGINE, *ENGINE_KEYS} - {"--headless"} <= known
    others = known - {*OTHER_ENGINE, *ENGINE_KEYS}
    hit = {flag for flag, _ in contradictions(others, {**OTHER_ENGINE, **ENGINE_KEYS})}
    assert hit == {"-dpn", "-dpr", "-dpl", "-dpa", "-dpp", "-dpb", "-dph", "-dpe", "-dpm"}
