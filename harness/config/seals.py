"""Seals: digests inside the small files that commands trust. A damaged value is an error, never another result.

A configuration has the SHA-256 of its lines in a comment at its end, a JSON object that of its other fields in a field.
The seal is in the file itself, so one atomic write replaces both. A file without a seal is accepted: it was written or
edited by hand. A seal that does not match raises ValueError where the file is parsed.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

DAMAGED = "it was damaged or edited"  # begins the message of each error

_LINE = "SHA256 of the lines above; remove this line when you edit them: "  # after "# ", which the digest covers
_FIELD = "file_sha256"


def sealed_text(text: str) -> str:
    """Return the configuration ``text`` with a seal as its last line."""
    above = f"{text}# "
    return f"{above}{_LINE}{_digest(above)}\n"


def require_intact(text: str) -> None:
    """Raise ValueError if the configuration ``text`` has a seal that does not match."""
    above, line, digest = text.rpartition(_LINE)
    if line and digest.strip() != _digest(above):
        raise ValueError(f"{DAMAGED}: the SHA256 on its last line is not that of the lines above")


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object ``fields`` with a seal as its last field."""
    return {**fields, _FIELD: _digest(json.dumps(fields))}


def unsealed(content: Any) -> Any:
    """Return ``content``, which was parsed from JSON, without its seal. Raises ValueError if that does not match."""
    if not isinstance(content, dict) or _FIELD not in content:
        return content
    fields = {key: value for key, value in content.items() if key != _FIELD}
    if content[_FIELD] != _digest(json.dumps(fields)):
        raise ValueError(f"{DAMAGED}: its {_FIELD} is not that of its other fields")
    return fields


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
