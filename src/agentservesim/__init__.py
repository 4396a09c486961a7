"""AgentServeSim: simulate LLM agent programs on vLLM-exact serving engines."""

__version__ = "0.1.0"
