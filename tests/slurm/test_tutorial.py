"""The tutorial "From your laptop to your SLURM" shows what its lines print on a real SLURM, one node of which fails."""

from tests.test_transcripts import ROOT, transcripts

from .conftest import desk, running

PAGE = ROOT / "docs/laptop-to-slurm.md"


def test_the_tutorial_shows_what_its_lines_print(request, tmp_path):
    """Lines that look at the run wait until it is where the page says."""
    with running(name="lab", nodes=2, gpus=2) as cluster, desk(cluster, tmp_path / "work") as submit:
        env = {**submit.env, "COLUMNS": "80", "HOME": str(tmp_path)}

        def lab():
            (found,) = submit.folder.glob("runs/lab-*")
            return found

        def crash():
            submit.wait(lambda: submit.step(lab()) >= 60, 400)
            cluster.manage("crash", "node1")

        before = {
            "titan status lab": [
                lambda: submit.wait(lambda: submit.step(lab()) >= 10),
                lambda: (crash(), submit.wait(lambda: "queued" in str(submit.status("runs")), 100, 1)),
                lambda: submit.wait(lambda: submit.done(lab()), 400),
            ],
            "titan logs lab": [lambda: submit.wait(lambda: submit.step(lab()) >= 51, 400)],
        }

        def run(line, folder):
            if waits := before.get(line.partition("  #")[0].strip()):
                waits.pop(0)()
            return transcripts.run(line, folder, env)

        transcripts.run("titan init .", submit.folder, env)
        missing, today = transcripts.check(PAGE, submit.folder, run)
    if request.config.getoption("--update"):
        PAGE.write_text(today)
    else:
        assert missing == []
