"""`python -m agentservesim` is the command line."""

from agentservesim.cli.main import main

main()
