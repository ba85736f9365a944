"""Make rows of verl from a trace with experts, and write down verl's own tensors of them.

python make_verl.py RESULT TRAJECTORY SAMPLE, with the latter two as `encode` writes them.
"""

import json
import sys
from pathlib import Path

from tugline_verl import Form, make_outputs

from tugline.errors import UsageError
from tugline.types import Sample, Trajectory, decode


class Group:
    """The fields of a graded group that become rows."""

    id = "g"

    def __init__(self, session: Trajectory, *samples: Sample) -> None:
        self.trajectories, self.samples = (session,), samples


def refuse(group: Group, form: Form) -> str:
    """Return the error of an option."""
    try:
        make_outputs(group, 0, form)
    except UsageError as error:
        return str(error)
    return ""


def main() -> None:
    """Write the tensors, and the errors of what verl cannot replay."""
    result, session, sample = sys.argv[1:]
    trajectory = decode(Path(session).read_bytes(), Trajectory)
    group = Group(trajectory, decode(Path(sample).read_bytes(), Sample))
    form = Form(kept=False, dense_layers=(0,), replay=True)
    (row,), (empty,) = make_outputs(group, 0, form), make_outputs(Group(trajectory), 0, form)
    tensors = row.as_dict()
    plain = make_outputs(group, 0, Form(experts=False, kept=False))[0].as_dict()
    made = {
        "experts": tensors["routed_experts"].tolist(),
        "type": str(tensors["routed_experts"].dtype),
        "mask": tensors["response_mask"].tolist(),
        "empty": empty.as_dict()["routed_experts"].tolist(),
        "plain": [name for name in plain if name == "routed_experts" and plain[name] is not None],
        "refused": [refuse(group, each) for each in (Form(kept=False), form._replace(kept=True))],
    }
    Path(result).write_text(json.dumps(made))


if __name__ == "__main__":
    main()
