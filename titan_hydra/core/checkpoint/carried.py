"""The facts that a run carries: what came with its weights and its tokenizer, and what its own training adds. Rank 0
writes them into the run directory at the first start, as the folders that they come from may change later. Imports no
torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import tokenizer
from titan_hydra.core.data.facts import DEFAULT, Facts, listed, read_facts, token_of
from titan_hydra.core.data.learned import header_of, learned_tokenizer, same_ids, sources_of
from titan_hydra.core.job.config import from_dict, schema, to_dict
from titan_hydra.core.job.config.fault import Fault
from titan_hydra.core.job.config.files import read_json
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.registry import DATA_SOURCES, resolve
from titan_hydra.core.job.config.source import data_sources
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.checkpoints import as_started, config_files, find_section, find_weights, is_hf
from titan_hydra.core.job.run.inputs import initial_weights

POSITIONS = ("rope_theta", "rope_scaling", "yarn")  # keys of models that say how positions are rotated


def facts_at(place: Path, config_file: Path | None = None) -> Facts:
    """Return the facts of a Hugging Face folder, or those that the run of a checkpoint carries. Those of a run of an
    earlier version are read from the folders that its config.json names.
    """
    if is_hf(place):
        return facts_of_folder(place)
    candidates = [config_file] if config_file else config_files(place)
    for folder in [file.parent for file in candidates]:
        if stored := layout.FACTS.read(folder):
            return Facts(**{field.name: stored[field.name] for field in fields(Facts)})
    merged: dict[str, Any] = {}
    for file in reversed(candidates):
        sections = read_json(file) or {}
        merged |= {name: section for name, section in sections.items() if section}
    owner = next((file for file in candidates if "tokenizer" in (read_json(file) or {})), candidates[-1])
    return facts_of_config(merged, lambda path: as_started(owner, path), owner.parent)


def record_facts(directory: Path, config: dict[str, Any]) -> None:
    """Write down the facts of a run, whose configuration is `config`, unless that is done already."""
    if not layout.FACTS.read(directory):
        facts = facts_of_config(config, lambda path: str(Path(path).expanduser().absolute()), directory)
        layout.FACTS.write(directory, asdict(facts))


def facts_of_folder(folder: Path) -> Facts:
    """Return the facts of a Hugging Face folder, with its tokenizer's if there is one that this package can load."""
    facts, file = read_facts(folder), folder / "tokenizer.json"
    if not file.is_file():
        return facts
    keys = schema.Tokenizer("hf", str(file))
    return replace(facts, tokenizer=_learned(keys, tokenizer.load(keys, facts)))


def facts_of_config(config: dict[str, Any], located: Callable[[str], str], directory: Path) -> Facts:
    """Return the facts of a run from its configuration. `located` makes its paths absolute; `directory` is the run's."""
    load_path = (config.get("checkpoint") or {}).get("initial_load_path")
    base = facts_at(initial_weights(directory, located(load_path))) if load_path else Facts()
    if not config.get("tokenizer"):
        return base
    keys = from_dict(schema.Tokenizer, config["tokenizer"])
    if keys.path:
        keys.path = located(keys.path)
    header = header_of(config.get("data") or {}, located)
    if header and header["tokenizer_sha256"] == base.tokenizer.get("sha256") and "name" in base.tokenizer:
        keys = schema.Tokenizer(base.tokenizer["name"], base.tokenizer["path"])
    beside = read_facts(Path(keys.path).parent) if keys.name == "hf" and keys.path else Facts()
    try:
        learned = learned_tokenizer(header, keys)
    except ConfigError:  # a run that needs the tokenizer has been refused; this one may do without
        return _of_header(header) if header else replace(base, tokenizer={"name": keys.name, "path": keys.path})
    same = _is_same(base, learned)
    if base.tokenizer and not same:  # ids and names of another tokenizer
        base = Facts(templates=base.templates)
    facts = replace(base, words=beside.words or base.words, tokenizer=_learned(keys, learned))
    if not facts.templates:
        facts.templates = beside.templates
    template, stop = _own_template(config, located, keys)
    if template is not None:
        facts.templates = facts.templates | {DEFAULT: template}
    return _completed(facts, learned, beside, template, stop)


def _is_same(base: Facts, learned: tokenizer.Tokenizer) -> bool:
    """Whether weights have learned the ids of this tokenizer, perhaps from another file of it."""
    if base.tokenizer.get("sha256") == learned.sha256:
        return True
    try:
        return bool(base.tokenizer) and same_ids(tokenizer.of_facts(base), learned)
    except ConfigError:  # its file is not known, or gone
        return False


def _of_header(header: dict[str, Any]) -> Facts:
    """Return the facts of a run whose ids are those of a tokenizer that only their header names."""
    known = {"bos_id": header["bos_id"], "eos_id": header["eos_id"]}
    ids = {"bos_token_id": header["bos_id"], "eos_token_id": header["eos_id"]}
    return Facts(tokenizer={"sha256": header["tokenizer_sha256"]} | known, generation=dict(ids), ids=ids)


def faults_of_weights(job: schema.Job) -> Iterator[Fault]:
    """Yield a fault for each key in which the model computes otherwise than the run whose weights it takes, but for
    rotary positions.
    """
    for name, here, there in _other_arithmetic(job):
        if name not in POSITIONS:
            reason = f"the weights in checkpoint.initial_load_path were trained with {there}"
            yield Fault(f"model.{name}", here, reason, (there,))


def other_positions(job: schema.Job) -> Iterator[Fault]:
    """Yield a warning for each key of rotary positions that differs from that of the run whose weights the job takes."""
    for name, here, there in _other_arithmetic(job):
        if name in POSITIONS:
            reason = f"the weights in checkpoint.initial_load_path were trained with {there}"
            yield Fault(f"model.{name}", here, reason)


def _other_arithmetic(job: schema.Job) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, value here and value there of each difference that a checkpoint of the same family shows."""
    try:
        weights = find_weights(job.checkpoint.initial_load_path or "")
        their_keys = {} if is_hf(weights) else find_section("model", weights)[1]
        theirs = from_dict(Model, their_keys) if their_keys.get("family") == job.model.family else None
    except (ConfigError, KeyError, TypeError):  # other rules say what is wrong
        return
    values = theirs.arithmetic() if theirs else {}
    for name, value in job.model.arithmetic().items():
        if theirs and value != values.get(name):
            yield name, value, values.get(name)


def warnings_of_weights(job: schema.Job) -> Iterator[Fault]:
    """Yield a warning if the initial weights have learned the ids of another tokenizer than that of the job's data."""
    path = job.checkpoint.initial_load_path
    kinds = [DATA_SOURCES[source.name] for source in data_sources(job.data).values()]
    if not path or not any(kind.documents or kind.encodes or kind.encoded for kind in kinds):
        return
    header = header_of(to_dict(job)["data"])
    try:
        base = facts_at(find_weights(path))
        digest = header["tokenizer_sha256"] if header else tokenizer.load(job.tokenizer).sha256
    except ConfigError:  # other rules say what is wrong
        return
    theirs = base.tokenizer.get("sha256")
    if not theirs or not digest or theirs == digest:
        return
    with contextlib.suppress(ConfigError):  # the file of one of the two is not known here
        if same_ids(tokenizer.of_facts(base), learned_tokenizer(header, job.tokenizer)):
            return
    yield Fault(
        "checkpoint.initial_load_path",
        path,
        f"its weights have learned the ids of another tokenizer (SHA-256 {theirs[:12]}) than that of the data ({digest[:12]})",
    )


def with_tokenizer(facts: Facts, file: Path) -> Facts:
    """Return facts with the tokenizer that the user has named, and with what lies beside its file. Raises ConfigError if
    it is another one than the weights have learned.
    """
    learned, beside = tokenizer.of_facts(facts, file), read_facts(file.parent)
    keys = schema.Tokenizer(tokenizer.name_by_suffix(file), str(file.absolute()))
    templates = facts.templates or beside.templates
    with_own_files = replace(
        facts, words=beside.words or facts.words, templates=templates, tokenizer=_learned(keys, learned)
    )
    return _completed(with_own_files, learned, beside, None, None)


def _learned(keys: schema.Tokenizer, learned: tokenizer.Tokenizer) -> dict[str, Any]:
    """Return the record of the tokenizer whose ids a model has learned: its keys, its digest, and its begin and end of
    text.
    """
    return {
        "name": keys.name,
        "path": keys.path,
        "sha256": learned.sha256,
        "bos_id": learned.bos_id,
        "eos_id": learned.eos_id,
    }


def _completed(
    facts: Facts, learned: tokenizer.Tokenizer, beside: Facts, template: str | None, stop: int | None
) -> Facts:
    """Return facts with everything that an export writes: the ends of a generation, and the special tokens' names and
    ids. `stop` is the last token of an answer in the run's own template.
    """
    named = token_of(beside.words, "eos_token") or token_of(facts.words, "eos_token")
    stops = listed(stop, facts.stops, learned.id_of(named or ""), learned.eos_id)
    begin, end, padding = facts.ids.get("bos_token_id"), facts.ids.get("eos_token_id"), facts.ids.get("pad_token_id")
    ids = {
        "bos_token_id": facts.generation.get("bos_token_id", begin if "bos_token_id" in facts.ids else learned.bos_id),
        "eos_token_id": stops if len(stops) > 1 else stops[0],
        "pad_token_id": facts.generation.get("pad_token_id", padding),
    }
    if ids["pad_token_id"] is None:
        ids["pad_token_id"] = learned.id_of(token_of(facts.words, "pad_token") or "")
        if ids["pad_token_id"] is None:
            ids["pad_token_id"] = learned.eos_id
    of_model = facts.ids | {
        "bos_token_id": begin if "bos_token_id" in facts.ids else learned.bos_id,
        "eos_token_id": end if end is not None and (stop is None or stop in listed(end)) else ids["eos_token_id"],
    }
    tokens: dict[str, Any] = {}
    if "bos_token" not in facts.words and learned.bos_id is not None:
        tokens["bos_token"] = learned.name_of(learned.bos_id)
    if token_of(facts.words, "eos_token") is None:
        # a template that prints eos_token has printed the end of a document while the run learned
        printed = template is not None and "eos_token" in template
        tokens["eos_token"] = learned.name_of(learned.eos_id if stop is None or printed else stop)
    named_tokens = {key: name for key, name in tokens.items() if name is not None}
    return replace(
        facts, words=facts.words | named_tokens, generation=ids | _others(facts.generation, ids), ids=of_model
    )


def _others(content: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in known}


def _own_template(
    config: dict[str, Any], located: Callable[[str], str], keys: schema.Tokenizer
) -> tuple[str | None, int | None]:
    """Return the chat template of the run's own data and the token that ends an answer in it; (None, None) without one.
    In a mixture, the source with the largest weight counts, among those with a template.
    """
    sources = [
        (source.get("weight") or 1, template, source)
        for source in sources_of(config.get("data") or {})
        if (kind := DATA_SOURCES.get(source.get("name"))) and (template := kind.template)
    ]
    if not sources:
        return None, None
    _, template, source = max(sources, key=lambda weighted: weighted[0])
    template_and_stop: tuple[str, int | None] = resolve(template)(source, located, keys)
    return template_and_stop
