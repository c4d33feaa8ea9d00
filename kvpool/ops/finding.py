"""What one check of `kvpool doctor` found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, TypeAlias

from kvpool.errors import UsageError


class Finding(NamedTuple):
    """One check. `verdict` is ok, warn or fail; `advice` says what to do unless it is ok."""

    check: str
    verdict: str
    text: str
    advice: str = ""


Found: TypeAlias = Finding | Iterable[Finding]


async def tried(check: str, look: Callable[[], Found | Awaitable[Found]]) -> list[Finding]:
    """What `look` finds. That it raises is a finding, too: the other checks go on.

    Raises UsageError: an option is wrong, and no check."""
    findings: list[Finding] = []
    try:
        found = look()
        if isinstance(found, Awaitable):
            found = await found
        findings.extend([found] if isinstance(found, Finding) else found)
    except UsageError:
        raise
    except Exception as error:
        findings.append(unchecked(check, error))
    return findings


def unchecked(check: str, error: Exception) -> Finding:
    """Of a check that raised what it does not expect."""
    text = f"could not be checked: {type(error).__name__}: {error}".partition("\n")[0]
    advice = "is this host short of something (memory, files, a place for temporary files)?"
    return Finding(check, "fail", text, f"{advice} Otherwise please report it")
