"""Which rights the launcher needs in a namespace, and which of them the user lacks. The API server is asked once, with a
SelfSubjectAccessReview for each right, as `kubectl auth can-i` does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from .kubectl import KubectlError, Namespace

FORMAT = (  # in which kubectl prints a line for each review
    "{.spec.resourceAttributes.verb} {.spec.resourceAttributes.resource} {.status.allowed} {.status.evaluationError}"
    '{"\\n"}'
)


@dataclass(frozen=True)
class Right:
    """A verb on a kind of object; `without` is what does not work without it."""

    verb: str
    resource: str
    group: str
    without: str
    required: bool = True

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


RIGHTS = (
    Right("create", "jobs", "batch", "nothing can be submitted"),
    Right("list", "jobs", "batch", "the states of runs are unknown"),
    Right("delete", "jobs", "batch", "`titan stop` cannot stop a run"),
    Right("list", "pods", "", "`titan status` prints no reason why a pod waits or ended", required=False),
)


def rights_lacking(target: Namespace) -> list[Right]:
    """Return the rights that the user does not have in a namespace. A cluster that does not answer such questions, or
    cannot decide, has refused nothing, so then nothing is lacking.
    """
    reviews = [
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {
                "resourceAttributes": {
                    "namespace": target.name,
                    "verb": right.verb,
                    "group": right.group,
                    "resource": right.resource,
                }
            },
        }
        for right in RIGHTS
    ]
    text = "\n".join(map(json.dumps, reviews))
    try:
        answers = target.call("create", "--validate=false", "--filename=-", f"--output=jsonpath={FORMAT}", text=text)
    except KubectlError:
        return []
    denied = {" ".join(words[:2]) for line in answers.splitlines() if (words := line.split())[2:] == ["false"]}
    return [right for right in RIGHTS if str(right) in denied]
