"""docs/troubleshooting.md: every entry that the code names is there and is reached by a message provoked for real, and
every promise in it has its test."""

import dataclasses
import errno
import re
import sys
import tomllib
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest
import torch
import toy

import nbtools as nb
from nbtools import disk, errors
from nbtools.__main__ import main, parser
from nbtools.data import open_feed, transfer
from nbtools.errors import NbtoolsError, PackError, PlanError, TrainError, see
from nbtools.folder import only_one
from nbtools.tasks import captcha, hwdb, segment, sign
from nbtools.train import indices

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / errors.PAGE).read_text()
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
PARTS = ["**You see**", "**nbtools does**", "**Left to you**"]

PROMISES = {  # entry → for each line below "nbtools does" the tests of it
    "Out of memory": [
        "test_loop.test_out_of_memory_halves_the_micro_batch_and_keeps_batch_lr_and_result",
        "test_loop.test_out_of_memory_in_evaluation_takes_the_batch_in_halves",
        "test_finder.test_what_does_not_fit_is_never_chosen test_finder.test_a_limit_in_bytes_is_kept_with_headroom",
        "test_graph.test_out_of_memory_halves_the_batch_and_its_steps_are_recorded_anew",
        "test_memory.test_a_cell_that_fails_amid_training_leaves_no_memory_behind_and_the_next_one_trains",
    ],
    "NaN": [
        "test_rollback.test_a_change_after_which_the_loss_explodes_is_undone_and_leaves_no_trace",
        "test_resume.test_a_lost_loss_goes_back_to_the_checkpoint_and_leaves_the_bad_step_out",
        "test_resume.test_a_loss_that_is_always_lost_stops_with_what_to_do",
        "test_common.test_ctc_counts_each_samples_own_steps_and_not_the_padding",
        "test_precision.test_steps_that_overflow_in_fp16_count_for_nothing",
        "test_precision.test_fp16_that_skips_every_step_ends_with_what_to_do_and_the_run_continues_without_it "
        "test_precision.test_a_change_to_fp16_that_skips_every_step_is_undone",
        "test_segment_task.test_batches_without_a_valid_pixel_are_trained_on_without_nan",
        "test_segment_data.test_what_leaves_a_sample_out_is_one_row_with_what_to_do",
    ],
    "Device-side assert": [
        "test_indices.test_what_a_loss_has_no_class_for_is_named_by_its_sample_before_the_first_step "
        "test_indices.test_a_token_or_a_position_without_an_embedding_is_named_by_its_sample",
        "test_segment_data.test_what_leaves_a_sample_out_is_one_row_with_what_to_do",
        "test_indices.test_an_assertion_of_a_kernel_is_explained_and_the_run_resumes_bit_for_bit",
    ],
    "The loader hangs": [
        "test_feed.test_auto_is_resident_where_the_pack_takes_at_most_its_share_of_free_gpu_memory",
        "test_feed.test_workers_that_cannot_work_are_refused_before_they_start",
        "test_workers.test_workers_that_ram_has_no_room_for_are_not_started "
        "test_workers.test_a_reader_of_the_notebook_itself_is_not_sent_to_processes_that_cannot_import_it",
        "test_feed.test_an_interrupt_that_reaches_the_workers_too_ends_none_of_them",
        "test_workers.test_a_killed_worker_is_replaced_and_the_run_is_the_same_bit_for_bit "
        "test_workers.test_a_sample_that_kills_each_worker_ends_the_run_which_then_resumes_without_it",
    ],
    "GPU at 30 %": [
        "test_profile.test_the_verdict_finds_what_a_job_is_bound_by_and_predicts_what_its_change_brings "
        "test_advise.test_a_run_asked_what_limits_it_answers_and_goes_on_bit_equal",
        "test_sign_task.test_a_pack_decompresses_each_clip_once_and_the_guides_way_at_every_access "
        "test_fit.test_a_run_folder_holds_its_checkpoints_and_the_columns_of_the_guides_log",
        "test_loop.test_a_step_reads_nothing_from_the_device_but_on_log_steps "
        "test_profile.test_on_cuda_a_launch_bound_step_is_told_of_graphs_and_of_lines_that_wait",
    ],
    "No speed-up from a larger batch": [
        "test_finder.test_the_choice_is_within_5_percent_of_the_best_by_exhaustive_search",
        "test_advise.test_the_tasks_own_batch_size_is_not_overruled_by_speed",
        "test_receipt.test_the_rungs_are_the_groups_of_settings_in_which_the_plans_differ_and_each_brings_what_it_does",
    ],
    "No convergence": [
        "test_cli.test_another_batch_size_moves_lr_by_the_rule_and_says_so "
        "test_advise.test_lr_follows_the_optimizers_rule_up_to_sixteen_times_the_batch",
        "test_segment_task.test_warmup_ends_and_the_schedule_moves_at_every_step",
        "test_loop.test_evaluation_is_exact_whatever_the_batch_size "
        "test_loop.test_train_mode_returns_after_evaluation_and_validation_is_not_augmented",
        "test_surface.test_a_terminal_is_told_truth_and_prediction_of_the_samples",
    ],
    "CTC stays blank": [
        "test_hwdb_task.test_a_line_without_room_for_its_text_is_left_out_and_counted",
        "test_captcha.test_a_line_too_short_for_ctc_is_reported_when_it_is_packed",
        "test_hwdb_task.test_advice_gives_a_network_for_the_machine_and_a_reason_for_every_number",
    ],
    "Drive errors 5 and 107": [
        "test_stage.test_a_link_to_drive_is_still_drive "
        "test_stage.test_an_archive_comes_out_once_at_its_only_folder_with_a_receipt",
        "test_stage.test_what_a_mount_fails_to_give_is_tried_again_and_nothing_is_missing "
        "test_stage.test_a_mount_that_is_lost_within_a_copy_is_mounted_anew",
        "test_stage.test_a_mount_that_stops_answering_says_so_and_the_next_call_resumes "
        "test_stage.test_what_is_there_is_resumed_only_as_its_hash_says",
        "test_stage.test_drive_is_mounted_on_colab_when_needed_and_forced_when_stale",
        "test_keep.test_training_goes_on_while_drive_is_away_which_is_said_once_and_made_up_for "
        "test_keep.test_a_drive_that_stays_away_is_named_at_the_end_with_what_is_not_safe",
        "test_pack.test_a_disk_that_stops_responding_at_any_file_of_a_task_is_an_error_and_no_bad_sample",
    ],
    "Quota page": [
        "test_stage.test_pages_and_statuses_instead_of_a_file_are_explained",
        "test_stage.test_bad_sources_are_refused_in_words_and_nothing_is_published",
        "test_stage.test_a_drive_link_is_followed_past_the_virus_scan_page",
    ],
    "Session lost": [
        "test_resume.test_killed_at_any_moment_and_run_again_equals_uninterrupted",
        "test_resume.test_a_lost_local_folder_comes_back_from_where_it_is_kept "
        "test_keep.test_a_snapshot_that_is_damaged_gives_way_to_the_one_before_it "
        "test_keep.test_runs_are_listed_compared_and_watched_without_a_copy_of_their_weights",
        "test_keep.test_a_checkpoint_is_local_then_copied_then_confirmed_by_a_later_start",
        "test_shutdown.test_a_kernel_shut_down_finishes_the_step_saves_and_ends",
        "test_fit.test_release_gpu_gives_the_machine_back_only_when_the_run_is_on_another_disk",
    ],
    "Several processes on the GPU": [
        "test_gpu.test_two_cards_are_read_as_values_in_the_named_units",
        "test_fit.test_two_at_once_in_one_run_folder_is_refused",
        "test_finder.test_a_limit_in_bytes_is_kept_with_headroom "
        "test_feed.test_auto_is_resident_where_the_pack_takes_at_most_its_share_of_free_gpu_memory",
    ],
    "DDP does not start": [
        "test_launch.test_what_is_asked_of_two_processes_reaches_both_at_the_same_step "
        "test_launch.test_any_torchrun_trains_and_packs_once",
        "test_troubleshooting.test_what_goes_wrong_ends_with_its_entry",
        "test_launch.test_a_task_that_other_processes_cannot_import_is_refused_in_a_sentence",
        "test_launch.test_any_torchrun_trains_and_packs_once",
        "test_launch.test_any_other_error_is_that_of_the_rank_that_failed_first_with_its_traceback",
    ],
    "A process is lost or hangs": [
        "test_launch.test_after_a_kill_all_start_again_and_the_run_becomes_the_one_that_was_never_killed",
        "test_launch.test_an_error_of_ours_is_shown_once_and_not_tried_again",
        "test_launch.test_a_rank_that_hangs_is_named_within_the_timeout_and_all_start_again "
        "test_ranks.test_a_rank_that_hangs_or_dies_is_named_by_the_others",
        "test_ranks.test_memory_that_runs_out_on_one_rank_halves_the_parts_of_all_and_changes_nothing_else",
        "test_ranks.test_an_epoch_that_other_numbers_of_processes_continue_has_every_sample_once",
        "test_launch.test_whatever_ends_the_process_that_started_them_ends_all_and_the_run_is_saved "
        "test_launch.test_a_second_interrupt_ends_all_at_once",
    ],
    "Several GPUs are no faster": [
        "test_ranks.test_fifty_steps_are_those_of_one_process_that_accumulates_the_same_parts",
    ],
    "Wrong script or mode": [
        "test_pack.test_a_folder_of_the_packs_own_is_not_given_to_other_options_or_tasks",
        "test_sign_options.test_an_automatic_batch_size_reaches_the_loader",
        "test_loop.test_train_mode_returns_after_evaluation_and_validation_is_not_augmented",
    ],
    "Predictions differ between training and inference": [
        "test_fit.test_predict_reads_raw_files_with_the_runs_own_preprocessing",
        "test_fit.test_a_folder_that_is_no_run_is_refused_by_its_reason",
        "test_hwdb_task.test_a_line_gets_the_answer_in_a_padded_batch_that_it_gets_alone "
        "test_captcha.test_a_line_reads_the_same_in_any_batch",
    ],
    "Keys, columns and paths": [
        "test_pack.test_bad_samples_are_listed_with_file_value_rule_and_fix "
        "test_pack.test_nothing_usable_is_refused_with_what_the_first_file_lacks",
        "test_stage.test_bad_sources_are_refused_in_words_and_nothing_is_published",
        "test_sign_data.test_a_list_is_read_in_the_ways_people_write "
        "test_sign_data.test_a_damaged_list_gives_its_row_and_each_clip_without_a_label_has_one",
    ],
}


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=60)


def little_memory(pack, folder, patch) -> None:
    def model(card, plan):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    nb.fit(toy.with_(model=model), pack, toy.PLAN, folder / "run", receipt=False, progress=False)


def lost_loss(pack, folder, patch) -> None:
    task = toy.with_(loss=lambda model, batch, plan: (model(batch).sum() * torch.nan, 1))
    for _ in nb.train(task, nb.TrainState(task, pack, toy.PLAN), pack):
        continue


def wrong_label(pack, folder, patch) -> None:
    patch.setattr(indices, "DEVICES", ("cpu",))
    task = toy.with_(batch=lambda raw, plan, draws: {**toy.batch(raw, plan, draws), "label": raw["label"][:, 0] + 1})
    next(nb.train(task, nb.TrainState(task, pack, toy.PLAN), pack))


def small_shared_memory(pack, folder, patch) -> None:
    patch.setattr("os.statvfs", lambda path: namedtuple("Stat", "f_bavail f_frsize")(1, 512))
    patch.setattr("os.path.isdir", lambda path: True)
    open_feed(pack, toy.PLAN.replace(feed="workers", workers=4), torch.device("cpu"))


def stale_mount(pack, folder, patch) -> None:
    def read(file, count):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    patch.setenv("NBTOOLS_DRIVE", str(folder))
    (folder / "data").mkdir()
    (folder / "data" / "a.npy").write_bytes(bytes(9))
    patch.setattr(disk, "read", read)
    patch.setattr(transfer, "PAUSE", 0.001)
    nb.stage("drive:data", folder / "here")


def quota(pack, folder, patch) -> None:
    (folder / "data.tar").write_text("<!DOCTYPE html><title>Google Drive - Quota exceeded</title>")
    nb.stage(folder / "data.tar")


def machine_returned(pack, folder, patch) -> None:
    patch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    nb.fit(toy, pack, toy.PLAN, folder / "run", release_gpu=True)


def second_process(pack, folder, patch) -> None:
    with only_one(folder / "run"):
        nb.fit(toy, pack, toy.PLAN, folder / "run")


def too_many_processes(pack, folder, patch) -> None:
    patch.setenv("NBTOOLS_DEVICE", "cuda")
    patch.setattr("torch.cuda.device_count", lambda: 1)
    nb.launch(toy, pack, toy.PLAN, folder / "run", processes=2)


def other_task(pack, folder, patch) -> None:
    captcha.pack(pack.folder)


def other_classes(pack, folder, patch) -> None:
    other = dataclasses.replace(pack, card=dataclasses.replace(pack.card, classes=list("dcba")))
    nb.evaluate(nb.TrainState(toy, pack, toy.PLAN), other)


def wrong_path(pack, folder, patch) -> None:
    patch.setenv("NBTOOLS_DRIVE", str(folder))
    nb.stage("drive:nothing.tar")


def wrong_folder(pack, folder, patch) -> None:
    (folder / "notes.txt").write_text("no samples here")
    toy.pack(folder, into=folder / "pack")


PROVOKED = {
    little_memory: "Out of memory",
    lost_loss: "NaN",
    wrong_label: "Device-side assert",
    small_shared_memory: "The loader hangs",
    stale_mount: "Drive errors 5 and 107",
    quota: "Quota page",
    machine_returned: "Session lost",
    second_process: "Several processes on the GPU",
    too_many_processes: "DDP does not start",
    other_task: "Wrong script or mode",
    other_classes: "Predictions differ between training and inference",
    wrong_path: "Keys, columns and paths",
    wrong_folder: "Keys, columns and paths",
}


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("act", PROVOKED, ids=lambda act: act.__name__)
def test_what_goes_wrong_ends_with_its_entry(act, pack, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(NbtoolsError) as caught:
        act(pack, tmp_path, patch)
    message = str(caught.value)
    assert message.endswith((f". {see(PROVOKED[act])}", f"? {see(PROVOKED[act])}")), message
    assert message.count("See “") == 1


def sections() -> dict[str, str]:
    """Heading → the text below it."""
    parts = re.split(r"^## (.+)\n", PAGE, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_entry_that_the_code_names_exists_and_is_provoked_above():
    named = set()
    for path in (ROOT / "nbtools").rglob("*.py"):
        named |= set(re.findall(r'\bentry ?= ?"([^"]+)"', path.read_text()))
    assert named == set(PROVOKED.values())
    assert named <= sections().keys()


def test_each_entry_says_what_is_seen_done_and_left_and_each_promise_has_its_test():
    assert list(sections()) == list(PROMISES)
    known = {f"{p.stem}.{n}" for p in ROOT.glob("tests/*.py") for n in re.findall(r"^def (\w+)", p.read_text(), re.M)}
    for entry, text in sections().items():
        assert re.findall(r"^\*\*[\w ]+\*\*", text, re.M) == PARTS, entry
        done = text.split(PARTS[1])[1].split(PARTS[2])[0]
        assert len(re.findall("^- ", done, re.M)) == len(PROMISES[entry]), entry
        tests = {name for names in PROMISES[entry] for name in names.split()}
        assert tests <= known, tests - known


def test_an_entry_is_found_at_the_projects_address_and_without_one_by_its_page(monkeypatch):
    assert see("GPU at 30 %") == f"See “GPU at 30 %”: {ADDRESS}/blob/main/docs/troubleshooting.md#gpu-at-30-"

    def metadata(name):
        raise errors.PackageNotFoundError(name)

    monkeypatch.setattr(errors, "metadata", metadata)
    assert see("NaN") == "See “NaN”: docs/troubleshooting.md#nan"


def test_links_within_the_page_lead_to_its_headings_and_all_are_listed_at_its_top():
    anchors = {see(entry).rpartition("#")[2]: entry for entry in sections()}
    assert set(re.findall(r"\(#([^)]*)\)", PAGE)) <= anchors.keys()
    assert re.findall(r"\[([^]]+)\]\(#", PAGE.partition("\n## ")[0]) == list(sections())


def test_a_message_without_an_entry_and_one_with_several_arguments_are_as_they_were():
    assert str(TrainError("stop; go on")) == "stop; go on"
    assert str(TrainError("Done.", entry="NaN")) == f"Done. {see('NaN')}"
    assert str(TrainError("Done?", entry="NaN")) == f"Done? {see('NaN')}"
    assert PackError("rule", 3, "fix").args == ("rule", 3, "fix")


def takes(plan: nb.Plan, field: str, value: str) -> bool:
    try:
        return bool(plan.turn(**{field: plan.parse(field, value)}))
    except PlanError:
        return False


def test_every_option_command_and_preset_in_it_is_one(capsys):
    tasks = {"captcha": captcha, "hwdb": hwdb, "segment": segment, "sign": sign}
    helps = ""
    for words in (
        *(["train", name, "--help"] for name in tasks),
        *([c, "captcha", "--help"] for c in ("pack", "advise")),
    ):
        with pytest.raises(SystemExit):
            main(words)
        helps += capsys.readouterr().out
    assert set(re.findall(r"--[a-z][\w-]*", PAGE)) <= set(re.findall(r"--[a-z][\w-]*", helps))
    for command in re.findall(r"`python -m nbtools (\w+ [^`]+)`", PAGE):
        parser(command.split()).parse_args(command.split())
    plans = [task.PLAN for task in tasks.values()]
    for option, value in re.findall(r"(?<=[` ])--([a-z][\w-]*) ([\w.-]*\w)", PAGE):
        fitting = [plan for plan in plans if hasattr(plan, field := option.replace("-", "_"))]
        assert value == "auto" or not fitting or any(takes(plan, field, value) for plan in fitting), (option, value)
    presets = {name for task in tasks.values() for name in task.PRESETS}
    assert set(re.findall(r"--from ([\w.-]+)", PAGE)) <= presets
