"""Groups of stacks as people read them."""

from __future__ import annotations

from agent.wire.stacks import KernelFacts, RankStacks, StackSource
from app.stacks.groups import NodeStacks, picture_of
from app.stacks.stack_text import MAX_GROUPS, Tone, picture_lines, summary_text
from ddpcore.wire_stacks import Frame, ThreadStack
from tests.support.stacks import BACKWARD, LIBRARIES, answer, frozen, in_step, one_frozen, standing, waiting


def said(*answers: NodeStacks, is_whole: bool = False) -> list[str]:
    return [line.text for line in picture_lines(picture_of(answers), is_whole=is_whole)]


def test_a_frozen_rank_beside_those_who_wait_for_it() -> None:
    assert said(*one_frozen()) == [
        "rank 2 (1 rank): frozen at train.py:38 in Trainer.step",
        "  pid 4002 on demo-1; seen by py-spy: its process is stopped, and its probe with it",
        "    torch/nn/functional.py:2460 in linear",
        "  > train.py:38 in Trainer.step",
        "  > train.py:88 in main",
        "  > train.py:120 in <module>",
        "    ... 2 frames of runpy",
        "    1 more thread: rankdeck-heart",
        "",
        "ranks 0-1, 3 (3 ranks): waiting in all_reduce #57, at train.py:41 in Trainer.step",
        "    torch/autograd/graph.py:865 in _engine_run_backward",
        "    torch/autograd/__init__.py:354 in backward",
        "    torch/_tensor.py:630 in Tensor.backward",
        "  > train.py:41 in Trainer.step",
        "  > train.py:88 in main",
        "  > train.py:120 in <module>",
        "    ... 2 frames of runpy",
        "    1 more thread: rankdeck-heart",
    ]


def test_the_whole_picture_has_every_frame_of_every_thread_and_the_kernels_words() -> None:
    assert said(answer("n", standing(0, in_step(38)[1:])), is_whole=True) == [
        "rank 0 (1 rank): at train.py:88 in main",
        "  pid 4000 on n",
        "  the kernel: the main thread sleeps in futex_wait_queue",
        "  > /home/me/project/train.py:88 in main",
        "  > /home/me/project/train.py:120 in <module>",
        "    <frozen runpy>:88 in _run_code",
        "    <frozen runpy>:198 in _run_module_as_main",
        "  thread rankdeck-heart of rank 0",
        "    /usr/lib/python3.11/threading.py:331 in Condition.wait",
    ]


def test_long_runs_of_library_frames_are_one_line() -> None:
    deep = [Frame(f"{LIBRARIES}torch/nn/modules/module.py", line, "_call_impl") for line in range(1, 9)]
    calls = [Frame(f"{LIBRARIES}lightning/loop.py", line, "run") for line in (1, 2)]
    frames = [*deep, *in_step(5)[:1], *calls, *in_step(5)[1:3], Frame("/usr/lib/python3.11/runpy.py", 3, "run")]

    assert said(answer("n", standing(0, frames)))[2:-1] == [
        "    torch/nn/modules/module.py:1 in _call_impl",
        "    torch/nn/modules/module.py:2 in _call_impl",
        "    torch/nn/modules/module.py:3 in _call_impl",
        "    ... 5 more frames of torch",
        "  > train.py:5 in Trainer.step",
        "    ... 2 frames of lightning",
        "  > train.py:88 in main",
        "  > train.py:120 in <module>",
        "    runpy.py:3 in run",
    ]


def test_one_frame_too_many_is_shown_rather_than_counted() -> None:
    four = [*BACKWARD, BACKWARD[0]]

    assert (
        len([text for text in said(answer("n", standing(0, in_step(5, *four)))) if text.startswith("    torch")]) == 4
    )


def test_native_frames_are_named_by_their_library() -> None:
    native = Frame("/usr/lib/x86_64-linux-gnu/libc.so.6", 0, "poll", is_native=True)

    assert "    poll of libc.so.6" in said(answer("n", standing(0, in_step(5, native))))


def test_a_rank_without_a_stack_says_what_the_kernel_says_and_why() -> None:
    kernel = KernelFacts("D", syscall=0, stack=["nfs_wait", "folio_wait"])
    rank = RankStacks(3, StackSource.KERNEL, 9, kernel=kernel, note="py-spy took too long")

    assert said(answer("n", rank)) == [
        "rank 3 (1 rank): blocked in the kernel, no stack is to be had",
        "  pid 9 on n; py-spy took too long",
        "  the kernel: the main thread sleeps and cannot be interrupted, in nfs_wait < folio_wait",
    ]


def test_what_only_a_part_of_the_kernel_tells_is_told() -> None:
    rank = RankStacks(3, StackSource.KERNEL, 9, kernel=KernelFacts("T", "do_signal_stop", 202))
    odd = RankStacks(4, StackSource.KERNEL, 9, kernel=KernelFacts("W"))

    lines = said(answer("n", rank, odd))

    assert lines[0] == "rank 3 (1 rank): frozen, no stack is to be had"
    assert lines[2] == "  the kernel: the main thread is stopped by a signal in do_signal_stop, system call 202"
    assert lines[-1] == "  the kernel: the main thread is in state W"


def test_a_rank_without_a_process_is_one_line() -> None:
    assert said(answer("n", RankStacks(3, StackSource.NONE, note="it has ended"))) == ["rank 3 (1 rank): it has ended"]


def test_what_is_left_out_is_counted() -> None:
    names = [ThreadStack(f"t{number}") for number in range(8)]
    main = ThreadStack("MainThread", frames=in_step(5)[:1], is_cut=True)
    rank = RankStacks(0, StackSource.PROBE, threads=[main, *names], num_threads_left_out=3)

    assert said(answer("n", rank))[2:] == [
        "    further out there are more frames",
        "    11 more threads: t0, t1, t2, t3, t4, t5, ...",
    ]
    assert said(answer("n", rank), is_whole=True)[-1] == "    3 more threads"


def test_a_page_ends_somewhere() -> None:
    ranks = [standing(rank, in_step(rank)) for rank in range(MAX_GROUPS + 2)]

    assert said(answer("n", *ranks))[-2:] == ["", "2 more groups of 2 ranks"]


def test_trouble_stands_above_all() -> None:
    lines = picture_lines(picture_of([answer("a", waiting(0)), NodeStacks("b", None, "no reply")]), is_whole=False)

    assert lines[0] == (Tone.TROUBLE, "b: no reply")
    assert lines[1].tone is Tone.BLANK


def test_headings_warn_of_who_is_stuck_and_of_who_does_not_wait_while_others_do() -> None:
    def tones(*ranks: RankStacks) -> list[Tone]:
        headings = {Tone.STUCK, Tone.ODD, Tone.USUAL}
        lines = picture_lines(picture_of([answer("n", *ranks)]), is_whole=False)
        return [line.tone for line in lines if line.tone in headings]

    assert tones(waiting(0), standing(1, in_step(1)), frozen(2)) == [Tone.ODD, Tone.STUCK, Tone.USUAL]
    assert tones(standing(0, in_step(1)), standing(1, in_step(2))) == [Tone.USUAL, Tone.USUAL]


def test_the_summary_counts() -> None:
    assert summary_text(picture_of(one_frozen())) == "job train: 4 ranks in 2 groups, taken in 40 ms"
    assert (
        summary_text(picture_of([answer("n", waiting(0), took_s=1.23)]))
        == "job train: 1 rank in 1 group, taken in 1.2 s"
    )
