"""The faults, each with what is true of it."""

from __future__ import annotations

from app.diagnosis.causes import Cause
from tests.corpus.reported.truth import EXIT_S, SLOW_S, Program

MISMATCH = frozenset({Cause.MISMATCH})
COUNTS = frozenset({Cause.MISMATCH, Cause.FEWER_CALLS})
HELD_UP = frozenset({Cause.STRAGGLER, *(cause for cause in Cause if cause == "standstill")})
NOT_EXITING = frozenset(cause for cause in Cause if cause in {"not_exiting", "straggler"})
EXITED = frozenset({Cause.EXITED})

UNEVEN_CALLS = (
    Program("uneven.rank_0_evaluates", 3, COUNTS, ((0,),), (r"{culprit}", "broadcast|barrier"), EXIT_S, in_ci=True),
    Program("uneven.sanity_check", 3, COUNTS, ((0,),), ("broadcast|all_reduce",), EXIT_S),
    Program("uneven.early_return", 3, COUNTS, ((0,), (0, 1, 2)), (r"{culprit}", "barrier"), EXIT_S),
    Program(
        "uneven.fewer_batches_and_out",
        2,
        frozenset({Cause.FEWER_CALLS}),
        ((1,),),
        ("all_reduce",),
        EXIT_S,
        ends_itself=True,
        in_ci=True,
    ),
    Program(
        "uneven.fewer_batches_and_barrier",
        3,
        COUNTS,
        ((1,),),
        (r"{culprit}", "barrier", "all_reduce"),
        EXIT_S,
    ),
    Program("uneven.early_stop", 3, COUNTS, ((2,),), (r"{culprit}", "all_gather", "all_reduce"), EXIT_S),
    Program("uneven.skipped_batch", 3, COUNTS, ((1,),), (r"{culprit}", "barrier"), EXIT_S),
    Program("uneven.swallowed_exception", 3, COUNTS, ((1,), (), (0, 1, 2)), ("all_reduce",), EXIT_S, ends_itself=True),
    Program("uneven.accumulation", 3, COUNTS, ((1,),), (r"{culprit}", "barrier"), EXIT_S),
    Program("uneven.empty_shard", 3, COUNTS, ((2,),), ("all_gather", "{victims}"), EXIT_S),
    Program("uneven.no_sync_once", 3, MISMATCH, ((1,), ()), ("all_reduce.*doubled",), EXIT_S, ends_itself=True),
    Program("uneven.reduced_on_condition", 3, MISMATCH, ((1,), ()), ("all_reduce",), EXIT_S, ends_itself=True),
    Program("uneven.gather_on_main", 3, COUNTS, ((1, 2),), ("all_gather", "{victims}"), EXIT_S, ends_itself=True),
    Program(
        "uneven.unused_parameters",
        3,
        EXITED,
        ((1,),),
        ("Expected to have finished reduction",),
        EXIT_S,
        ends_itself=True,
    ),
)

OTHER_ARGUMENTS = (
    Program(
        "arguments.all_reduce_sizes",
        3,
        MISMATCH,
        ((1,), (), (0, 1, 2)),
        ("all_reduce",),
        EXIT_S,
        ends_itself=True,
    ),
    Program(
        "arguments.all_gather_shapes", 3, MISMATCH, ((2,), (), (0, 1, 2)), ("all_gather",), EXIT_S, ends_itself=True
    ),
    Program(
        "arguments.all_reduce_dtypes", 3, MISMATCH, ((1,), (), (0, 1, 2)), ("all_reduce",), EXIT_S, ends_itself=True
    ),
    Program("arguments.broadcast_sources", 3, MISMATCH, ((1,), ()), ("src|source|root", "{culprit}"), EXIT_S),
    Program("arguments.object_list_sources", 2, MISMATCH, ((0, 1), (), (1,)), ("{culprit}",), EXIT_S),
    Program("arguments.different_order", 3, MISMATCH, ((1,), (), (0, 1, 2)), ("all_reduce",), EXIT_S, ends_itself=True),
    Program(
        "arguments.two_models_in_other_order",
        3,
        MISMATCH,
        ((1,), ()),
        ("all_reduce.*2,700 elements",),
        EXIT_S,
        ends_itself=True,
    ),
    Program("arguments.thread_of_metrics", 3, MISMATCH, ((1,), ()), ("all_reduce",), EXIT_S, ends_itself=True),
    Program(
        "arguments.gather_against_all_reduce",
        3,
        MISMATCH,
        ((0,),),
        ("gather", "all_reduce", "{culprit}"),
        EXIT_S,
        in_ci=True,
    ),
    Program("arguments.layer_dropped", 3, MISMATCH, ((1,), ()), ("all_gather",), EXIT_S, ends_itself=True),
    Program("arguments.norm_left_out", 3, MISMATCH, ((1,), ()), ("all_reduce",), EXIT_S, ends_itself=True),
    Program("arguments.different_models", 3, EXITED | MISMATCH, ((1,),), (), EXIT_S, ends_itself=True),
    Program("arguments.new_group_on_some", 3, MISMATCH, ((2,), (0, 1, 2)), ("new_group", "{victims}"), in_ci=True),
    Program("arguments.groups_in_other_order", 2, MISMATCH, ((0, 1), ()), ("all_reduce",), EXIT_S),
)

MESSAGES = (
    Program("messages.both_receive", 2, MISMATCH, ((0, 1),), ("recv", "{culprit}"), in_ci=True),
    Program("messages.send_nobody_receives", 3, MISMATCH, ((0,), (0, 2), (2,)), ("send", "{culprit}")),
    Program("messages.ring", 4, MISMATCH, ((0, 1, 2, 3),), ("recv", "{culprit}")),
    Program("messages.one_micro_batch_more", 2, MISMATCH, ((0, 1), (0,), (1,)), ("recv", "{culprit}")),
    Program("messages.actor_gives_up", 4, MISMATCH, ((2,),), ("barrier", "{culprit}")),
    Program("messages.batch_of_other_order", 2, MISMATCH, ((0, 1),), ("{culprit}",)),
)

STANDING = (
    Program("standing.all_in_open", 3, HELD_UP, ((0, 1, 2), ()), ("{culprit}|pathlib",), in_ci=True),
    Program("standing.one_in_open", 2, HELD_UP, ((1,),), ("{culprit}", "all_reduce")),
    Program("standing.lock", 2, HELD_UP, ((1,),), ("{culprit}", "all_reduce")),
    Program("standing.lock_across_ranks", 3, HELD_UP, ((), (1, 2)), ("{culprit}", "barrier")),
    Program("standing.loader_worker_stuck", 2, HELD_UP, ((1,),), ("{culprit}", r"pid \d+|process \d+", "all_reduce")),
    Program(
        "standing.loader_worker_killed",
        2,
        EXITED,
        ((1,),),
        ("DataLoader worker|EOFError|ConnectionResetError",),
        6.0,
        ends_itself=True,
    ),
    Program("standing.child", 2, HELD_UP, ((0,),), ("{culprit}", "barrier", "sleep|pid|process")),
    Program("standing.gil", 2, frozenset({Cause.SILENT}), ((1,),), ("{culprit}",), in_ci=True),
    Program("standing.stopped", 2, frozenset({Cause.FROZEN}), ((1,),), ("all_reduce",), EXIT_S, in_ci=True),
    Program("standing.tracker", 2, HELD_UP, ((0,),), ("{culprit}", "barrier")),
)

STARTS = (
    Program("starting.late_to_init", 2, frozenset({Cause.NOT_JOINED}), ((1,),), ("{culprit}", "init_process_group")),
    Program(
        "starting.timeout_15",
        2,
        frozenset({Cause.NOT_JOINED}),
        ((1,),),
        ("{culprit}", "init_process_group"),
        ends_itself=True,
    ),
    Program(
        "starting.stranger_on_the_port",
        2,
        frozenset({Cause.TRANSPORT}),
        ((), (0, 1)),
        (r"MASTER_PORT|port \d",),
    ),
    Program("starting.same_rank", 2, MISMATCH, ((1,),), ("as rank 0", "{culprit}"), 6.0),
    Program("starting.larger_world", 2, MISMATCH, ((),), ("for 3", "{culprit}"), 6.0),
    Program("starting.own_ports", 2, MISMATCH, ((), (0, 1)), (r"rank 0 to .*:\d+", "{culprit}"), 6.0),
    Program("starting.port_in_use", 2, EXITED, ((0,),), ("failed to listen",), EXIT_S, ends_itself=True),
    Program("starting.second_group", 3, frozenset({Cause.TRANSPORT}), ((),), ("init_process_group", r"127.0.0.1:\d+")),
    Program("starting.spawned", 1, HELD_UP | {Cause.NOT_JOINED}, ((1,), (), (0,)), (), is_optional=True),
)

ENDINGS = (
    Program("endings.missing_20", 2, HELD_UP, ((1,),), ("{culprit}", "barrier"), ends_itself=True, in_ci=True),
    Program(
        "endings.mismatch_20", 3, MISMATCH, ((1,),), ("{culprit}", "barrier", "all_reduce"), EXIT_S, ends_itself=True
    ),
    Program("endings.stopped_20", 2, frozenset({Cause.FROZEN}), ((1,),), ("all_reduce",), EXIT_S, ends_itself=True),
    Program("endings.missing_5", 2, HELD_UP, ((1,),), ("{culprit}", "barrier"), ends_itself=True),
    Program("endings.exception", 2, EXITED, ((1,),), ("shard-00001",), EXIT_S, ends_itself=True, in_ci=True),
    Program("endings.exception_and_cleanup", 3, MISMATCH, ((1,),), ("{culprit}", "barrier", "all_reduce"), EXIT_S),
    Program(
        "endings.out_of_budget", 2, frozenset({Cause.FEWER_CALLS}), ((0,),), ("all_reduce",), EXIT_S, ends_itself=True
    ),
    Program("endings.exception_and_upload", 2, EXITED, ((1,),), ("not a number", "{culprit}"), EXIT_S),
    Program("endings.logged_exit", 2, EXITED | COUNTS, ((1,),), (), EXIT_S, ends_itself=True),
    Program("endings.interrupted", 2, EXITED | COUNTS, ((1,),), (), EXIT_S, ends_itself=True),
    Program("endings.killed", 2, EXITED, ((1,),), ("SIGKILL",), EXIT_S, ends_itself=True),
    Program("endings.segmentation_fault", 2, EXITED, ((1,),), ("SIGSEGV",), EXIT_S, ends_itself=True),
    Program("endings.monitored_barrier", 2, HELD_UP, ((1,),), ("{culprit}", "monitored_barrier"), ends_itself=True),
    Program("endings.cancelled", 2, HELD_UP, ((1,),), ("{culprit}", "barrier"), ends_itself=True),
    Program("endings.out_of_memory", 2, frozenset({Cause.OOM}), ((1,),), ("memory",), EXIT_S, ends_itself=True),
    Program("endings.thread_left", 2, NOT_EXITING, ((1,),), ("{culprit}",), in_ci=True),
    Program("endings.full_queue", 2, NOT_EXITING, ((0,),), ("Queue",)),
    Program("endings.interrupted_hang", 3, HELD_UP, ((1,),), ("{culprit}", "barrier"), ends_itself=True),
    Program("endings.exit_handler", 2, NOT_EXITING, ((0,),), ("join|atexit",)),
)

SLOW = (
    Program("slow.thirty_percent", 2, frozenset({Cause.STRAGGLER}), ((1,),), (), SLOW_S),
    Program("slow.twice", 3, frozenset({Cause.STRAGGLER}), ((2,),), (), SLOW_S),
    Program("slow.in_turns", 3, frozenset({Cause.STRAGGLER}), ((1, 2),), (), SLOW_S),
    Program("slow.two_of_four", 4, frozenset({Cause.STRAGGLER}), ((2, 3),), (), SLOW_S),
    Program("slow.rank_0_logs", 2, frozenset({Cause.STRAGGLER}), ((0,),), (), SLOW_S),
    Program("slow.loader", 2, frozenset({Cause.STRAGGLER}), ((1,),), (), SLOW_S),
)

FAULTS = UNEVEN_CALLS + OTHER_ARGUMENTS + MESSAGES + STANDING + STARTS + ENDINGS + SLOW
