"""The plan (a parallel layout), the mesh of ranks it spans, and sharded data parallelism applied from outside."""

from treadle.parallel.mesh import Mesh, join
from treadle.parallel.plan import Plan

__all__ = ["Mesh", "Plan", "join"]
