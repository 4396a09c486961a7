"""Learn a generator from a trace, write it as YAML, and find it again as a workload."""

from agentservesim.workload.fit.files import is_fit, read_fit, to_yaml
from agentservesim.workload.fit.learn import Learned, learn

__all__ = ["Learned", "is_fit", "learn", "read_fit", "to_yaml"]
