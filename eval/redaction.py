"""Secrets of this process, kept out of everything that is written."""

import os
import re
from typing import Any

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
# shorter values are words that occur anywhere
SHORTEST = 8
HIDDEN = "[redacted]"
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")


def redacted(value: Any) -> Any:
    """The value without the contents of environment variables that are called secrets, and without users in URLs."""
    if isinstance(value, dict):
        return {redacted(key): redacted(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(one) for one in value]
    if not isinstance(value, str):
        return value
    for secret in _secrets():
        value = value.replace(secret, HIDDEN)
    return _USER_IN_URL.sub(f"{HIDDEN}@", value)


def _secrets() -> list[str]:
    """The longest first, so that none is left in parts."""
    found = {value for name, value in os.environ.items() if _NAMES.search(name) and len(value) >= SHORTEST}
    return sorted(found, key=len, reverse=True)
