"""The JSON Schema of an experiment: ``harness schema``."""

from __future__ import annotations

import json
from typing import Any, Union

from harness.config import plugins, schedules, signatures
from harness.config.launch import built_in, with_engines
from harness.config.loader import config_class
from harness.config.schema import Config, ScheduleSection, TaskSection


def text() -> str:
    """Return the JSON Schema of an experiment with any built-in task, for editors and ``configs/schema.json``."""
    return json.dumps(tree(), indent=1, sort_keys=True) + "\n"


def tree() -> dict[str, Any]:
    """Return ``text`` as dictionaries, with the settings in the order of their classes."""
    shapes = tuple(schedules.section(name) for name in signatures.functions(schedules.BUILT_IN))
    tasks = tuple(plugins.find("task", name, "task.name") for name in plugins.names("task"))
    engines = with_engines(**built_in())
    cls = config_class(Union[tasks], Union[shapes], engines)  # noqa: UP007 - unions made at run time
    schema = cls.model_json_schema(by_alias=True)
    schema["title"] = "apex-harness experiment"
    for key, base in (("task", TaskSection), ("schedule", ScheduleSection)):  # the user's own may have any
        name = {"pattern": r"\.", "description": base.model_fields["name"].description}
        own_task = {"properties": {"name": name}, "required": ["name"], "type": "object"}
        schema["properties"][key]["description"] = Config.model_fields[key].description
        schema["properties"][key]["anyOf"].append(own_task)
    settings = "Settings of an engine of your own, under the last word of its name."
    schema["$defs"][engines.__name__]["additionalProperties"] = {"type": "object", "description": settings}
    schema["properties"]["extends"] = {
        "description": "A YAML file or a preset, such as preset:modern, or a list of them, that this file starts from. "
        "Paths are relative to this file.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    schema["required"] = []  # a file that extends another, or that is extended, may be incomplete
    return schema
