"""The pinned packages against the databases of known vulnerabilities: `make audit`.

    python -m tests.audit pip-audit

The one argument is the command of pip-audit. What could not be audited is said, never passed over: where no database
can be reached the audit is skipped, in a line that begins with `audit: SKIPPED`. The exit status is 1 where a
vulnerability is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SERVICES = ("pypi", "osv")
REQUIREMENTS = Path(__file__).parent.parent / "constraints.txt"


def audit(command: Sequence[str], service: str, requirements: Path = REQUIREMENTS) -> dict[str, list[str]] | str:
    """The vulnerabilities of each package that was audited, or why none was.

    pip-audit itself says "No known vulnerabilities found" where its service knows none of the packages.
    """
    options = [
        "--no-deps",
        "--disable-pip",
        "--format=json",
        "--progress-spinner=off",
        f"--vulnerability-service={service}",
    ]
    words = [*command, *options, "--requirement", str(requirements)]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        return " ".join(str(error).split())
    try:
        dependencies = json.loads(answer.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        lines = answer.stderr.split("\n") if answer.stderr.strip() else [f"status {answer.returncode}"]
        return next(line for line in reversed(lines) if line.strip())[:200]
    audited = {
        f"{entry['name']} {entry['version']}": [found["id"] for found in entry["vulns"]]
        for entry in dependencies
        if "skip_reason" not in entry
    }
    skipped = [entry for entry in dependencies if "skip_reason" in entry]
    if not audited:
        first = f" ({skipped[0]['skip_reason']})" if skipped else ""
        return f"it knows none of {len(skipped)} packages{first}"
    for entry in skipped:
        print(f"audit: not audited: {entry['skip_reason']}")
    return audited


def main(command: Sequence[str]) -> int:
    """The exit status."""
    reasons = {}
    for service in SERVICES:
        found = audit(command, service)
        if isinstance(found, str):
            reasons[service] = found
            continue
        vulnerable = {name: identifiers for name, identifiers in found.items() if identifiers}
        for name, identifiers in vulnerable.items():
            print(f"audit: {name}: {', '.join(identifiers)}")
        print(f"audit: {len(found)} packages by {service}, {len(vulnerable)} with known vulnerabilities")
        return int(bool(vulnerable))
    print("audit: SKIPPED, nothing was audited: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
