"""Headless commands, one file each: ``add_arguments(parser)`` and ``run(args)``."""
