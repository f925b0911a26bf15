"""Runs on the stand-in cluster: real kubectl, real ranks over gloo in two pods. The slow tests disturb them."""

import json
import re

from .kubelet import IMAGE

TWO = ("gpus=2", "cluster.gpus_per_node=1")


def test_two_pods_train_what_two_ranks_here_train(desk):
    out = desk.submit(*TWO, "launch.wait=true")
    (run,) = desk.cells()
    assert "1 done" in out and desk.done(run), out + desk.story()
    assert desk.state(run)["state"] == "done"
    nodes = json.loads((run / "attempts/1/nodes.json").read_text())["names"]
    assert len(nodes) == 2 and {desk.rank_record(run, rank)["host"] for rank in (0, 1)} == {
        re.sub("-[0-9a-f]{5}$", "", name) for name in nodes
    }
    (service,) = desk.site.store.all("services")
    assert service["metadata"]["ownerReferences"][0]["kind"] == "Job"
    here = desk.run(*desk.TINY, "gpus=2", "paths.runs=here")
    assert here.returncode == 0, here.stderr
    (other,) = (path.parent for path in (desk.folder / "here").glob("*/config.json"))
    assert other.name == run.name and desk.losses(run) == desk.losses(other)
    assert IMAGE in (run / "job.yaml").read_text()
