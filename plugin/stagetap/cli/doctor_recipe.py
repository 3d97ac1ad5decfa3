"""``stagetap doctor --config RECIPE``: does a recipe go together, and what does it start?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stagetap.cli.doctor_config import Expectations, check_config
from stagetap.cli.model_facts import model_facts, read_config
from stagetap.config_file import config_file, read_config_file
from stagetap.config_values import ConfigValues, decoder_values
from stagetap.errors import Refused, StageTapError
from stagetap.findings import SEE_FOUND, Finding
from stagetap.layer_choice import choose_layers, read_draft
from stagetap.models import resolve_model
from stagetap.options import connector_options
from stagetap.plan.couplings import Served
from stagetap.plan.layout import check_layout
from stagetap.plan.parallel import Parallel
from stagetap.recipe.checks import Told, check_recipe
from stagetap.recipe.commands import DRAFT_TYPE, Start, starts, store_uri, train_command
from stagetap.recipe.document import Recipe, is_recipe, read_recipe
from stagetap.stores.mooncake_uri import parse_uri
from stagetap.training.acceptance import check_training
from stagetap.wording import one_line, shortened, shown

_OPTIONS = {"--tp": "engines.tp", "--max-len": "engines.max-len"}


def examine(file: Path, expectations: Expectations) -> tuple[list[Finding], list[Start]]:
    """What is found in a file for the doctor's ``--config``, and what a recipe that is well starts.

    Raises:
        Refused: a number of the command line cannot be read, or goes with another kind of file.
    """
    try:
        document = _document(file)
    except Refused as error:
        return [Finding("configuration", one_line(error), SEE_FOUND)], []
    if not is_recipe(document):
        return list(check_config(file, expectations)), []
    if expectations != Expectations():
        raise Refused(
            f"{file} is a recipe, which says itself what is expected of store and consumers; give "
            "--config alone"
        )
    try:
        recipe = read_recipe(document, str(file))
        told = _told(recipe)
        summary = Finding("recipe", f"{file}: {recipe.target}, layers {recipe.engines.layers}")
        findings = [summary, *check_recipe(recipe, told)]
        if all(finding.ok for finding in findings):
            findings += check_training(recipe.draft, told.draft, train_command(recipe, told.draft))
    except StageTapError as error:
        return [Finding("recipe", one_line(error), SEE_FOUND)], []
    well = all(finding.ok for finding in findings)
    return findings, starts(recipe, told.draft) if well else []


def _document(file: Path) -> Any:
    """What a file holds that could be a recipe; None where another reader says what it lacks.

    Raises:
        Refused: its YAML is not as it must be, which needs no vLLM to be told.
    """
    if not os.path.isfile(file):
        return None
    try:
        from stagetap.yaml_file import read_yaml_map

        return read_yaml_map(file)
    except ModuleNotFoundError:
        return None


def _told(recipe: Recipe) -> Told:
    engines = recipe.engines
    model = resolve_model(recipe.target)
    facts = model_facts(model)
    config = read_config(model)
    if config is None or facts.num_hidden_layers is None:
        raise Refused(
            f"target {shown(recipe.target)}: no config.json here says its num_hidden_layers; give "
            "a folder with one"
        )
    parallel = Parallel(engines.pp, engines.tp, engines.expert_parallel)
    where = f"config.json of {shortened(recipe.target, 200)}"
    check_layout(config, where, parallel, engines.max_len, _OPTIONS)
    layers = choose_layers(engines.layers, facts.num_hidden_layers)
    token_bytes = facts.row_bytes(len(layers), None)
    if token_bytes is None:
        raise Refused(f"config.json of {recipe.target} says no hidden_size and dtype; add them")
    draft = read_config_file(config_file(recipe.draft))
    kind = ConfigValues(draft, recipe.draft).text("model_type")
    if kind != DRAFT_TYPE:
        raise Refused(
            f"draft {recipe.draft} has model_type {shown(kind)}, a recipe trains {DRAFT_TYPE}; "
            "name such a config.json"
        )
    uri = store_uri(recipe)
    options = connector_options({**engines.options, "layers": list(layers), "store": uri})
    return Told(
        served=Served(
            layer_ids=layers,
            num_hidden_layers=facts.num_hidden_layers,
            token_bytes=token_bytes,
            max_len=engines.max_len,
            max_num_seqs=engines.max_num_seqs,
            workers=engines.pp * engines.tp,
            hosts=recipe.nodes,
            publish_timeout_s=options.publish_timeout_s,
        ),
        options=options,
        store=parse_uri(uri),
        draft=draft,
        draft_ids=read_draft(recipe.draft, facts.num_hidden_layers),
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        has_attention_residuals=decoder_values(config).says("attn_res_block_size"),
    )
