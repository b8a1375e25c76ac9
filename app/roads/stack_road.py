"""Fetches the stacks of a job from all its nodes.

Over roads of their own: an agent answers when the last rank has been looked at, and a road carries one command at a
time. A person who kills the job meanwhile does not wait for that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from agent.wire.stacks import GetStacks, Stacks
from app.errors import AgentRefusedError, AppError, IncompatibleAgentError
from app.roads.command_road import StreamRoad, knows_no_job, taken
from app.safe_text import LINE_LIMIT, clean
from app.stacks.groups import NodeStacks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


async def fetch_stacks(directories: Mapping[str, Path], job_id: str, *, is_native: bool) -> list[NodeStacks]:
    """Return what each node of a job answers; nodes that do not know the job are left out.

    Args:
        directories: Of the agents, by node.
        job_id: The job.
        is_native: With the frames of C and C++.

    Raises:
        AppError: No node has stacks of it: the first one's reason.
    """
    asked = (_of_node(node, path, GetStacks(job_id, is_native)) for node, path in directories.items())
    answers = await asyncio.gather(*asked)
    errors = [answer for answer in answers if isinstance(answer, AppError)]
    if len(errors) == len(answers):
        # That a node does not know the job says less than that another one does not answer.
        raise next((error for error in errors if not knows_no_job(error)), errors[0])
    return [
        NodeStacks(node, None, trouble_text(answer)) if isinstance(answer, AppError) else NodeStacks(node, answer)
        for node, answer in zip(directories, answers, strict=True)
        if not knows_no_job(answer)
    ]


def trouble_text(error: AppError) -> str:
    """Return why a node has no stacks, in clean words that need not name the node."""
    return clean(error.message if isinstance(error, AgentRefusedError) else str(error), LINE_LIMIT)


async def _of_node(node: str, directory: Path, command: GetStacks) -> Stacks | AppError:
    road = StreamRoad(node, directory)
    try:
        reply = taken(node, await road.request(command))
    except AppError as error:
        return error
    finally:
        await road.close()
    if not isinstance(reply, Stacks):
        return IncompatibleAgentError(node, f"it answered a request for stacks with {type(reply).__name__}")
    return reply
