"""Install SLURM if missing, for `make test-cluster`; without it its tests are skipped.

As root on Debian or Ubuntu, `slurm-wlm` and `munge` are installed with apt. Tests start their own
daemons and do not use those of the machine.
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
    """Install the packages of programs that are not on the PATH."""
    missing = sorted({package for name, package in PROGRAMS.items() if shutil.which(name) is None})
    if not missing:
        return
    print(f"slurm: installing {' '.join(missing)} with apt-get ...", file=sys.stderr, flush=True)
    if reason := install(missing):
        print(f"slurm: its tests are skipped; {' '.join(missing)}: {reason}", file=sys.stderr)


main()
