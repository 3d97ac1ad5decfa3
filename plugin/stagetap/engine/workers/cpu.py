"""The CPU worker with capture."""

from vllm.v1.worker.cpu_worker import CPUWorker

from stagetap.engine.workers import CapturesTaps


class TapWorker(CapturesTaps, CPUWorker):
    """Chosen by the configuration hook on the CPU platform."""
