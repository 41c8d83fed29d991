"""The [plugins] section. Imports no torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PluginsConfig:
    """Python of your own that the recipe loads (docs/extending.md). Nothing is loaded unasked."""

    modules: tuple[str, ...] = ()
    """Files ("lion.py"), installed modules ("my_ideas.lion"), or entry points of the group "shardwright.plugins"."""
    versions: dict[str, str] = field(default_factory=dict)
    """Name -> version and hash of the content. A run writes this; a recipe that states it refuses other content."""
