"""`titan runs`: remove runs, archive and restore them, move them to another folder or disk."""

import argparse
import contextlib
import errno
import getpass
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from titan_hydra.core.base.amounts import in_bytes
from titan_hydra.core.base.errors import ConfigError, Exit, RunError
from titan_hydra.core.base.text import to_json
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.run import checkpoints, layout
from titan_hydra.core.job.run.frozen import load_job
from titan_hydra.core.job.run.run import newest_attempt
from titan_hydra.experiments.runs import find, needs, packing, proofs, rundir
from titan_hydra.experiments.runs.command_stop import asked
from titan_hydra.experiments.runs.needs import Going, bytes_of
from titan_hydra.experiments.runs.packing import Member
from titan_hydra.experiments.runs.view import add_runs, choose

PAST = {"remove": "removed", "archive": "archived", "restore": "restored", "move": "moved"}


def remove_runs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `titan runs remove`."""
    _add_targets(parser, "*")
    parser.add_argument(
        "--unused",
        action="store_true",
        help="remove what no run needs, if it is older than a day: snapshots of code, tables of files, what killed commands left",
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")


def archive_runs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `titan runs archive`."""
    _add_targets(parser, "+")
    parser.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="FILE",
        help=f"the archive to write; its name ends in {', '.join(packing.SUFFIXES)}",
    )
    parser.add_argument(
        "--checkpoints",
        choices=("all", "last", "none"),
        default="all",
        help="which checkpoints to archive; the others are deleted with the runs (default: all)",
    )
    parser.add_argument("--keep", action="store_true", help="leave the runs where they are")


def restore_runs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `titan runs restore`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="an archive that `titan runs archive` has written")
    add_runs(parser)
    _add_ways(parser)


def move_runs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `titan runs move`."""
    _add_targets(parser, "+")
    parser.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="another folder of runs, also on another disk"
    )


def _add_targets(parser: argparse.ArgumentParser, number: str) -> None:
    parser.add_argument(
        "targets",
        nargs=number,
        metavar="TARGET",
        help="sweeps, cells, runs' names or directories, folders of runs, or starts of hashes; a sweep is all its runs and its manifest",
    )
    add_runs(parser)
    parser.add_argument(
        "--force", action="store_true", help="also take runs that other runs or sweeps need, but none that is active"
    )
    _add_ways(parser)


def _add_ways(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry", action="store_true", help="only print what would be done, and the bytes")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def remove_runs(args: argparse.Namespace) -> int:
    """Remove runs with their sweeps, or what no run needs. Returns 0 also if the user answers no."""
    if bool(args.targets) == args.unused:
        raise ConfigError("titan runs remove: give the runs to remove, or --unused, and not both")
    if args.unused:
        return _remove_unused(args)
    going = _chosen(args)
    _refuse(going, args)
    sizes = {run: bytes_of(run) for run in going.runs}
    if not args.dry and not args.yes:
        print(*(f"{run.name}  {in_bytes(size)}" for run, size in sizes.items()), sep="\n")
        if not asked(f"remove {_total(going, sizes)}? [y/N] "):
            print("nothing was removed")
            return Exit.DONE
    if not args.dry:
        with _whole("what was not removed is as it was"):
            _delete(going, "removed")
    return _tell(args, "remove", going, sizes)


def archive_runs(args: argparse.Namespace) -> int:
    """Write an archive of runs with their sweeps, compare it with them, and then remove them."""
    packing.check_suffix(args.to)
    going, file = _chosen(args), args.to.absolute()
    _refuse(going, args, () if args.keep else needs.needed(going, together=False))
    if not file.parent.is_dir():
        raise ConfigError(f"--to {args.to}: its folder does not exist")
    if inside := [run for run in going.runs if file.is_relative_to(run)]:
        raise ConfigError(f"--to {args.to}: lies in {inside[0].name}, which is archived")
    pieces, sizes = _pieces(going), {run: bytes_of(run) for run in going.runs}
    left_out = {path for run in going.runs for path in _steps_left_out(run, args.checkpoints)}
    about: dict[str, Any] = {"runs": [run.name for run in going.runs], "sweeps": [sweep.name for sweep in going.sweeps]}
    about |= {"left_out": sorted(f"{path}" for path in left_out), "by": getpass.getuser(), "time": time.time()}
    more = {"to": str(file), "left_out": sum(map(bytes_of, left_out))}
    if os.path.lexists(file):
        _refuse_other(file, [piece for piece in pieces if piece.source in (*going.runs, *going.sweeps)], left_out)
    if not args.dry:
        with _whole("nothing was deleted"):
            if not file.exists():
                packing.write_archive(file, pieces, left_out, about)
        if not args.keep:
            with _whole(f"all is in {file}"):
                _delete(going, "archived", file)
    return _tell(args, "archive", going, sizes, more | ({} if args.dry else {"archive_bytes": bytes_of(file)}))


def restore_runs(args: argparse.Namespace) -> int:
    """Read an archive, compare it with its checksums, and put its runs back."""
    home, file = args.runs.absolute(), args.file.absolute()
    if not file.is_file():
        raise ConfigError(f"{args.file}: no such file")
    if home.exists() and not home.is_dir():
        raise ConfigError(f"--runs {args.runs}: is no folder")
    if args.dry:
        about = packing.read_archive(file)
        there = [name for name in about["runs"] if os.path.lexists(home / name)]
        if there:
            raise ConfigError(f"{home / there[0]}: exists already")
        return _tell(args, "restore", Going([home / name for name in about["runs"]]), {}, {"to": str(home)})
    with _whole("nothing was restored, and the archive is as it was"):
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=home, ignore_cleanup_errors=True) as scratch:
            about = packing.read_archive(file, Path(scratch))
            going = Going(
                [home / name for name in about["runs"]], [layout.SWEEPS.of(home) / name for name in about["sweeps"]]
            )
            names = [path.relative_to(home).as_posix() for path in (*going.runs, *going.sweeps)]
            names = [*_shared_names(Path(scratch), names), *names]
            pieces = [Member(Path(scratch, name), name) for name in names]
            _refuse_there(pieces, going, home)
            _put(pieces, home)
    _delete_notes(home, [run.name for run in find.all_runs(home)])
    return _tell(args, "restore", going, {run: bytes_of(run) for run in going.runs}, {"to": str(home)})


def move_runs(args: argparse.Namespace) -> int:
    """Move runs with their sweeps to another folder of runs, and copy what they need there."""
    going, home = _chosen(args), args.to.absolute()
    if home.exists() and not home.is_dir():
        raise ConfigError(f"--to {args.to}: is no folder")
    for top in (*going.runs, *going.homes):
        if (home.resolve() == top.resolve()) or (top in going.runs and home.is_relative_to(top)):
            raise ConfigError(f"--to {args.to}: is {'the folder of' if top in going.homes else 'inside'} what is moved")
    _refuse(going, args, needs.needed(going, together=True))
    pieces, sizes = _pieces(going), {run: bytes_of(run) for run in going.runs}
    _refuse_there(pieces, going, home)
    if not args.dry:
        with _whole("what was not moved is as it was"):
            home.mkdir(parents=True, exist_ok=True)
            _note_gone(going, "moved", home)
            _move(pieces, going, home)
            _forget_gone(going)
    return _tell(args, "move", going, sizes, {"to": str(home)})


def _chosen(args: argparse.Namespace) -> Going:
    """Return the runs that the targets select, and the sweeps that are selected whole."""
    runs: dict[Path, None] = {}
    sweeps: dict[Path, None] = {}
    for target in args.targets:
        selection = choose(target, args.runs)
        there = [cell.directory for cell in selection.cells if os.path.lexists(cell.directory)]
        whole = [selection.manifest] if selection.manifest else []
        if not whole and Path(target).is_dir() and not find.is_run(Path(target)):
            whole = find.sweeps(Path(target).absolute())
        if not there and not whole:
            names = [rundir.gone(cell.directory) for cell in selection.cells]
            raise ConfigError(
                f"{target}: no run is there" + (f"; it was {names[0].refused}" if names and names[0] else "")
            )
        # the second run of a packed sweep's baseline lies in the sweep's folder, and goes with it
        runs |= dict.fromkeys(Path(os.path.normpath(run)) for run in there if not any(map(run.is_relative_to, whole)))
        sweeps |= dict.fromkeys(Path(os.path.normpath(folder)) for folder in whole)
    going = Going([*runs], [*sweeps])
    if len({run.name for run in runs}) < len(runs):
        raise ConfigError("two of the runs have one name; take the runs of one folder at a time")
    return going


def _refuse(going: Going, args: argparse.Namespace, others: Any = None) -> None:
    """Raise ConfigError with a line for each reason why the runs may not be touched."""
    faults = [*needs.faults_of_folders(going), *needs.faults_of_state(going, args.force)]
    if not args.force:
        others = needs.needed(going, together=False) if others is None else others
        faults += [f"{need}; --force takes it all the same" for need in others]
    if faults:
        raise ConfigError("\n".join(faults))


@contextlib.contextmanager
def _whole(rest: str) -> Iterator[None]:
    """Turn an error of the file system, such as a full disk, into one line that ends with what is as it was."""
    try:
        yield
    except PermissionError:
        raise
    except (OSError, shutil.Error) as error:
        file = f"{error.filename}: " if getattr(error, "filename", None) else ""
        raise RunError(f"{file}{getattr(error, 'strerror', None) or error}; {rest}") from error


def _pieces(going: Going) -> list[Member]:
    """Return the runs and sweeps, and before them what goes with them: snapshots of code, tables of files, proofs of their
    layouts, notes about cells that are gone.
    """
    pieces = []
    for home in going.homes:
        mine = [run for run in going.runs if run.parent == home]
        absent = {
            cell.directory.name
            for sweep in going.sweeps
            for cell in find.sweep(sweep).cells
            if not cell.directory.is_dir()
        }
        beside = [*needs.beside(mine, home), *_proofs(mine, home)]
        beside += [file for name in absent if (file := layout.GONE_RUN.of(layout.GONE.of(home), name)).is_file()]
        pieces += [Member(path, path.relative_to(home).as_posix()) for path in beside]
    pieces += [Member(run, run.name) for run in going.runs]
    return [*pieces, *(Member(sweep, sweep.relative_to(sweep.parents[1]).as_posix()) for sweep in going.sweeps)]


def _proofs(runs: list[Path], home: Path) -> list[Path]:
    """Return the proofs of the layouts of runs."""
    folders = sorted(folder.parent for folder in layout.PROOFS.of(home).glob(f"*/{layout.PROOF.name}"))
    layouts = set()
    for run in runs if folders else ():
        with contextlib.suppress(ConfigError):  # the run of another version
            layouts.add(proofs.layout_hash(load_job(run)))
    return [folder for folder in folders if folder.name.partition("-")[0] in layouts]


def _shared_names(scratch: Path, left_out: list[str]) -> list[str]:
    """Return the names of the pieces in a folder, except the runs and sweeps `left_out`."""
    names = [path.relative_to(scratch).as_posix() for path in sorted(scratch.glob("_*/*"))]
    return [name for name in names if name not in left_out]


def _steps_left_out(run: Path, which: str) -> list[Path]:
    """Return the folders of checkpoints that an archive leaves out. Raises ConfigError if the last one is damaged."""
    steps = []
    for home in (run, *layout.REPLICA.all(run).values()) if which != "all" else ():
        folder = layout.CHECKPOINTS.of(home)
        last = checkpoints.newest(folder) if which == "last" else None
        if last and (damage := checkpoints.damage(last)):
            raise ConfigError(f"--checkpoints last: {last} is damaged ({damage[0]}); titan checkpoint prune deletes it")
        steps += [path for path in sorted(folder.iterdir()) if path != last] if folder.is_dir() else []
    return steps


def _refuse_other(file: Path, pieces: list[Member], left_out: set[Path]) -> None:
    """Raise ConfigError unless a file that exists is an archive of these pieces: an earlier command has written it, and was
    stopped before it had removed all runs.
    """
    try:
        known = packing.read_archive(file)["files"]
    except ConfigError as error:
        raise ConfigError(f"{file}: exists already, and is not replaced ({error})") from error
    for piece in pieces:
        if any(known.get(name) != {"sha256": digest} for name, digest in packing.sums_of(piece, left_out).items()):
            raise ConfigError(f"{file}: exists already, and holds another {piece.name}")


def _refuse_there(pieces: list[Member], going: Going, home: Path) -> None:
    """Raise ConfigError if a run or a sweep is in a folder of runs already, unless it has the same bytes there."""
    asked = {path.name for path in (*going.runs, *going.sweeps)}
    for piece in pieces:
        there = home / piece.name
        if (
            piece.source.name in asked
            and os.path.lexists(there)
            and packing.sums_of(Member(there, piece.name)) != packing.sums_of(piece)
        ):
            raise ConfigError(f"{there}: exists already, with other content; nothing was changed")


def _put(pieces: list[Member], home: Path) -> None:
    """Rename pieces into a folder of runs, except those that are there."""
    for piece in pieces:
        target = home / piece.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(target):
            piece.source.rename(target)
            checkpoints.sync_folder(target.parent)


def _delete(going: Going, word: str, to: Path | None = None) -> None:
    """Delete runs, then sweeps. A kill leaves each of them whole, or in REPLACED, where no command looks for runs."""
    _note_gone(going, word, to)
    for run in going.runs:
        rundir.delete_aside(_taken_away(run), run.name)
    for sweep in going.sweeps:
        rundir.delete_aside(rundir.lay_aside(sweep), sweep.name)
    _forget_gone(going)


def _taken_away(run: Path, to: Path | None = None) -> Path:
    """Rename a run, to a place where no command looks for runs if none is given, and return its new path. Raises
    ConfigError, and leaves the run, if a launcher has claimed it meanwhile.
    """
    before = newest_attempt(run)
    there = run.rename(to) if to else rundir.lay_aside(run)
    if newest_attempt(there) != before:
        there.rename(run)
        raise ConfigError(f"{run.name}: was started meanwhile; it is as it was")
    return there


def _note_gone(going: Going, word: str, to: Path | None) -> None:
    """Write for each run that a sweep lists what becomes of it. While the run is there, nobody reads the note."""
    for run in going.runs:
        if needs.sweeps_with(run):
            folder = layout.GONE.of(run.parent)
            folder.mkdir(exist_ok=True)
            content = {"word": word, "by": getpass.getuser(), "time": time.time(), **({"to": str(to)} if to else {})}
            layout.GONE_RUN.write(folder, content, run.name)


def _forget_gone(going: Going) -> None:
    """Delete the notes about cells whose sweeps are gone too."""
    for home in {sweep.parents[1] for sweep in going.sweeps}:
        listed = {cell.directory.name for folder in find.readable(home) for cell in find.sweep(folder).cells}
        _delete_notes(home, {note.stem for note in layout.GONE.of(home).glob("*.json")} - listed)


def _delete_notes(home: Path, names: Iterable[str]) -> None:
    """Delete the notes about runs of these names in a folder of runs."""
    folder = layout.GONE.of(home)
    for name in names:
        layout.GONE_RUN.of(folder, name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # there are others, or there was none
        folder.rmdir()


def _move(pieces: list[Member], going: Going, home: Path) -> None:
    """Move runs and sweeps, and copy the other pieces. Between two file systems, a copy is compared with the original before
    that is deleted.
    """
    asked = {*going.runs, *going.sweeps}
    for piece in pieces:
        target = home / piece.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if piece.source in asked and not os.path.lexists(target):
            try:
                _ = _taken_away(piece.source, target) if piece.source in going.runs else piece.source.rename(target)
                continue
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
        if not os.path.lexists(target):
            with tempfile.TemporaryDirectory(prefix=".new-", dir=home, ignore_cleanup_errors=True) as scratch:
                _put([Member(packing.copy_piece(piece, Path(scratch)), piece.name)], home)
        if piece.source in going.runs:
            rundir.delete_aside(_taken_away(piece.source), piece.source.name)
        elif piece.source in asked:
            rundir.delete_aside(rundir.lay_aside(piece.source), piece.source.name)
    _delete_notes(home, [run.name for run in find.all_runs(home)])


def _remove_unused(args: argparse.Namespace) -> int:
    """Remove what no run in the folder of runs needs."""
    home = args.runs.absolute()
    if not home.is_dir():
        raise ConfigError(f"--runs={args.runs}: no such folder")
    sizes = {path: bytes_of(path) for path in needs.unused(home)}
    for path in () if args.dry else sizes:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    files = [{"path": str(path), "bytes": size} for path, size in sizes.items()]
    if args.json:
        print(to_json({"dry": args.dry, "bytes": sum(sizes.values()), "unused": files}))
        return Exit.DONE
    word = "would be removed" if args.dry else "removed"
    for path, size in sizes.items():
        print(f"{path.relative_to(home)}  {in_bytes(size)}  {word}")
    print(f"{counted(len(sizes), 'thing')}, {in_bytes(sum(sizes.values()))}, {word}" if sizes else "nothing is unused")
    return Exit.DONE


def _tell(
    args: argparse.Namespace, verb: str, going: Going, sizes: dict[Path, int], more: dict[str, Any] | None = None
) -> int:
    """Print what was done, or with --dry what would be done."""
    more = more or {}
    if args.json:
        rows = [{"name": run.name, "directory": str(run), "bytes": sizes.get(run)} for run in going.runs]
        sweeps = [sweep.name for sweep in going.sweeps]
        print(to_json({"dry": args.dry, "bytes": sum(sizes.values()), "runs": rows, "sweeps": sweeps, **more}))
        return Exit.DONE
    word = f"would be {PAST[verb]}" if args.dry else PAST[verb]
    to = f" to {more['to']}" if verb in ("archive", "move") else ""
    for run in going.runs:
        print(f"{run.name}  {in_bytes(sizes[run]) if run in sizes else ''}  {word}")
    for sweep in going.sweeps:
        print(f"{sweep.name}  {word}")
    freed = f", {in_bytes(more['archive_bytes'])} in the archive" if "archive_bytes" in more else ""
    print(f"{_total(going, sizes)} {word}{to}{freed}")
    return Exit.DONE


def _total(going: Going, sizes: dict[Path, int]) -> str:
    sweeps = f" and {counted(len(going.sweeps), 'sweep')}" if going.sweeps else ""
    return f"{counted(len(going.runs), 'run')}{sweeps}" + (f", {in_bytes(sum(sizes.values()))}," if sizes else "")
