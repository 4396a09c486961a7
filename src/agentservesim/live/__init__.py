"""Real vLLM: the plug-in that runs the same policy objects, the router, the replay client, the recorder.

identity.py, settings.py    what travels with a request, and with the engine's configuration
vllm_plugin.py              the scheduler classes that vLLM loads
vllm_pool.py                protection in vLLM's own block pool
vllm_queue.py               vLLM's waiting queue, for policies that change their mind
programs.py, planes.py      the PCB table and the planes, over requests instead of a trace
supervision.py              what a policy may do to a server: nothing
recorder.py, decision_log.py    what steps took, what was decided
versions.py                 the vLLM versions this was tested with
"""
