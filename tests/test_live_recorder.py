"""The step log of a live engine: what `calibrate` reads comes out, whatever the loop and the disk do."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from agentservesim.errors import InputError
from agentservesim.live.recorder import FLUSH_S, StepRecorder, batch_shape
from agentservesim.validation.step_log import read_steps


def scheduled(recorder, step_id, now_s, prefills=(), contexts=(), preempted=(), **counts):
    counts = {"running": 1, "waiting": 0, "free_blocks": 9, "parked_blocks": 2, **counts}
    recorder.scheduled(step_id, list(prefills), list(contexts), list(preempted), now_s=now_s, **counts)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_come_back_from_the_file_as_calibrate_reads_them(tmp_path):
    path = tmp_path / "steps.jsonl"
    recorder = StepRecorder(path)
    scheduled(recorder, 0, 10.0, prefills=[(100, 0), (28, 64)])
    recorder.updated(0, 2, 10.25)
    scheduled(recorder, 1, 10.5, prefills=[(7, 96)], contexts=[101, 93])
    recorder.updated(1, 0, 11.0)
    recorder.close(11.0)
    first, second = read_steps(path)
    assert (first.prefills, first.decodes, first.spread) == (((100, 0), (28, 64)), 0, None)
    assert first.seconds == pytest.approx(0.25)
    assert (second.prefills, second.decodes, second.decode_context_tokens) == (((7, 96),), 2, 194)
    assert second.spread == (93, 101)
    assert second.seconds == pytest.approx(0.75), "the host's time between two steps belongs to the second"


def test_a_step_after_a_pause_counts_from_its_own_start(tmp_path):
    path = tmp_path / "steps.jsonl"
    recorder = StepRecorder(path)
    scheduled(recorder, 0, 1.0, contexts=[5])
    recorder.updated(0, 0, 1.5)
    scheduled(recorder, 1, 60.0, prefills=[(9, 0)])
    recorder.updated(1, 0, 60.125)
    recorder.close(61.0)
    assert [row["seconds"] for row in lines(path)] == pytest.approx([0.5, 0.125])


def test_two_steps_in_flight_count_one_after_the_other(tmp_path):
    """Asynchronous: the second is scheduled while the first runs, and its own last request ends with it."""
    path = tmp_path / "steps.jsonl"
    recorder = StepRecorder(path)
    scheduled(recorder, 0, 1.0, prefills=[(64, 0)])
    scheduled(recorder, 1, 1.01, contexts=[65])
    recorder.updated(0, 1, 1.5)
    scheduled(recorder, 2, 1.51, contexts=[66])
    recorder.updated(1, 1, 1.75)
    recorder.updated(2, 0, 2.0)
    scheduled(recorder, 3, 9.0, prefills=[(64, 0)])
    scheduled(recorder, 4, 9.01, contexts=[65])
    recorder.updated(3, 0, 9.5)  # a stop token ended the request, and step 4 is still under way
    recorder.updated(4, 0, 9.75)
    recorder.close(9.75)
    assert [row["step"] for row in lines(path)] == [0, 1, 2, 3, 4]
    assert [row["seconds"] for row in lines(path)] == pytest.approx([0.5, 0.25, 0.25, 0.5, 0.25])


def test_an_empty_step_is_no_row_and_its_preemptions_go_to_the_next(tmp_path):
    path = tmp_path / "steps.jsonl"
    recorder = StepRecorder(path)
    scheduled(recorder, 0, 1.0, preempted=["a"], running=0, waiting=2)
    recorder.updated(0, 2, 1.01)
    scheduled(recorder, 1, 1.02, contexts=[33], preempted=["b"], running=1, waiting=3)
    recorder.updated(1, 0, 1.25)
    scheduled(recorder, 2, 2.0, contexts=[34])
    recorder.updated(2, 0, 2.25)
    recorder.close(3.0)
    first, second = lines(path)
    assert first["preempted"] == ["a", "b"] and second["preempted"] == []
    assert (first["running"], first["waiting"], first["free_blocks"], first["parked_blocks"]) == (1, 3, 9, 2)
    assert read_steps(path)[0].seconds == pytest.approx(0.24)


def test_rows_reach_the_file_within_a_second_and_when_the_engine_runs_dry(tmp_path):
    path = tmp_path / "steps.jsonl"
    recorder = StepRecorder(path)
    now_s = 100.0
    for step in range(40):
        scheduled(recorder, step, now_s, contexts=[50 + step])
        now_s += 0.1
        recorder.updated(step, 1, now_s)
        written_s = lines(path)[-1]["ended_s"]
        assert now_s - written_s <= FLUSH_S + 0.1
    scheduled(recorder, 40, now_s, contexts=[90])
    recorder.updated(40, 0, now_s + 0.01)
    assert len(lines(path)) == 41


def test_a_path_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    with pytest.raises(InputError, match=r"step log .*missing/steps.jsonl: cannot be written"):
        StepRecorder(tmp_path / "missing" / "steps.jsonl")
    with pytest.raises(InputError, match=r"/dev/full: cannot be written: .*No space left"):
        StepRecorder("/dev/full")


FILLS_UP = """
import resource, sys
from agentservesim.live.recorder import StepRecorder
recorder = StepRecorder(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for step in range(100):
    if step == int(sys.argv[2]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    recorder.scheduled(step, [], [100 + step], [], 1, 0, 9, 0, float(step))
    recorder.updated(step, 1, step + 0.5)
recorder.close(100.0)
print(recorder.steps, recorder.lost)
"""


@pytest.mark.parametrize("space_again_at", [60, 1000], ids=["has space again", "stays full"])
def test_a_disk_that_fills_up_loses_counted_rows_and_breaks_no_line(tmp_path, space_again_at):
    path = tmp_path / "steps.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FILLS_UP, str(path), str(space_again_at)],
        capture_output=True,
        text=True,
        check=True,
    )
    steps, lost = map(int, done.stdout.split())
    assert steps == 100 and 0 < lost < 100
    assert len(read_steps(path)) == steps - lost
    assert "rows are lost from now on" in done.stderr and f"{lost} of 100 rows were lost" in done.stderr


def test_the_shape_of_a_batch_is_the_simulators():
    requests = {
        "chunk": SimpleNamespace(num_computed_tokens=600),
        "decode": SimpleNamespace(num_computed_tokens=41),
        "one-token prompt": SimpleNamespace(num_computed_tokens=1),
        "last token of a prompt": SimpleNamespace(num_computed_tokens=65),
    }
    batch = {"chunk": 512, "decode": 1, "one-token prompt": 1, "last token of a prompt": 1}
    assert batch_shape(batch, requests) == ([(512, 88), (1, 0)], [41, 65])
