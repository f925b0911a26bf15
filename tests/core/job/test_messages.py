"""Pin the texts of faults in one file: each command line of messages.txt is refused in the lines that stand under it.
`pytest tests/core/job/test_messages.py --update` writes them anew, for new command lines too. Other tests compare a
fault's code, key and legal values.
"""

import shlex
from pathlib import Path

from tests.core.job.test_fuzz import verdict

FILE = Path(__file__).with_name("messages.txt")
LINE = "$ launch.py "


def test_each_line_is_refused_in_these_words(request):
    blocks = FILE.read_text().strip().split("\n\n")
    typed = [block.splitlines()[0].removeprefix(LINE) for block in blocks]
    found = ["\n".join([LINE + line, *verdict(shlex.split(line))]) for line in typed]
    if request.config.getoption("--update"):
        FILE.write_text("\n\n".join(found) + "\n")
    else:
        assert found == blocks
    assert all("\n" in block for block in found), "a line of the table is accepted"
