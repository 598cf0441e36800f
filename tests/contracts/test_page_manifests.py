"""YAML on pages has fields that exist, with values that they take; so do names in sentences."""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Iterator

import pytest
import typer
import yaml
from docpages import cobra, manifests
from docpages.blocks import ROOT, Block, blocks, pages, spans

from vlm_cli.app import app
from vlm_operator import settings as operator_settings
from vlm_operator.errors import SpecError
from vlm_worker.settings import command_line

YAML = [block for page in pages() for block in blocks(page) if block.language == "yaml"]
FIELD = re.compile(r"\.?((?:spec|status)(?:\.[a-zA-Z*]+(?:\[\])?)+)(?:[:=] ?.*)?")
FLAG = re.compile(r"(--[a-z][a-z-]+)(?:[= ].*)?")
METRIC = re.compile(r"(?:\w+:)?\btriptych_[a-z_]*[a-z](?::\w+)?")
NOT_METRICS = {"triptych_dev_role", "triptych_dev_service", "triptych_dev_variant"}  # labels
# Flags of programs without a parser of ours.
FOREIGN_FLAGS = {
    "--build-arg": "docker build",
    "--install": "e2e/nodes/run.sh",
    "--target": "docker build",
}


@pytest.mark.parametrize("block", YAML, ids=str)
def test_yaml_on_a_page_is_valid(block: Block):
    for document in yaml.safe_load_all(block.text):
        manifests.check(document)


@pytest.mark.parametrize("page", pages())
def test_json_on_a_page_is_json(page: str):
    for block in blocks(page):
        if block.language == "json":
            json.loads(re.sub(r"…|\.\.\.", "0", block.text))


@pytest.mark.parametrize(
    "text",
    [
        "spec: {nothing: 1}",
        "pools: {decode: {nothing: 1}}",
        "podTemplate: {spec: 1}",
        "slo: {ttftP95Milliseconds: soon}",
        "gateway: {tls: {secretRef: {nothing: x}}}",
        "nothing: 1",
        "prefill: {nothing: 1}",
        "apiVersion: triptych.dev/v1alpha1\nkind: VLMService\nmetadata: {name: a}\n"
        "spec: {model: {uri: nowhere}, pools: {decode: {}}}",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {nothing: 1}",
        "apiVersion: apps/v1\nkind: Nothing\nmetadata: {name: a}",
        "ignoreDifferences: [{group: triptych.dev, managedFieldsManagers: [nobody]}]",
        "scrape_configs: [{source_labels: [__meta_kubernetes_pod_label_nothing]}]",
    ],
)
def test_yaml_that_names_nothing_is_found(text: str):
    with pytest.raises((ValueError, SpecError), match=r"\S"):
        manifests.check(yaml.safe_load(text))


@pytest.mark.parametrize("page", pages())
def test_fields_in_sentences_exist(page: str):
    found = [match[1] for code in spans(page) if (match := FIELD.fullmatch(code))]
    assert not [path for path in found if not manifests.has_field(path)]


@pytest.mark.parametrize("page", pages())
def test_flags_in_sentences_exist(page: str):
    found = {match[1] for code in spans(page) if (match := FLAG.fullmatch(code))}
    assert found - our_flags() - FOREIGN_FLAGS.keys() - cobra_flags() == set()


@pytest.mark.parametrize("page", pages())
def test_metrics_and_recording_rules_on_pages_exist(page: str):
    """`test_metrics_page.py` compares docs/metrics.md with what the processes expose."""
    named = set(METRIC.findall((ROOT / page).read_text())) - NOT_METRICS
    listed = set(METRIC.findall((ROOT / "docs/metrics.md").read_text()))
    recorded = re.findall(
        r"record: (\S+)", (ROOT / "helm/triptych/rules/recording.yaml").read_text()
    )
    parts = {f"{name}_{part}" for name in listed for part in ("bucket", "sum", "count")}
    assert named - listed - parts - set(recorded) == set()


@functools.cache
def our_flags() -> frozenset[str]:
    """Flags of vlm, vlm-worker, vlm-operator and of programs of this repository with argparse."""
    group = typer.main.get_command(app)
    commands = [group.get_command(None, name) for name in group.list_commands(None)]  # type: ignore[attr-defined,arg-type]
    ours = {flag for c in commands for parameter in c.params for flag in parameter.opts}
    for parser in (command_line(), operator_settings._parser({})):
        ours |= set(_options(parser))
    for path in (*ROOT.glob("bench/**/*.py"), *ROOT.glob("e2e/**/*.py"), *ROOT.glob("tools/*.py")):
        ours |= set(re.findall(r'add(?:_argument|option)\(\s*"(--[a-z-]+)"', path.read_text()))
    return frozenset(ours)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options(inner)


@functools.cache
def cobra_flags() -> frozenset[str]:
    """Flags of the subcommands of kubectl and helm that pages name without the subcommand."""
    paths = [("kubectl", "options"), ("helm", "install"), ("helm", "upgrade")]
    return frozenset(f"--{name}" for path in paths for name in cobra.flags_of(*path))
