"""What runs in the Jobs of a run and what launches them.

Importing this package makes the packages that travel in `asyncgrpo.pyz` importable, so that a process which somebody
else starts (vLLM loading its middleware, a spawned rollout child) needs nothing but the program's folder on its path.
"""

from jobs.bundle import activate

__version__ = "0.1.0"

activate()
