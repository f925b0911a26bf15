"""The chat template with which a run was trained."""

from pathlib import Path

from titan_hydra.checkpoint.convert import as_started, find_section, read_tokenizer_config, sources_of

from .sources import TemplateSource
from .template import BUILT_IN, Template, load_template


def read_template(checkpoint: Path, config_file: Path | None = None) -> Template:
    """Load the chat template of the run that wrote a checkpoint. In a mixture, take the template of the source with the
    largest weight among those with a template. Raises ConfigError if there is none.
    """
    file, section = find_section("data", checkpoint, config_file)
    sources = [source for source in sources_of(section) if "chat_template" in source]
    chosen = max(sources, key=lambda source: source.get("weight", 1)) if sources else {}
    name, options = chosen.get("chat_template"), chosen.get("chat_template_kwargs", {})
    if name and name not in BUILT_IN:
        name = as_started(file, name)
    return load_template("data", TemplateSource("chat", name, options), read_tokenizer_config(checkpoint, config_file))


def files_of_export(checkpoint: Path, config_file: Path | None) -> dict[str, str]:
    """Return {file name: chat template}: transformers looks for a file of this name beside a tokenizer."""
    return {"chat_template.jinja": read_template(checkpoint, config_file).source}
