"""The healthy programs: what looks like a fault to a watcher that knows too little."""

from __future__ import annotations

from tests.corpus.reported.truth import Program

HEALTHY = (
    Program("healthy.plain", 2),
    Program("healthy.rank_0_evaluates_alone", 2, in_ci=True),
    Program("healthy.sanity_check", 3),
    Program("healthy.checkpoints", 2),
    Program("healthy.uneven_with_join", 2),
    Program("healthy.accumulation", 2),
    Program("healthy.late_start", 2),
    Program("healthy.sub_groups", 4),
    Program("healthy.pipeline", 3),
    Program("healthy.slow_first_batch", 2),
    Program("healthy.first_downloads", 2),
    Program("healthy.late_end", 2),
    Program("healthy.uneven_work", 3),
    Program("healthy.pauses", 2),
    Program("healthy.checkpoint_in_background", 2),
    Program("healthy.evaluator_waits", 4),
    Program("healthy.ends_one_after_another", 3),
    Program("starting.spawned_and_well", 1),
)
