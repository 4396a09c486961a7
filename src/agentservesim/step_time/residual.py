"""What a back end misses of a real step: host time, launch gaps, throttling. Seconds over the batch's shape.

    corrected = operators + residual,   residual = sum of coefficient * feature

A residual has two sets of coefficients, because an engine runs two kinds of step: `decode_only` (replayed as
one CUDA graph) and `with_prefill`. Features, each cut to the range it was fitted in (`ranges`), so that the
correction stays what it was at the range's edge:

    step                      1
    decodes                   sequences that decode
    context_tokens            sum of their contexts
    prefills                  chunks of prefill
    prefill_tokens            new tokens of all chunks
    NAME_over_N               max(0, NAME - N): the slope changes at N
    operators                 the back end's own time of the step, in microseconds: throttling is a factor

Coefficients are microseconds a unit. The corrected time is never below MIN_SHARE of the back end's.

A residual is a YAML file, written and read by `Residual.to_yaml` and `load_residual`:

    gpu: rtx_pro_6000_server      cluster.gpu, cluster.model and cluster.tp that it was fitted for
    model: llama-3.1-8b
    tp: 1
    backend: tables               the back end whose seconds it corrects
    engine: vLLM 0.19             what was measured
    source: ...                   where the measurements come from, in words
    date: 2026-01-31              of the fit
    shapes: 16                    distinct shapes (prefill tokens, decodes) of the fit
    steps: 2592                   real steps behind them
    error:                        |predicted - real| / real of a step's seconds, median and 90th percentile
      uncorrected: {median: 0.01, p90: 0.05}     the back end alone
      in_sample: {median: 0.01, p90: 0.03}
      held_out: {median: 0.02, p90: 0.04}        each shape predicted by a fit that did not see it
    ranges:                       [lowest, highest] of each feature fitted, `operators` in microseconds
      decodes: [4, 16]
      prefill_tokens: [0, 16384]
    decode_only: {step: -12.5, decodes: 3.1}
    with_prefill: {step: 310.0, prefill_tokens: 1.5, prefill_tokens_over_512: 0.4}
    notes: ...                    optional

To make one: `residual_fit.fit_residual(samples, ...)` over `StepSample`s, then `to_yaml`. To use one:
`CorrectedStepTime(backend, residual)` (corrected.py), or `step_time: {residual: FILE}` in a config.
"""
