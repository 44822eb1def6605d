"""Programs that XLA compiles three times faster, and that run slower.

Programs of tiny models and simulated kernels run for milliseconds and take seconds to compile, so
tests go without most of XLA's optimisations. Tests of accuracy, and those of `tests/live` that
generate many tokens, run what users run.

A program in one part takes a tenth less processor time than in parts that are compiled in parallel,
and the workers of a run have no processor to spare for these.
"""

# For XLA_FLAGS.
QUICK_FLAGS = (
    "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1"
)
