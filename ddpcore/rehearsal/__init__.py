"""Runs a program for GPUs on the CPU: `rankdeck run --rehearse`, by the launch plug-in and RANKDECK_REHEARSAL.

Three things are replaced in torch, in this process and before the program's first line: devices named in calls
(`device_arguments`), the functions of `torch.cuda` and `torch.accelerator` (`gpus`), process groups and what wraps
models for them (`process_groups`). `rehearsal` puts all in place.
"""
