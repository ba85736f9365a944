"""See that there is SLURM, for `make test-cluster`; without it its tests are skipped.

Root on Debian or Ubuntu gets `slurm-wlm` and `munge` by apt. The daemons of the machine are left
alone: the tests start their own.
"""

from __future__ import annotations

import shutil
import sys

from debian import install

PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "bwrap": "bubblewrap",
}
"""Program to package."""


def main() -> None:
    """Done at once where all of them are on the PATH."""
    missing = sorted({own for name, own in PROGRAMS.items() if shutil.which(name) is None})
    if not missing:
        return
    print(f"slurm: installing {' '.join(missing)} with apt-get ...", file=sys.stderr, flush=True)
    if reason := install(missing):
        print(f"slurm: its tests are skipped; {' '.join(missing)}: {reason}", file=sys.stderr)


main()
