"""Phase and place, read off the main thread's stack."""

from __future__ import annotations

import pytest

from ddpcore.probe.stack import MAX_REMEMBERED_FRAMES, CodeRoots, Reading, StackReader, sendable
from ddpcore.wire import Phase, Place

TORCH = "/venv/lib/python3.11/site-packages/torch/"
ROOTS = CodeRoots(
    torch=(TORCH,),
    ddpcore=("/venv/lib/python3.11/site-packages/ddpcore/",),
    libraries=("/usr/lib/python3.11/", "/venv/lib/python3.11/site-packages/"),
    main_file="/home/me/train.py",
)
MAIN = ("/home/me/train.py", 90, "<module>")
STEP = ("/home/me/train.py", 57, "train_step")


def torch_frame(path: str, function: str) -> tuple[str, int, str]:
    return (TORCH + path, 1, function)


@pytest.fixture
def reader() -> StackReader:
    return StackReader(ROOTS)


@pytest.mark.parametrize(
    ("phase", "inner"),
    [
        (Phase.FORWARD, [torch_frame("nn/modules/module.py", "_call_impl")]),
        (Phase.FORWARD, [torch_frame("nn/functional.py", "cross_entropy")]),
        (
            Phase.BACKWARD,
            [torch_frame("autograd/graph.py", "_engine_run_backward"), torch_frame("_tensor.py", "backward")],
        ),
        (Phase.OPTIMIZER, [torch_frame("optim/adamw.py", "step")]),
        (Phase.OPTIMIZER, [torch_frame("nn/utils/clip_grad.py", "clip_grad_norm_")]),
        (
            Phase.DATA,
            [("/usr/lib/python3.11/selectors.py", 415, "select"), torch_frame("utils/data/dataloader.py", "__next__")],
        ),
        (Phase.CHECKPOINT, [torch_frame("serialization.py", "save")]),
        (Phase.BARRIER, [torch_frame("distributed/distributed_c10d.py", "all_reduce")]),
        (Phase.BARRIER, [("/venv/lib/python3.11/site-packages/ddpcore/barriers/named_barriers.py", 1, "barrier")]),
        (Phase.JOINING, [torch_frame("distributed/rendezvous.py", "_env_rendezvous_handler")]),
        (Phase.OTHER, [torch_frame("nn/modules/module.py", "state_dict")]),
        (Phase.OTHER, []),
    ],
)
def test_torch_s_frames_tell_the_phase(reader: StackReader, phase: Phase, inner: list[tuple[str, int, str]]) -> None:
    reading = reader.read([*inner, STEP, MAIN])

    assert reading.phase is phase
    assert reading.place == Place(file="/home/me/train.py", line=57, function="train_step")


def test_a_rank_without_input_that_answers_the_others_is_told_apart(reader: StackReader) -> None:
    inside = torch_frame("distributed/distributed_c10d.py", "all_reduce")
    shadowing = reader.read([inside, torch_frame("distributed/algorithms/join.py", "__exit__"), STEP, MAIN])

    assert shadowing.is_shadowing
    assert not reader.read([inside, STEP, MAIN]).is_shadowing


def test_a_forward_recomputed_in_backward_is_backward(reader: StackReader) -> None:
    stack = [
        torch_frame("nn/modules/module.py", "_call_impl"),
        torch_frame("autograd/graph.py", "_engine_run_backward"),
        STEP,
    ]

    assert reader.read(stack).phase is Phase.BACKWARD


def test_a_closure_s_forward_inside_the_optimizer_is_forward(reader: StackReader) -> None:
    stack = [torch_frame("nn/modules/module.py", "_call_impl"), torch_frame("optim/lbfgs.py", "step"), STEP]

    assert reader.read(stack).phase is Phase.FORWARD


def test_the_place_is_the_innermost_line_of_the_user_not_of_libraries_or_generated_code(reader: StackReader) -> None:
    stack = [
        ("<string>", 2, "__init__"),
        ("/venv/lib/python3.11/site-packages/numpy/core.py", 3, "dot"),
        ("/home/me/model.py", 12, "forward"),
        torch_frame("nn/modules/module.py", "_call_impl"),
        STEP,
        MAIN,
    ]

    assert reader.read(stack).place == Place(file="/home/me/model.py", line=12, function="forward")


def test_a_compiled_model_stands_at_the_user_s_lines(reader: StackReader) -> None:
    compiled = "/tmp/torchinductor_me/ab/cabcdef.py"
    stack = [
        (compiled, 84, "call"),
        torch_frame("_inductor/output_code.py", "__call__"),
        ("/home/me/train.py", 18, "torch_dynamo_resume_in_forward_at_17"),
        ("/home/me/train.py", 16, "forward"),
        torch_frame("_dynamo/eval_frame.py", "compile_wrapper"),
        torch_frame("nn/modules/module.py", "_call_impl"),
        ("/home/me/train.py", 40, "<module>"),
    ]

    assert reader.read(stack) == Reading(Phase.FORWARD, Place(file="/home/me/train.py", line=18, function="forward"))


def test_ddpcore_itself_is_no_place_but_its_examples_are(reader: StackReader) -> None:
    root = ROOTS.ddpcore[0]
    example = (f"{root}examples/bytegpt.py", 170, "train")

    assert reader.read([(f"{root}probe.py", 9, "report_step"), example]).place == Place(*example)


def test_an_installed_program_stands_at_its_main_script() -> None:
    main_file = "/venv/lib/python3.11/site-packages/trainer/__main__.py"
    reader = StackReader(CodeRoots(torch=(TORCH,), ddpcore=(), libraries=ROOTS.libraries, main_file=main_file))

    reading = reader.read(
        [torch_frame("optim/adamw.py", "step"), (main_file, 5, "<module>"), ("<frozen runpy>", 88, "_run_code")]
    )

    assert reading.place == Place(file=main_file, line=5, function="<module>")


def test_a_program_without_a_file_stands_at_its_outermost_frame(reader: StackReader) -> None:
    reading = reader.read(
        [torch_frame("optim/adamw.py", "step"), ("<string>", 1, "<module>"), ("<frozen runpy>", 88, "_run")]
    )

    assert reading.place == Place(file="<string>", line=1, function="<module>")


def test_what_is_left_at_exit_is_nobody_s_place(reader: StackReader) -> None:
    assert reader.read([]).place is None
    assert reader.read([("<frozen runpy>", 88, "_run")]).place is None
    assert (
        reader.read(
            [("/usr/lib/python3.11/threading.py", 1, "join"), (f"{ROOTS.ddpcore[0]}probe.py", 300, "_end")]
        ).place
        is None
    )


def test_a_frame_s_line_is_never_remembered(reader: StackReader) -> None:
    first = reader.read([("/home/me/train.py", 1, "f")]).place
    second = reader.read([("/home/me/train.py", 2, "f")]).place

    assert (first, second) == (Place("/home/me/train.py", 1, "f"), Place("/home/me/train.py", 2, "f"))


def test_the_memory_of_frames_is_bounded(reader: StackReader) -> None:
    for number in range(MAX_REMEMBERED_FRAMES + 10):
        reader.read([(f"/home/me/generated_{number}.py", 1, "f")])

    assert len(reader._kinds) <= MAX_REMEMBERED_FRAMES


@pytest.mark.parametrize(
    ("text", "sent"),
    [("plain", "plain"), ("\u00e9t\u00e9", "\u00e9t\u00e9"), ("bad\udcff", "bad?"), ("x" * 99, "x" * 10)],
)
def test_text_is_cut_and_made_fit_for_utf_8(text: str, sent: str) -> None:
    assert sendable(text, 10) == sent
