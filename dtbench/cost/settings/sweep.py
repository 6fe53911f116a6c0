"""A sweep over variables as a shell script: fresh launches of every arm, in turns, each with a file of its own.

Between launches lies almost all variance, and machines drift: arms that take turns in an order drawn anew for every
round meet the same machine. The file of a run holds the name of its arm, by which `dtbench settings` knows it.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Sequence

from dtbench.suite import SWEEP_ARM
from dtbench.suite.errors import UsageError
from dtbench.text.masking import is_secret, mask
from dtbench.text.variables import parse_variables


def script(arms: Sequence[str], command: Sequence[str], launches: int, folder: str, seed: int) -> str:
    """The script. arms: `A=1,B=2` each; one without variables, to be judged against, is added.

    Raises:
        UsageError: an arm that is no list of variables, or stands twice; a command that names its own file.
    """
    variables = [parse_variables(arm) for arm in ("", *arms)]
    if any(variables.index(one) != i for i, one in enumerate(variables)):
        raise UsageError("an arm stands twice or sets nothing: give each its own NAME=VALUE")
    for name, value in ((name, value) for one in variables for name, value in one.items()):
        if is_secret(name) or mask(value) != value:
            raise UsageError(
                f"the value of {name} looks like a secret, which the script and its run files would show: set it in "
                "the shell that runs the script"
            )
    if not command:
        raise UsageError("got no COMMAND after --: expected COMMAND, such as `-- dtbench run collectives`")
    if any(word in ("-o", "--output", "--launches") or word.startswith("--output=") for word in command):
        raise UsageError(
            "the sweep gives each launch its -o and counts them: leave -o and --launches out of COMMAND"
        )
    if not folder:
        raise UsageError("-o is empty: give the folder for the files of the launches")
    order = random.Random(seed)
    texts = ["", *arms]
    lines = [f"mkdir -p {shlex.quote(folder)}"]
    for launch in range(launches):
        for arm in order.sample(range(len(variables)), len(variables)):
            forced = [f"{name}={value}" for name, value in variables[arm].items()]
            path = f"{folder}/{launch:02d}-arm{arm}.jsonl"
            lines.append(shlex.join(["env", f"{SWEEP_ARM}={texts[arm]}", *forced, *command, "-o", path]))
    head = (
        f"#!/bin/bash\n# {len(variables)} arms, {launches} launches each, drawn with seed {seed}.\nset -e\n"
    )
    return head + "\n".join(lines) + "\n"
