"""`ddptrain schema`: prints the JSON schema of the configuration."""

from __future__ import annotations

import typer


def schema() -> None:
    """Print the JSON schema of the configuration, for editors that complete YAML."""
    import json

    from ddptrain.config.json_schema import config_schema

    typer.echo(json.dumps(config_schema(), indent=2))
