"""All settings with their descriptions, from the schema: ``docs/settings.md``, and ``harness settings`` to search them.

The texts are the docstrings of the sections, so a word that users search for, such as "early stopping", belongs there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import yaml

from harness.config import hugging_face_names, json_schema
from harness.config.schema import Config, ScheduleSection
from harness.errors import ConfigError

_Node = dict[str, Any]  # of the JSON Schema
REQUIRED = "required"
_FULL = 5  # so many settings are shown with their whole text
_ENDING = re.compile(r"(?:ations?|ates?|ings?|ions?|ed|es|s|e)$")
_OWN = {  # how to name a part of one's own
    "model": "model.name=my_module.Net",
    "loss": "task.loss.name=my_module.loss",
    "metric": "'task.metrics=[{name: my_module.metric, better: max}]'",
    "optimizer": "optimizer.name=my_module.Lion",
    "schedule": "schedule.name=my_module.inverse_sqrt",
    "task": "task.name=my_module.prices",
}
_CHOSEN = ("task", "schedule")  # sections that have the settings of the part that they name


@dataclass(frozen=True)
class Setting:
    """One setting. ``parts``: the tasks or schedules that have it; empty if all do."""

    key: str
    kind: str
    default: str
    text: str
    example: str
    parts: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """``key=default`` and the first sentence."""
        sentence = re.split(r"(?<=[.;])\s", self.text, maxsplit=1)[0].rstrip(".;")
        key = self.example if self.key == "schedule.name" else self.key  # each schedule has one
        return f"{key} ({self.default})  {sentence}"

    @property
    def value(self) -> str:
        """What may be written, and what holds if nothing is."""
        return f"{self.kind}; required" if self.default == REQUIRED else f"{self.kind}; default: {self.default}"

    @property
    def full(self) -> str:
        parts = f"\n  only of {', '.join(self.parts)}" if self.parts else ""
        example = f"\n  example: {self.example}" if self.example else ""
        return f"{self.key}\n  {self.value}{parts}\n  {self.text}{example}"

    def as_record(self) -> dict[str, Any]:
        return {**vars(self), "parts": list(self.parts)}


@dataclass(frozen=True)
class Chapter:
    """A top-level key of the file, with the settings under it."""

    key: str
    text: str
    settings: tuple[Setting, ...]


def chapters() -> list[Chapter]:
    """Return every setting of every built-in part, in the order of the schema."""
    schema = json_schema.tree()
    result = []
    for key, node in schema["properties"].items():
        settings: dict[tuple[str, str, str], Setting] = {}
        for part, setting in _walk(key, node, schema["$defs"], ""):
            earlier = settings.setdefault((setting.key, setting.kind, setting.text), setting)
            if part and earlier.parts != (part,):
                settings[setting.key, setting.kind, setting.text] = replace(earlier, parts=(*earlier.parts, part))
        count = len(_parts(node, schema["$defs"]))
        unique = [each if len(each.parts) != count else replace(each, parts=()) for each in settings.values()]
        result.append(Chapter(key, _joined(node.get("description", "")), tuple(unique)))
    return result


def _parts(node: _Node, defs: dict[str, _Node]) -> list[str]:
    """Return the names of the tasks or schedules among which ``node`` chooses."""
    sections = [_resolved(each, defs) for each in node.get("anyOf", ())]
    names = [each.get("properties", {}).get("name", {}).get("const") for each in sections]
    return [name for name in names if name]


def _walk(key: str, node: _Node, defs: dict[str, _Node], part: str) -> Iterator[tuple[str, Setting]]:
    """Yield (task or schedule, setting) for ``node`` and what is under it."""
    choices = [_resolved(each, defs) for each in _choices(node)]
    sections = [each for each in choices if "properties" in each]
    if key in _CHOSEN:
        for section in sections:
            if name := section["properties"]["name"].get("const"):
                yield from _children(key, section, defs, name)
        return
    if len(choices) > 1 or not sections:  # what has one kind, a section, is what is under it
        yield part, _setting(key, node, defs)
    for section in sections:
        yield from _children(key, section, defs, part)
    for items in [_resolved(each, defs) for each in choices if "items" in each]:
        for item in [_resolved(each, defs) for each in _choices(items["items"])]:
            if "properties" in item:
                yield from _children(f"{key}[]", item, defs, part)


def _children(key: str, section: _Node, defs: dict[str, _Node], part: str) -> Iterator[tuple[str, Setting]]:
    for name, child in section["properties"].items():
        if "default" not in child and name in section.get("required", ()):
            child = {**child, "required": True}
        if name == "name" and key == "schedule":  # each is described by its function
            child = {**child, "description": f"{section['description']} {child['description']}"}
        yield from _walk(f"{key}.{name}", child, defs, part)


def _setting(key: str, node: _Node, defs: dict[str, _Node]) -> Setting:
    text = _joined(node.get("description", ""))
    required = node.get("required") or (key in Config.model_fields and "default" not in node)
    default = _yaml(node["default"]) if "default" in node else "none"
    if required:
        default = REQUIRED
    return Setting(key, _kind(node, defs), default, text, _example(key, node, text))


def _choices(node: _Node) -> list[_Node]:
    choices: list[_Node] = node.get("anyOf") or [node]
    return choices


def _resolved(node: _Node, defs: dict[str, _Node]) -> _Node:
    return defs[node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def _joined(text: str) -> str:
    return " ".join(text.split())


def _kind(node: _Node, defs: dict[str, _Node]) -> str:
    """Return what may be written, in words."""
    node = _resolved(node, defs)
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_kind(each, defs) for each in node["anyOf"]))
    if "const" in node:
        return _yaml(node["const"])
    if "enum" in node:
        return " or ".join(map(_yaml, node["enum"]))
    kind = node.get("type")
    if kind in ("integer", "number"):
        return ("whole number" if kind == "integer" else "number") + _limits(node)
    if kind == "array":
        return f"list of {_kind(node['items'], defs)}" if "items" in node else _fixed_list(node, defs)
    if kind == "object":
        return "section" if "properties" in node else "settings by name"
    if kind == "string":
        return "package.module" if node.get("pattern") == r"\." else "text"
    return {"boolean": "true or false", "null": "null"}.get(str(kind), "any value")


def _fixed_list(node: _Node, defs: dict[str, _Node]) -> str:
    items = [_kind(each, defs) for each in node.get("prefixItems", ())]
    return f"list of {len(items)}: {items[0]}" if items else "list"


def _limits(node: _Node) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {_number(node[key])}" for key, word in words.items() if key in node]
    return f" {', '.join(limits)}" if limits else ""


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else str(value)


def _yaml(value: Any) -> str:
    """Return ``value`` as it is written in a file, on one line."""
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value) if not isinstance(value, dict | list) else _flow(value)


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()


def _example(key: str, node: _Node, text: str) -> str:
    """Return an override with the value that the text names after "such as", or another one than the default, or the
    default. Empty for what is in a list, of which the list is the example."""
    if "[]" in key:
        return ""
    value = None if key.startswith("schedule.args.") and "default" in node else _named(node, text)
    if value is None:
        default = node.get("default")
        examples = [each for each in _values(node) if each is not None and each != default]
        value = _yaml(examples[0] if examples else default)
    word = f"{key}={value}"
    return word if re.fullmatch(r"[\w.=/:,+%@-]+", word) else f"'{word}'"


def _named(node: _Node, text: str) -> str | None:
    """Return the first value after "such as" that ``node`` may have, as it is written in a list if it has to be in
    one."""
    kinds = {each.get("type", "string" if "enum" in each or "const" in each else "") for each in _choices(node)}
    for match in re.finditer(r"[Ss]uch as (\[.*?\]|\{.*?\}|\".*?\"|[^\s,;)]+)", text):
        word = match[1].rstrip(".:")
        value = yaml.safe_load(word)
        word = word.strip('"') if yaml.safe_load(word.strip('"')) == value else word
        if isinstance(value, str) and "array" in kinds and "string" not in kinds and "layer" in word:
            return f'["{word}"]'
        fits = {str: "string", list: "array", dict: "object", int: "integer", float: "number"}[type(value)]
        if fits in kinds or (fits == "object" and "" in kinds) or (fits == "integer" and "number" in kinds):
            return word
    return None


def _values(node: _Node) -> list[Any]:
    """Return the values that the schema lists."""
    if "anyOf" in node:
        return [value for each in node["anyOf"] for value in _values(each)]
    if node.get("type") == "boolean":
        return [True, False]
    return [node["const"]] if "const" in node else list(node.get("enum", ()))


# Searching


def search(words: Sequence[str]) -> list[Setting]:
    """Return the settings that ``words`` name: a key, a section, a name of Hugging Face, a schedule, or words of the
    description. Best first.

    No words name all settings. If no setting has all words, those with the most of them, a misspelled one read as the
    nearest. Raises ConfigError if none has any.
    """
    settings = [each for chapter in chapters() for each in chapter.settings]
    words = [part for word in words for part in word.lower().split()]
    if not words:
        return settings
    if len(words) == 2 and words[0] == "own" and (own_part := _own_setting(words[1], settings)):
        return [own_part]
    if len(words) == 1 and (
        matches := [each for each in settings if f"{each.key}.".startswith(f"{words[0].rstrip('.')}.")]
    ):
        return matches
    if matches := _called("_".join(words), settings):
        return matches
    if reason := hugging_face_names.ABSENT.get("_".join(words)):
        raise ConfigError(f"{'_'.join(words)} of Hugging Face is not available", hint=reason)
    known = [word for word in words if any(_score(each, [word])[0] for each in settings)]
    if not known and "_" in "".join(words):
        return search([word.replace("_", " ") for word in words])
    vocabulary = {word for each in settings for word in re.findall(r"[a-z]{4,}", f"{each.key} {each.text}".lower())}
    unknown = {word: get_close_matches(word, vocabulary, 1, cutoff=0.8) for word in words if word not in known}
    nearest = {word: matches[0] for word, matches in unknown.items() if matches}
    if not known:
        hint = f"did you mean {[*nearest.values()][0]}?" if nearest else "try another word; harness settings lists all"
        raise ConfigError(f"no setting mentions {' '.join(words)!r}", hint=hint)
    if nearest:
        return search([nearest.get(word, word) for word in words])
    scored = [(_score(each, words), each) for each in settings]
    most = max(count for (count, _), _ in scored)
    return [each for (count, _), each in sorted(scored, key=lambda pair: -pair[0][1]) if count == most]


def _own_setting(part: str, settings: Sequence[Setting]) -> Setting | None:
    """Return the setting that names a ``part`` of one's own, such as "model", with an example."""
    example = _OWN.get(part) or _OWN.get(part.removesuffix("s"))
    if example is None:
        return None
    key = example.strip("'").partition("=")[0]
    setting = replace(next(each for each in settings if each.key == key), example=example)
    if key == "task.name":  # the text is that of a built-in task
        text = "Your own module with a class Task, which is a harness.TaskSection."
        return replace(setting, kind="package.module", parts=(), text=text)
    return replace(setting, kind="text", parts=()) if key == "schedule.name" else setting


def _called(word: str, settings: Sequence[Setting]) -> list[Setting]:
    """Return the setting that Hugging Face calls ``word``, or those of the schedule ``word`` and then those with this
    word in their key."""
    if ours := hugging_face_names.setting(word):
        around = [each for each in settings if f"{ours.partition('=')[0]}.".startswith(f"{each.key}.")]
        return [each for each in around if each.key == around[-1].key]
    of_schedule = [each for each in settings if each.key.startswith("schedule.") and word in each.parts]
    return of_schedule and of_schedule + [
        each for each in settings if each not in of_schedule and re.search(rf"[._]{re.escape(word)}", each.key)
    ]


def key_of(name: str, exact: bool = False) -> str | None:
    """Return the key that an option of another tool, such as "batch-size", means; None if there is none.

    ``exact``: only a key with this name, or a name of Hugging Face.
    """
    settings = [each for chapter in chapters() for each in chapter.settings if "[]" not in each.key]
    wanted_key = name.replace("-", "_")
    if (ours := hugging_face_names.SETTINGS.get(wanted_key, "=")) and "=" not in ours:
        return ours
    if same_name := [each.key for each in settings if each.key.rpartition(".")[2] == wanted_key]:
        return min(same_name, key=lambda key: key.count("."))
    words = name.split("-")
    fit = [] if exact else [each for each in settings if _score(each, words)[0] == len(words)]
    fit = [each for each in fit if any(word in each.key for word in words)]
    return max(fit, key=lambda each: _score(each, words)[1]).key if fit else None


def _score(setting: Setting, words: Sequence[str]) -> tuple[int, float]:
    """Return how many of ``words`` occur, and how well: one that is a name in the key counts most, then one in
    such a name, then those early in the text."""
    key, text = setting.key.lower(), f"{setting.text} {setting.example.partition('=')[2]}".lower()
    text = f"{text} {text.replace('-', '')}"
    count, total = 0, 0.0
    for word in words:
        stem = re.escape(_ENDING.sub("", word) if len(word) > 4 else word).replace(r"\-", "-?")
        in_key = re.search(rf"(?<![a-z]){stem}", key)
        in_text = re.search(rf"(?<![a-z]){stem}", text)
        count += bool(in_key or in_text)
        total += 2.0 * bool(in_key) + 2.0 * (word in key.split("."))
        total += 1 / (1 + in_text.start() / 20) if in_text else 0
    return count, total


def as_text(settings: Sequence[Setting]) -> str:
    """Return a few settings in full; more as a line each."""
    if len(settings) <= _FULL:
        return "\n\n".join(each.full for each in settings)
    return "\n".join(each.line for each in settings)


# The page

_HEAD = """# Settings

<!-- Do not edit: `harness settings --markdown > docs/settings.md` writes this page from the docstrings of
harness/config/schema.py and of the tasks, schedules and engines. -->

Every setting of an experiment. `harness settings early stopping` searches this page in the terminal, and
`harness settings train` lists a section. Set one in the YAML file, or for one command: `train.patience=5`. A setting of
a [sweep file](sweeps.md) is described by `harness schema --of sweep`.
"""


def markdown() -> str:
    """Return ``docs/settings.md``."""
    all_chapters = chapters()
    links = ", ".join(f"[{each.key}](#{each.key})" for each in all_chapters)
    return "\n".join([_HEAD, f"{links}.\n", *map(_chapter, all_chapters)])


def _chapter(chapter: Chapter) -> str:
    """Return a section of the page. What is said of all schedules, and of all arguments of one, is there once."""
    entries = [] if [each.key for each in chapter.settings] == [chapter.key] else [f"{chapter.text}\n"]
    shared = _joined(ScheduleSection.model_fields["name"].description or "") if chapter.key == "schedule" else ""
    entries += [f"{_escaped(shared)}\n"] if shared else []
    for each in chapter.settings:
        of_schedule = each.key.startswith("schedule.args.")
        entries.append(_entry(replace(each, text="" if of_schedule else each.text.removesuffix(shared).strip())))
    return "\n".join([f"## {chapter.key}\n", *entries])


def _entry(setting: Setting) -> str:
    parts = f" · only of {', '.join(f'`{part}`' for part in setting.parts)}" if setting.parts else ""
    lines = [f"**`{setting.key}`** · {_escaped(setting.value)}{parts}", _escaped(setting.text)]
    lines += [f"Example: `{setting.example}`"] if setting.example else []
    return "  \n".join(filter(None, lines)) + "\n"


def _escaped(text: str) -> str:
    """Return ``text`` with a backslash before what Markdown would interpret outside of code."""
    return "".join(part if part.startswith("`") else re.sub(r"([*<>_|\[\]])", r"\\\1", part)
                   for part in re.split(r"(`[^`]*`)", text))  # fmt: skip
