"""How far the simulator is from real engines: paired comparison, calibration, and the errors known so far.

records.py        a real run's calls, from a file
pairing.py        which simulated call is which real one
metrics.py        the numbers of both, and the errors
findings.py       the errors in words
validate.py       simulate a config and compare it with a real run
report.py         plots
paired_seeds.py   whether two policies differ by more than the seeds do
step_log.py       logs of real steps
fitting.py        a residual from a log of steps
request_fit.py    a few coefficients from per-request times alone
"""
