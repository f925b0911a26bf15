"""titan cluster init writes a file that works: a cell is submitted with it."""


def test_the_file_it_writes_takes_a_cell_to_its_end(submit):
    site = submit.folder.parent / "site"
    made = submit.python("-m", "titan_hydra.cli", "cluster", "init", "mysite", "--partition", "main", "--folder", str(site / "cluster"))
    assert made.returncode == 0, made.stderr
    text = (site / "cluster" / "mysite.yaml").read_text()
    assert "name: mysite\n" in text and "partition: main\n" in text and "gpus_per_node: 4\n" in text and text in made.stdout
    again = submit.python("-m", "titan_hydra.cli", "cluster", "init", "mysite", "--folder", str(site / "cluster"))
    assert (again.returncode, "already exists" in again.stderr) == (2, True)
    options = ("cluster=mysite", "gpus=2", "checkpoint=off", "launch.wait=true")
    result = submit.run("--config-dir", str(site), *submit.TINY, *options)
    assert result.returncode == 0, result.stderr
    assert "1 done" in result.stdout
