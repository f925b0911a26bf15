"""The lines of the worked examples in docs/ run unchanged and print the output on the page, except what depends on the
machine.
"""

import re


def squeezed(text):
    return " ".join(text.split())


def shown(page):
    """Return the output lines of a page: blocks marked `text`, without the lines that only mark an omission."""
    return [
        squeezed(line)
        for block in re.findall(r"```text\n(.*?)```", page, re.S)
        for line in block.splitlines()
        if line != "..."
    ]


def test_the_plan_is_the_one_of_the_page(launcher):
    printed = [
        squeezed(line)
        for _, done in launcher.page("plan.md", section="Worked example")
        for line in (done.stdout + done.stderr).splitlines()
    ]
    printed = [re.sub(r"-[0-9a-f]{8} ", "-... ", line) for line in printed]
    assert [line for line in shown((launcher.ROOT / "docs/plan.md").read_text()) if line not in printed] == []


def test_another_layout_is_the_same_run_to_rounding(launcher):
    said = {line: done.stdout for line, done in launcher.page("report.md", section="Worked example")}
    control = said["titan compare fsdp again"]
    assert control.count("the same bits in all of them") == 2, control
    for other in ("tp", "moved"):
        compared = said[f"titan compare fsdp {other}"]
        farthest = re.findall(r"off by (\S+) at most", compared)
        same = compared.count("the same bits in all of them")  # of the loss or the norm, by chance
        assert len(farthest) + same == 2 and all(float(number) < 1e-5 for number in farthest), compared
    trap = said["titan compare fsdp trap"]
    assert (
        re.search(r"data\.global_batch +8 samples +2 samples +learning", trap)
        and "off by more than 0.0001 from step 1:" in trap
    ), trap


def test_optimizers_are_compared_over_seeds(launcher):
    """The runs have two steps, which checks that the page's lines work, but not the page's conclusions."""
    *_, (_, report), _ = launcher.page(
        "worked-examples.md", "steps=2", "validation.interval=1", "validation.steps=1", section="Does Muon"
    )
    rows = [line for line in report.stdout.splitlines() if line.startswith("optimizer=")]
    assert len(rows) == 7 and all(line.split()[2] == "3" for line in rows), report.stdout
    assert (launcher.folder / "figures/validation.png").stat().st_size > 1000
