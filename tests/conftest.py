"""Share settings and fixtures among all tests: how many ranks run at once, one thread per process because cores are
few, and no network.
"""

import itertools
import multiprocessing as mp
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")  # hidden from all tests except tests/gpu: the others test ranks on CPUs
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
# Without files of compiled code, each process that a test starts would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


# `pytest -m quick` runs these: the tests that fail most often after a change, and those that a new release of torch
# affects.
QUICK = (
    "test_walls.py",
    "experiments/runs/test_find.py",
    "core/job/run/test_layout.py",
    "experiments/runs/test_rundir.py",
    "core/job/test_load.py",
    "core/job/test_checks.py",
    "core/models/test_moe.py",
    "core/kernels/",
    "core/parallel/",
    "pretended_cuda/",
    "core/train/test_optimizer.py",
)
QUICK_LAYOUTS = (
    "fsdp 2",
    "hsdp 2",
    "tp 2, sequence parallel on, loss parallel on",
    "pp 2, 1f1b, accumulation 1",
    "pp 2, zbv, accumulation 1",
    "cp 2, allgather, sequence 32",
    "cp 2, ulysses, sequence 32",
    "simple_fsdp 2",
    "bf16, tp 2, compile",
    "mxfp8, fsdp 2",
    "float8 rowwise, simple_fsdp 2",
    "linear_cross_entropy, pp 2, 1f1b",
)


# These tests are left out by default; `.ci/run` runs them with `pytest -m "long and not slow"`. They take long, and for
# each of them the default suite has a shorter, similar test. equivalence/cover.py chooses the matrix's long cases.
LONG = (
    "recipes/policy/test_cycle.py::test_the_cycle_goes_round_three_times_and_over_a_kill",
    "recipes/policy/test_one_pass.py::test_each_row_is_trained_on_once_in_real_runs",
    "test_transcripts.py::test_the_readme_shows",
    "recipes/transformers/test_transformers.py::test_every_family_has_transformers_gradients",
    "recipes/transformers/test_transformers.py::test_the_table_is_what_was_proven",
    "recipes/transformers/test_transformers.py::test_ten_steps_are_those_of_transformers_in_float64",
    "recipes/transformers/test_transformers.py::test_techniques_go_together",
    "recipes/transformers/test_transformers.py::test_number_formats_go_with_other_layouts",
    "recipes/transformers/test_recipes.py::test_every_recipe",
    "recipes/transformers/test_transformers.py::test_titan_verify_proves_it",
    "recipes/transformers/test_transformers.py::test_a_folder_is_read_and_written_in_its_own_format[qwen3]",
    "recipes/transformers/test_experts.py::test_split_experts_of_every_family",
    "recipes/transformers/test_pipeline.py::test_every_family_learns_the_same_in_a_pipeline",
    "recipes/transformers/test_pipeline.py::test_some_families_learn_the_same_with_other_layouts",
    *(
        f"recipes/transformers/test_folders.py::test_a_run_exports_the_folder_from_which_it_started[{one}"
        for one in ("qwen3_moe", "gpt_oss", "gemma3_text", "mixtral-memory", "mixtral-hub-tp")
    ),
    "test_transcripts.py::test_the_quickstart_shows",
    "slurm/test_tutorial.py",
    "core/checkpoint/test_reshard.py",
    "core/checkpoint/test_torture.py",
    "experiments/runs/test_automation.py",
    "instruments/verify/test_jobs.py::test_resume_asks_for_a_proof_too",
    "instruments/verify/test_jobs.py::test_two_ranks_get_a_proof",
    "experiments/runs/test_compare.py",
    "test_notebook.py::test_an_interrupt_is_ctrl_c_and_the_run_continues",
    "test_notebook.py::test_the_page_runs_in_a_jupyter_kernel",
    "experiments/runs/test_extend.py::test_an_extended_run_is_the_longer_run_bitwise",
    "experiments/runs/test_extend.py::test_fewer_ranks_go_on_as_the_page_says",
    "experiments/runs/test_json.py::test_plan_prints_one_document",
    "experiments/runs/test_json.py::test_verify_prints_one_document",
    "experiments/runs/test_resume.py::test_a_run_goes_on_in_four_layouts_and_learns_the_same",
    "experiments/runs/test_owners.py::test_a_closed_folder_of_runs_is_one_line",
    "experiments/compose/test_cells.py::test_a_cell_is_what_hydra_composes",
    "core/job/test_fuzz.py",
    "core/job/test_registries.py",
    "equivalence/test_cases.py",
    "equivalence/test_fake.py",
    "equivalence/test_random.py",
    "core/train/fault_tolerance/test_per_step.py",
    "core/train/fault_tolerance/test_replicas.py",
    "gpu/test_benchmarks.py::test_every_row_fits_the_card_for_which_it_is_chosen",
    "gpu/test_carried.py::test_rows_are_measured_and_published",
    "gpu/test_kit.py::test_shards_run_side_by_side",
    "gpu/test_kit.py::test_a_case_that_raises_dies_or_hangs_costs_itself",
    "kubernetes/test_drills.py",
    "kubernetes/test_kubectl.py::test_a_submission_killed_half_way",
    "experiments/launch/test_cells.py::test_changed_config_is_refused",
    "experiments/launch/test_cells.py::test_failed_run_is_listed_and_retried_by_class",
    "experiments/launch/test_cells.py::test_sweep_goes_on_after_a_failed_cell_and_shows_all",
    "experiments/launch/test_cells.py::test_worker_runs_under_torchrun",
    "experiments/launch/test_ends.py::test_peers_of_a_dead_rank_are_ended",
    "experiments/launch/test_ends.py::test_power_cut_is_an_interruption",
    "experiments/launch/test_ends.py::test_ranks_outlive_their_launcher_and_the_line_attaches_again",
    "experiments/launch/test_ends.py::test_two_launchers_run_a_line_once",
    "experiments/launch/test_ends.py::test_wandb_sees_one_run_with_rising_steps_after_kills",
    "experiments/launch/test_secrets.py",
    "experiments/launch/test_side_by_side.py::test_four",
    "experiments/launch/test_side_by_side.py::test_cells",
    "experiments/launch/test_side_by_side.py::test_losses",
    "experiments/launch/test_side_by_side.py::test_two",
    "experiments/launch/test_side_by_side.py::test_a_",
    "experiments/launch/test_worked_examples.py",
    "core/models/test_stranger.py::test_six_layouts_learn_what_one_process_learns",
    "core/train/observe/test_flight.py",
    "core/train/observe/test_nan_hunt.py",
    "core/train/observe/test_stragglers.py::test_status_and_report_name_a_rank_that_is_slowed_by_a_third",
    "core/train/observe/test_stuck.py",
    "core/train/test_tracker.py",
    "experiments/runs/test_keep.py::test_kills_at_random_moments_leave_whole_runs",
    "instruments/rates/test_tune.py",
    "recipes/chat/test_sft.py::test_every_layout_learns_what_one_process_learns",
    "recipes/flux/test_diffusion.py::test_every_layout_learns_what_one_process_learns",
    "recipes/image_text/test_image_text.py::test_every_layout_learns_what_one_process_learns",
    "recipes/image_text/test_image_text.py::test_other_decoders_and_rings_learn_it_too",
    "recipes/policy/test_policy.py::test_policies_are_the_same_on_every_layout",
    "recipes/policy/test_policy.py::test_preferences_are_the_same_on_every_layout",
    "instruments/search/test_driver.py::test_runs_outlive_their_driver_and_the_next_one_attaches_to_them",
    "slurm/test_accidents.py",
    "slurm/test_failures.py",
    "slurm/test_owners.py",
    "slurm/test_places.py",
    "slurm/test_preemption.py",
    "slurm/test_sweeps.py",
    "core/train/test_experts_run.py",
    "core/train/test_lora.py::test_every_layout_learns_what_one_process_learns",
    "core/train/test_objectives.py::test_every_layout_learns_what_one_process_learns",
    "core/train/test_world.py::test_a_process_may_train_any_number_of_compiled_models",
)

# The folders of the files that take longest: their tests start launch.py, or ranks for every layout.
LONG_FOLDERS = ("equivalence", "launch", "fault_tolerance")


def pytest_addoption(parser):
    parser.addoption("--update", action="store_true", help="write the texts of messages anew (core/job/messages.txt)")


def pytest_collection_modifyitems(items):
    """Mark the quick and the long tests, and order the files: the longest first, alternating between files that use
    SLURM and others, because two SLURMs at a time would slow each other down.
    """
    for item in items:
        place = item.path.relative_to(Path(__file__).parent).as_posix()
        layout = item.path.name == "test_layouts.py" and item.callspec.id in QUICK_LAYOUTS
        if (layout or place.startswith(QUICK)) and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.quick)
        if f"{place}::{getattr(item, 'originalname', item.name)}".startswith(LONG):
            item.add_marker(pytest.mark.long)
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    slurm, long = ([path for path in files if path.parent.name in folders] for folders in (("slurm",), LONG_FOLDERS))
    first = [path for pair in itertools.zip_longest(slurm, long) for path in pair if path]
    items[:] = [item for path in dict.fromkeys([*first, *files]) for item in files[path]]


@pytest.fixture(scope="session")
def card():
    """Return the environment of a process that may use this machine's GPU. Skip the test if there is no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {} if GPUS is None else {"CUDA_VISIBLE_DEVICES": GPUS}
    question = "import torch; raise SystemExit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", question], env=environment).returncode:
        pytest.skip("no CUDA device here; python tests/gpu/run.py --device cpu --dry-run goes the same way over gloo")
    return environment


@pytest.fixture(scope="module")
def user_modules(tmp_path_factory):
    """Return a function that writes files, given by name, into a folder on Python's path and returns this folder. Parts
    that these modules register are removed after the test.
    """
    from titan_hydra.core.job.config.registry import REGISTRIES

    known = [(registry, dict(registry)) for registry in REGISTRIES.values()]
    folder = tmp_path_factory.mktemp("user")

    def write(files):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return folder

    sys.path.insert(0, str(folder))
    yield write
    sys.path.remove(str(folder))
    for registry, records in known:
        registry.clear()
        registry.update(records)


@pytest.fixture
def on_ranks(tmp_path):
    """Return a function that runs `task(rank)` in `world` forked processes over gloo, and raises the first traceback if
    any of them fails.
    """

    def run(world, task):
        context = mp.get_context("fork")
        processes = [context.Process(target=_rank, args=(rank, world, task, tmp_path)) for rank in range(world)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 120
        while (
            any(p.is_alive() for p in processes)
            and not any(p.exitcode for p in processes)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        for process in processes:
            process.kill()  # ranks that communicate with a failed rank would wait for it; for ranks that have ended, this does nothing
            process.join()
        errors = [path.read_text() for path in sorted(tmp_path.glob("error*"))]
        assert not errors, errors[0]
        assert all(p.exitcode == 0 for p in processes), [p.exitcode for p in processes]

    return run


def _rank(rank, world, task, folder):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    status = 1
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        task(rank)
        # an exiting rank resets its connections, even those of the last barrier, while other ranks may still read from
        # them
        (folder / f"done{rank}").touch()
        while len(list(folder.glob("done*"))) < world:
            time.sleep(0.02)
        status = 0
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
    os._exit(status)
