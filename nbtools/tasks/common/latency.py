from nbtools.tasks.common.metrics import measure_latency as measure_latency
