"""Known faults of the pinned packages: `make audit`, or `python tests/audit.py constraints.txt`.

pip-audit leaves out a package that it cannot look up, says so in its JSON and exits with 0. Nothing
is known of such a package, so here it counts as a failure of the audit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def judge(report: Any) -> tuple[int, list[str]]:
    """Exit status and lines for pip-audit's JSON: 0 clean, 1 faults are known, 2 not looked up."""
    packages = report["dependencies"]
    faults = [
        f"{package['name']} {package['version']}: {found['id']}, fixed in "
        + (", ".join(found["fix_versions"]) or "no version yet")
        for package in packages
        for found in package.get("vulns", [])
    ]
    skipped = [
        f"{package['name']}: not looked up: {package['skip_reason']}"
        for package in packages
        if "skip_reason" in package
    ]
    if skipped or not packages:
        counted = f"{len(skipped)} of {len(packages)} packages were not looked up"
        return 2, [*faults, *skipped, f"the audit has failed: {counted}"]
    if faults:
        return 1, [*faults, f"{len(faults)} known faults in {len(packages)} packages"]
    return 0, [f"no known fault in {len(packages)} packages"]


def main(requirements: str) -> int:
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    # The pins are complete and exact: nothing is resolved or installed to look them up.
    command += ["--disable-pip", "--no-deps", "--requirement", requirements]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        status, lines = judge(json.loads(done.stdout))
    except (ValueError, KeyError, TypeError):
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        status, lines = 2, [f"the audit has failed: {said[-1]}"]
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
